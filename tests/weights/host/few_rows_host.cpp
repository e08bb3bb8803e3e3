// Runs few_rows.cu, shared_rows.cu (SHARED_ROWS) or wide_rows.cu (WIDE_ROWS) on a CPU: threads of a program are fibers that take turns at barriers. It checks the
// alignment and the range of every copy. The macros of the kernel and SOURCE, its path, come from the compiler.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define ON_HOST 1
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define SHARED static
using std::max;
using std::min;

struct uint2 { uint32_t x, y; };
static inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
struct uint4 { uint32_t x, y, z, w; };
struct uint3 { unsigned x, y, z; };
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
static uint3 threadIdx, blockIdx, gridDim;

static float __uint_as_float(uint32_t bits) { float f; std::memcpy(&f, &bits, 4); return f; }
static uint32_t __float_as_uint(float f) { uint32_t bits; std::memcpy(&bits, &f, 4); return bits; }
static uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t both = (uint64_t)b << 32 | a;
    uint32_t made = 0;
    for (int i = 0; i < 4; i++) made |= (uint32_t)(both >> (8 * (selector >> (4 * i) & 7)) & 255) << (8 * i);
    return made;
}
static inline float rsqrtf(float f) { return 1.0f / std::sqrt(f); }

static void fail(const char* what) { std::fprintf(stderr, "few_rows: %s\n", what); std::abort(); }

struct Range { const uint8_t* begin; int64_t bytes; };
static std::vector<Range> readable;
static void check(const void* from, int bytes) {
    const uint8_t* at = (const uint8_t*)from;
    if ((uintptr_t)at % bytes) fail("a copy is not aligned");
    for (const Range& one : readable)
        if (at >= one.begin && at + bytes <= one.begin + one.bytes) return;
    fail("a copy reads behind a tensor");
}

static std::vector<uint8_t> memory;
static uint8_t* host_shared() {
    return (uint8_t*)(((uintptr_t)memory.data() + 1023) / 1024 * 1024);
}
static void copy(void* to, const void* from, int size, uint32_t bytes) {
    if ((uintptr_t)to % size) fail("a copy's place is not aligned");
    if ((uint8_t*)to + size > memory.data() + memory.size()) fail("a copy's place is not in shared memory");
    std::memset(to, 0, size);
    if (bytes) { check(from, size); std::memcpy(to, from, bytes); }
}
static void copy16(void* to, const void* from, uint32_t bytes) { copy(to, from, 16, bytes); }
static void copy8(void* to, const void* from, uint32_t bytes) { copy(to, from, 8, bytes); }
static void copy4(void* to, const void* from) { copy(to, from, 4, 4); }
static void commit() {}
#define WAIT_GROUP(n)
static int __any_sync(uint32_t, int mine) { return mine; }  // for what gives the same result either way
static void launch_next() {}
static void fetch_ahead(const void*) {}
static void wait_before() {}

static void __threadfence() {}
static int atomicAdd(int* at, int value) { const int before = *at; *at += value; return before; }
static float load_fresh(const float* at) { return *at; }

static float from_half(uint16_t bits) { _Float16 h; std::memcpy(&h, &bits, 2); return (float)h; }
static uint16_t to_half(float f) { _Float16 h = (_Float16)f; uint16_t bits; std::memcpy(&bits, &h, 2); return bits; }
static uint16_t to_bfloat16(float f) {
    uint32_t bits = __float_as_uint(f);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static float operand(uint16_t bits);
static uint16_t to_operand(float f);
static uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t made = 0;
    for (int i = 0; i < 32; i += 16) {
        const double sum = (double)operand(a >> i) * operand(b >> i) + operand(c >> i);
        made |= (uint32_t)to_operand((float)sum) << i;
    }
    return made;
}
static uint32_t and_or(uint32_t a, uint32_t mask, uint32_t base) { return (a & mask) | base; }
static float e4m3(uint8_t code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const float size = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp((float)mantissa, -9);
    return code & 128 ? -size : size;
}
static uint32_t e4m3_half2(uint16_t codes) {
    return to_half(e4m3(codes & 255)) | (uint32_t)to_half(e4m3(codes >> 8)) << 16;
}

// Fibers.
static std::vector<ucontext_t> fibers;
static ucontext_t scheduler;
static std::vector<char> done;
static int running, num_threads;
struct Barrier { int arrived = 0, turn = 0; };
static Barrier whole;
static std::vector<Barrier> warps;
static uint32_t exchanged[64][32][8];

static void wait(Barrier& barrier, int count) {
    const int turn = barrier.turn;
    if (++barrier.arrived == count) {
        barrier.arrived = 0;
        barrier.turn++;
        return;
    }
    while (barrier.turn == turn) swapcontext(&fibers[running], &scheduler);
}
static void __syncthreads() { wait(whole, num_threads); }
static void __syncwarp() { wait(warps[threadIdx.x / 32], 32); }
static float __shfl_xor_sync(uint32_t, float value, int away) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    exchanged[warp][lane][7] = __float_as_uint(value);
    __syncwarp();
    const float found = __uint_as_float(exchanged[warp][lane ^ away][7]);
    __syncwarp();
    return found;
}
static uint32_t most_of_warp(uint32_t value) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    exchanged[warp][lane][7] = value;
    __syncwarp();
    uint32_t most = 0;
    for (int other = 0; other < 32; other++) most = std::max(most, exchanged[warp][other][7]);
    __syncwarp();
    return most;
}
static void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    auto& all = exchanged[warp];
    for (int i = 0; i < 4; i++) all[lane][i] = a[i];
    all[lane][4] = b0;
    all[lane][5] = b1;
    __syncwarp();
    for (int e = 0; e < 4; e++) {
        const int h = e / 2, column = 2 * t + e % 2;
        double sum = c[e];
        for (int k = 0; k < 16; k++) {
            const int high = k / 8, of = k % 8 / 2, shift = 16 * (k % 2);
            sum += (double)operand(all[g * 4 + of][h + 2 * high] >> shift) *
                   operand(all[column * 4 + of][4 + high] >> shift);
        }
        c[e] = (float)sum;
    }
    __syncwarp();
}

// mbarrier: how many arrivals a phase takes, how many it waits for, and the parity of the phase.
static void set_barrier(unsigned long long* at, uint32_t count) { *at = (uint64_t)count << 32 | (uint64_t)count << 8; }
static void arrive(unsigned long long* at) {
    uint64_t count = *at >> 32, left = *at >> 8 & 0xffffff, parity = *at & 1;
    if (--left == 0) {
        left = count;
        parity ^= 1;
    }
    *at = count << 32 | left << 8 | parity;
}
static void wait_turn(unsigned long long* at, uint32_t parity) {
    while ((*at & 1) == parity) swapcontext(&fibers[running], &scheduler);
}
static void stores_are_visible() {}
static void copy_block(uint8_t* to, const uint8_t* from, uint32_t bytes, unsigned long long* barrier) {
    for (uint32_t i = 0; i < bytes; i += 16) copy(to + i, from + i, 16, 16);
    arrive(barrier);
}

#if WIDE_ROWS
// wgmma: a warp's 16 of 64 rows. Columns of x lie in rows of 128 bytes, whose pieces of 16 bytes are swizzled.
static void begin_wide() {}
static void commit_wide() {}
template <int PENDING = 0> static void wait_wide() {}
typedef unsigned long long Place;
static Place place_of(const uint8_t* at) { return (Place)at; }
static Place beside_place(Place place, uint32_t bytes) { return place + bytes; }
static void multiply_wide(float (&c)[NT][4], const uint32_t (&a)[4], Place x, int more) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    auto& all = exchanged[warp];
    for (int i = 0; i < 4; i++) all[lane][i] = a[i];
    __syncwarp();
    for (int n = 0; n < NT; n++) {
        for (int e = 0; e < 4; e++) {
            const int h = e / 2, token = 8 * n + 2 * t + e % 2;
            double sum = more ? c[n][e] : 0;
            for (int k = 0; k < 16; k++) {
                const int high = k / 8, bytes = k % 8 * 2;
                uint64_t at = x - (uint64_t)host_shared() + token / 8 * 1024 + token % 8 * 128 + k * 2;
                at ^= (at >> 7 & 7) << 4;
                const uint8_t* found = host_shared() + at;
                const uint32_t word = all[g * 4 + bytes / 4][h + 2 * high] >> 8 * (bytes % 4);
                uint16_t bits;
                std::memcpy(&bits, found, 2);
                sum += (double)operand(word) * operand(bits);
            }
            c[n][e] = (float)sum;
        }
    }
    __syncwarp();
}
#endif

#include SOURCE

static float operand(uint16_t bits) { return OPERAND_BFLOAT16 ? from_bfloat16(bits) : from_half(bits); }
static uint16_t to_operand(float f) { return OPERAND_BFLOAT16 ? to_bfloat16(f) : to_half(f); }

#if WIDE_ROWS
struct Given {
    const u8 *weight, *scales, *zeros;
    const u16 *x, *bias;
    const float* squares;
    const u16 *residual, *norm_weight;
    u16 *out, *weighted;
    float *out_squares, *partial;
    int* arrived;
    int tokens, N, K, scale_stride, stripes;
    float eps;
};
#elif SHARED_ROWS
struct Given {
    const u8 *weight, *scales, *zeros;
    const u16 *x, *bias;
    u16* out;
    float* partial;
    int* arrived;
    int tokens, N, K, scale_stride;
};
#else
struct Given {
    const u8 *weight, *scales, *zeros, *factors;
    const u16 *x, *bias, *norm_weight, *residual;
    u16* out;
    const int *lists, *counts, *ids;
    const float* shares;
    const u16* logits;
    int tokens, N, tiles, scale_stride, most, top_k, inputs;
    float eps, limit, alpha, share_factor;
};
#endif
static Given given;

static void body() {
    const Given& v = given;
#if WIDE_ROWS
    wide_rows(v.weight, v.scales, v.zeros, v.x, v.bias, v.squares, v.residual, v.norm_weight, v.out, v.weighted,
              v.out_squares, v.partial, v.arrived, v.tokens, v.N, v.K, v.scale_stride, v.stripes, v.eps);
#elif SHARED_ROWS
    shared_rows(v.weight, v.scales, v.zeros, v.x, v.bias, v.out, v.partial, v.arrived, v.tokens, v.N, v.K,
                v.scale_stride);
#else
    few_rows(v.weight, v.scales, v.zeros, v.factors, v.x, v.bias, v.norm_weight, v.residual, v.out, v.lists, v.counts,
             v.ids, v.shares, v.logits, v.tokens, v.N, v.tiles, v.scale_stride, v.most, v.top_k, v.inputs, v.eps, v.limit, v.alpha, v.share_factor);
#endif
    done[running] = 1;
    setcontext(&scheduler);
}

extern "C" void run(const Given* values, int across, int down, int shared_bytes, const int64_t* ranges, int count) {
    given = *values;
    num_threads = THREADS;
    readable.clear();
    for (int i = 0; i < count; i++) readable.push_back({(const uint8_t*)ranges[2 * i], ranges[2 * i + 1]});
    constexpr size_t STACK = 1 << 17;
    std::vector<char> stacks(STACK * num_threads);
    fibers.resize(num_threads);
    gridDim = {(unsigned)across, (unsigned)down, 1};
    for (int y = 0; y < down; y++) {
        for (int program = 0; program < across; program++) {
            blockIdx = {(unsigned)program, (unsigned)y, 0};
            memory.assign(shared_bytes + 1056, 0xff);
            done.assign(num_threads, 0);
            whole = Barrier();
            warps.assign(THREADS / 32, Barrier());
            for (int i = 0; i < num_threads; i++) {
                getcontext(&fibers[i]);
                fibers[i].uc_stack.ss_sp = stacks.data() + STACK * i;
                fibers[i].uc_stack.ss_size = STACK;
                fibers[i].uc_link = nullptr;
                makecontext(&fibers[i], body, 0);
            }
            int left = num_threads;
            for (int idle = 0; left; idle++) {
                if (idle > 1000000) fail("threads wait for each other");
                for (int i = 0; i < num_threads; i++) {
                    if (done[i]) continue;
                    running = i;
                    threadIdx = {(unsigned)i, 0, 0};
                    swapcontext(&scheduler, &fibers[i]);
                    left -= done[i];
                }
            }
        }
    }
}
