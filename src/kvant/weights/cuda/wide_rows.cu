// Products of 2 to 64 rows of 16-bit numbers with narrow weights by wgmma: out = x w^T * scale + bias.
//
// A program takes 16 * RT * WARPS rows of the weight and one of gridDim.y parts of its columns. Each lane fetches
// the codes that it decodes itself, STAGES - 1 groups of DEEP blocks of 128 columns ahead, so its warp waits for
// no other. Decoded codes come to the instruction from registers. CARRIERS more warps bring blocks of x to shared
// memory, up to XS blocks ahead: rows of 128 bytes, with columns in the order in which codes are decoded, and
// 16-byte pieces swizzled. Only these warps need a fence between their stores and the instruction that reads them.
// IN_BLOCKS: x lies in memory as shared memory takes it, block by block and times 2^64, and one thread copies blocks.
// STORES_BLOCKS: results of GATED, or `weighted`, are stored like that for the next product.
//
// Where there are several parts, each program stores its sums, and the last one to end adds them up in their
// order. GATED: rows g of a tile are gates and rows g + 8 their ups. NORM: x is not normalised yet; results of a
// token are multiplied by 1 / sqrt(mean of squares + eps), with sums of squares from the launch before. ADDED: the
// residual is added to the rounded result. WEIGHTED: that sum times the weight of the next norm (2: 1 + weight) is
// stored, too, and the sum of its squares.
//
// The other macros are those of few_rows.cu. SPLIT: there are several parts. DEEP: how many blocks of a row are read
// in one piece. RESIDENT: programs that must fit a multiprocessor's registers. APART, RAISED: see decode.cuh.

#define X_ROOM (NT * 2048)
#define TILE_CODES (RT * PIECES * 1024)
#define TILE_SCALES (SCALES == 2 ? 16 : SCALES == 0 ? 0 : 16 * RT * SCALE_BYTES)
#define TILE (TILE_CODES + TILE_SCALES + (ZEROS ? 16 * RT : 0))  // codes of a block, and what lies beside them
#define SLOT (DEEP * TILE)
#define RING_AT (XS * X_ROOM)
#define BARRIERS_AT (RING_AT + WARPS * STAGES * SLOT)
#define CARRIERS 4  // warps that bring x
#define TASKS (4 * NT / CARRIERS)
#define THREADS ((WARPS + CARRIERS) * 32)
#define PORTIONS (4 * CARRIERS / NT)
#define PARTS (SCALES == 2 || SCALES == 1)
#define ROWS (16 * RT * WARPS)
#define RESULTS (GATED ? ROWS / 2 : ROWS)  // of a token
#define PITCH (2 * RESULTS + 16)           // bytes from a token's results to the next token's

typedef unsigned long long u64;
typedef u64 Place;

#ifndef ON_HOST
__device__ __forceinline__ void set_barrier(u64* at, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(at)), "r"(count) : "memory");
}
__device__ __forceinline__ void arrive(u64* at) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(at)) : "memory");
}
// Until the barrier's phase of this parity is over.
__device__ __forceinline__ void wait_turn(u64* at, u32 parity) {
    asm volatile("{ .reg .pred p;\nAGAIN:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                 "@p bra DONE;\nbra AGAIN;\nDONE:\n}"
                 :: "r"(shared_address(at)), "r"(parity) : "memory");
}
// Copies to shared memory; the barrier's phase also waits for these bytes.
__device__ __forceinline__ void copy_block(u8* to, const u8* from, u32 bytes, u64* barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void stores_are_visible() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void begin_wide() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_wide() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wait_wide() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory"); }

// Rows of 128 bytes, eight of them together, swizzled by 128 bytes.
__device__ __forceinline__ Place place_of(const u8* at) {
    return (Place)(shared_address(at) >> 4) | (Place)1 << 16 | (Place)64 << 32 | (Place)1 << 62;
}

// The place `bytes` behind.
__device__ __forceinline__ Place beside_place(Place place, u32 bytes) { return place + (bytes >> 4); }

#define SUMS_OF(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define WIDE(width, sums, a0, a1, a2, a3, at, keep, ...)                                                       \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #keep ", 0;\n"                                             \
                 "wgmma.mma_async.sync.aligned.m64n" #width "k16.f32." KIND "." KIND " {" sums "}, "          \
                 "{%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #at ", p, 1, 1, 0; }"                        \
                 : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x), "r"(more))
#define S4(a, b, c, d) "%" #a ", %" #b ", %" #c ", %" #d

// c = (more ? c : 0) + a x^T for 64 rows of four warps.
__device__ __forceinline__ void multiply_wide(float (&c)[NT][4], const u32 (&a)[4], Place x, int more) {
#if NT == 1
    WIDE(8, S4(0, 1, 2, 3), 4, 5, 6, 7, 8, 9, SUMS_OF(0));
#elif NT == 2
    WIDE(16, S4(0, 1, 2, 3) ", " S4(4, 5, 6, 7), 8, 9, 10, 11, 12, 13, SUMS_OF(0), SUMS_OF(1));
#elif NT == 4
    WIDE(32, S4(0, 1, 2, 3) ", " S4(4, 5, 6, 7) ", " S4(8, 9, 10, 11) ", " S4(12, 13, 14, 15),
         16, 17, 18, 19, 20, 21, SUMS_OF(0), SUMS_OF(1), SUMS_OF(2), SUMS_OF(3));
#else
    WIDE(64, S4(0, 1, 2, 3) ", " S4(4, 5, 6, 7) ", " S4(8, 9, 10, 11) ", " S4(12, 13, 14, 15) ", "
         S4(16, 17, 18, 19) ", " S4(20, 21, 22, 23) ", " S4(24, 25, 26, 27) ", " S4(28, 29, 30, 31),
         32, 33, 34, 35, 36, 37, SUMS_OF(0), SUMS_OF(1), SUMS_OF(2), SUMS_OF(3), SUMS_OF(4), SUMS_OF(5),
         SUMS_OF(6), SUMS_OF(7));
#endif
}
#endif

// Two columns in each word, as codes are decoded: 0 and 2, 1 and 3, 4 and 6, 5 and 7. Times 2^64 if RAISE.
template <bool RAISE>
__device__ __forceinline__ void split_columns(const uint4& v, u32 (&words)[4]) {
    words[0] = __byte_perm(v.x, v.y, 0x5410), words[1] = __byte_perm(v.x, v.y, 0x7632);
    words[2] = __byte_perm(v.z, v.w, 0x5410), words[3] = __byte_perm(v.z, v.w, 0x7632);
    if (RAISE) {
#pragma unroll
        for (int k = 0; k < 4; k++) words[k] = fma2(words[k], 0x5f805f80u, 0x80008000u);
    }
}

// Stores 8 columns of a token to a block of x, of which they are the eighth `eighth` of half `half`.
__device__ __forceinline__ void store_eighth(u8* block, int half, int eighth, int token, const u32 (&words)[4]) {
    u8* const row = block + (half * NT + token / 8) * 1024 + token % 8 * 128 + eighth / 2 * 4;
#pragma unroll
    for (int k = 0; k < 4; k++) *(u32*)(row + ((4 * (eighth % 2) + k) ^ (token % 8)) * 16) = words[k];
}

// x: [tokens, K], or [K / 128, X_ROOM bytes] IN_BLOCKS. squares: [stripes, 64] of x. bias: [N]. residual: as wide as
// results. out, weighted: likewise, or as x IN_BLOCKS. norm_weight: of the next norm. out_squares: [gridDim.x, 64].
// partial: [gridDim.x, gridDim.y, 4 RT NT, 32 WARPS]. arrived: zeros, and zeros again afterwards.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
wide_rows(const u8* weight, const u8* scales, const u8* zeros, const u16* x, const u16* bias, const float* squares,
          const u16* residual, const u16* norm_weight, u16* out, u16* weighted, float* out_squares, float* partial,
          int* arrived, int tokens, int N, int K, int scale_stride, int stripes, float eps) {
#ifdef ON_HOST
    u8* shared = host_shared();
#else
    extern __shared__ __align__(16) u8 dynamic[];
    u8* shared = dynamic + (1024 - shared_address(dynamic) % 1024) % 1024;
#endif
    SHARED int order;  // how many programs of the stripe ended before
    SHARED float portions[32 * CARRIERS];  // sums of squares: of each token, of some stripes
    u64* full = (u64*)(shared + BARRIERS_AT);
    u64* empty = full + XS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int stripe = blockIdx.x, share = blockIdx.y, shares = gridDim.y;
    const int width = GATED ? N / 2 : N;
    const int first_row = (stripe * WARPS + warp) * (GATED ? 8 : 16) * RT;
    const int blocks = K / 128, deep = (blocks + DEEP - 1) / DEEP;
    const int begin = deep * share / shares, end = deep * (share + 1) / shares;  // in groups of blocks
#if PDL
    launch_next();
#endif
    if (threadIdx.x == 0) {
        for (int s = 0; s < XS; s++) {
            set_barrier(full + s, IN_BLOCKS ? 1 : CARRIERS);
            set_barrier(empty + s, WARPS);
        }
        if (IN_BLOCKS) stores_are_visible();
    }

    // The first of 8 neighbouring rows of the weight. Rows behind the last repeat it.
    auto base_row = [&](int i, int h) -> int {
        if (GATED) return h * width + min(first_row + 8 * i, width - 8);
        return min(first_row + 16 * i + 8 * h, N - 8);
    };

    float acc[RT][NT][4] = {};
    float scale_of_row[RT][2], bias_of_row[RT][2];  // fetched early, since nothing has read them before
    if (warp < WARPS) {
        u8* const ring = shared + RING_AT + warp * (STAGES * SLOT);
        // What this lane fetches of a block: its places are fixed.
        const u8* const codes_from = weight + 16 * t;
        u32 row_at[RT][2];
#pragma unroll
        for (int i = 0; i < RT; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) row_at[i][h] = (u32)(base_row(i, h) + g) * (u32)(NIBBLES ? K / 2 : K);
        }
#if SCALES == 2
        const u8* const scales_from = scales + (i64)(base_row(0, lane % 2) / 128) * scale_stride * 4;
#elif SCALES == 1
        constexpr int SIZE = SCALE_BYTES, HALVES = SIZE == 4 ? 2 : 1, SCALE_COPIES = RT * 2 * HALVES;
        const int scale_q = lane % HALVES, scale_h = lane / HALVES % 2, scale_i = lane / (2 * HALVES) % RT;
        const u8* const scales_from = scales + (base_row(scale_i, scale_h) + 4 * scale_q) * SIZE;
        const int scale_to = (scale_i * 16 + scale_h * 8 + 4 * scale_q) * SIZE;
#endif
#if ZEROS
        const u8* const zeros_from = zeros + base_row(lane / 2 % RT, lane % 2);
#endif
        // Blocks behind the last are zeros.
        auto fetch = [&](u8* slot, int group) {
#pragma unroll
            for (int i = 0; i < RT; i++) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
#pragma unroll
                    for (int p = 0; p < DEEP * PIECES; p++) {
                        const bool in = DEEP * group + p / PIECES < blocks;
                        const u8* at = in ? codes_from + row_at[i][h] + (u32)group * (64 * DEEP * PIECES) + 64 * p : weight;
                        copy16(slot + p / PIECES * TILE + ((i * 2 + h) * PIECES + p % PIECES) * 512 + lane * 16, at, in ? 16 : 0);
                    }
                }
            }
#pragma unroll
            for (int d = 0; d < DEEP; d++) {
                const int b = DEEP * group + d;
                const bool in = b < blocks;
                u8* to = slot + d * TILE + TILE_CODES;
#if SCALES == 2
                if (lane < 2) copy4(to + 4 * lane, scales_from + (in ? 4 * b : 0));
#elif SCALES == 1
                if (lane < SCALE_COPIES) {
                    const u8* at = in ? scales_from + (i64)b * (scale_stride * SIZE) : scales;
                    if (SIZE == 1) copy8(to + scale_to, at, in ? 8 : 0);
                    else copy16(to + scale_to, at, in ? 16 : 0);
                }
#endif
#if ZEROS
                if (lane < 2 * RT) copy8(to + TILE_SCALES + 8 * lane, in ? zeros_from + (i64)b * scale_stride : zeros, in ? 8 : 0);
#endif
            }
        };
#pragma unroll
        for (int s = 0; s < STAGES - 1; s++) {
            if (begin + s < end) fetch(ring + s * SLOT, begin + s);
            commit();
        }
#pragma unroll
        for (int i = 0; i < RT; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = base_row(i, h) + g;
                scale_of_row[i][h] = SCALES == 0 ? scale_of(scales + (i64)row * SCALE_BYTES, 0) : 1.0f;
                if (RAISED) scale_of_row[i][h] *= 0x1p56f;  // 2^120 / 2^64
                bias_of_row[i][h] = BIAS ? number(bias[row]) : 0.0f;
            }
        }
        __syncthreads();  // barriers are set
        u8 *slot = ring, *next = ring + (STAGES - 1) * SLOT;
        const Place x_at = place_of(shared);
        int place = 0, parity = 0;
        // While an instruction multiplies a half of a block, the next half is decoded.
#if PARTS
        float part[RT][NT][4], factor[RT][2];
        auto add = [&]() {
#pragma unroll
            for (int i = 0; i < RT; i++) {
#pragma unroll
                for (int n = 0; n < NT; n++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) acc[i][n][e] += part[i][n][e] * factor[i][e / 2];
                }
            }
        };
#else
        auto& part = acc;
#endif
#pragma unroll 1
        for (int group = begin; group < end; group++) {
            WAIT_GROUP(STAGES - 2);
            __syncwarp();
            if (group + STAGES - 1 < end) fetch(next, group + STAGES - 1);
            commit();
#pragma unroll
            for (int d = 0; d < DEEP; d++) {
                const u8* tile = slot + d * TILE;
                const Place block_at = x_at + place * beside_place(0, X_ROOM);
                Fine fine[RT][2];
#pragma unroll
                for (int i = 0; i < RT; i++) {
#pragma unroll
                    for (int h = 0; h < 2; h++) {
#if ZEROS
                        fine[i][h] = fine_of(tile[TILE_CODES + TILE_SCALES + 16 * i + 8 * h + g], 0);
#else
                        fine[i][h] = fine_of(8, 0);
#endif
                    }
                }
#pragma unroll
                for (int c = 0; c < 2; c++) {  // low and high halves, or pieces
                    u32 a[4][RT][4];
#if !PARTS
                    wait_wide<1>();
                    if (c == 1 && (d || group > begin) && lane == 0) arrive(empty + (place ? place : XS) - 1);
#endif
#pragma unroll
                    for (int i = 0; i < RT; i++) {
#pragma unroll
                        for (int h = 0; h < 2; h++) {
                            const int piece = (i * 2 + h) * PIECES + (PIECES == 2 ? c : 0);
                            const uint4 v = *(const uint4*)(tile + (piece * 32 + lane) * 16);
                            const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                            for (int j = 0; j < 4; j++) {
                                if (c) decode<1>(words[j], fine[i][h], a[j][i][h], a[j][i][h + 2]);
                                else decode<0>(words[j], fine[i][h], a[j][i][h], a[j][i][h + 2]);
                            }
                        }
                    }
#if PARTS
                    if (c == 0) {
                        wait_wide<0>();
                        if (d || group > begin) {
                            if (lane == 0) arrive(empty + (place ? place : XS) - 1);
                            add();
                        }
                    }
#endif
                    if (c == 0) wait_turn(full + place, parity);
                    begin_wide();
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const Place at = beside_place(block_at, 1024 * NT * c + 32 * j);
#pragma unroll
                        for (int i = 0; i < RT; i++) multiply_wide(part[i], a[j][i], at, !PARTS || c || j);
                    }
                    commit_wide();
                }
#if PARTS
                const u8* beside = tile + TILE_CODES;
#pragma unroll
                for (int i = 0; i < RT; i++) {
#pragma unroll
                    for (int h = 0; h < 2; h++) {
#if SCALES == 2
                        factor[i][h] = ((const float*)beside)[h];
#else
                        factor[i][h] = scale_of(beside, 16 * i + 8 * h + g);
#endif
                    }
                }
#endif
                if (++place == XS) {
                    place = 0;
                    parity ^= 1;
                }
            }
            slot = slot == ring + (STAGES - 1) * SLOT ? ring : slot + SLOT;
            next = next == ring + (STAGES - 1) * SLOT ? ring : next + SLOT;
        }
        wait_wide<0>();
#if PARTS
        if (begin < end) add();
#endif
        WAIT_GROUP(0);
#if PDL
        wait_before();
#endif
    } else {
        const int carrier = warp - WARPS;
#if WEIGHTED
        if (carrier == 0 && 64 * lane < RESULTS && stripe * RESULTS + 64 * lane < width) {
            fetch_ahead(norm_weight + stripe * RESULTS + 64 * lane);
        }
#endif
        __syncthreads();
#if PDL
        wait_before();
#endif
        int place = 0;
#if IN_BLOCKS
        if (threadIdx.x == WARPS * 32) {
            int parity = 1;
#pragma unroll 1
            for (int b = DEEP * begin; b < DEEP * end; b++) {
                wait_turn(empty + place, parity);
                // Codes behind the last block are zeros, so any block may be beside them.
                const u8* from = (const u8*)x + (i64)min(b, blocks - 1) * X_ROOM;
                copy_block(shared + place * X_ROOM, from, X_ROOM, full + place);
                if (++place == XS) {
                    place = 0;
                    parity ^= 1;
                }
            }
        }
#else
        // A warp takes 4 tokens by 64 columns at a time: a lane 8 columns of a token, whose pairs go to four pieces.
        const int eighth = lane % 8, half = carrier % 2, token0 = carrier / 2 * 4 + lane / 8;
        constexpr int STEP = 2 * CARRIERS;  // tokens from a task to the next
        const u16* const from = x + (i64)token0 * K + 64 * half + 8 * eighth;
        auto read = [&](uint4 (&v)[TASKS], int b) {
#pragma unroll
            for (int i = 0; i < TASKS; i++) {
                v[i] = make_uint4(0, 0, 0, 0);
                const bool in = token0 + STEP * i < tokens && b < blocks && b < DEEP * end;
                if (in) v[i] = *(const uint4*)(from + (u32)(STEP * i) * (u32)K + b * 128);
            }
        };
        int parity = 1;
        auto write = [&](const uint4 (&v)[TASKS]) {
            wait_turn(empty + place, parity);
#pragma unroll
            for (int i = 0; i < TASKS; i++) {
#if APART
                u32 words[4];
                split_columns<RAISED>(v[i], words);
#else
                const u32 words[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#endif
                store_eighth(shared + place * X_ROOM, half, eighth, token0 + STEP * i, words);
            }
            stores_are_visible();
            __syncwarp();
            if (lane == 0) arrive(full + place);
            if (++place == XS) {
                place = 0;
                parity ^= 1;
            }
        };
        uint4 v[DEEP][TASKS];
#pragma unroll
        for (int d = 0; d < DEEP; d++) read(v[d], DEEP * begin + d);
#pragma unroll 1
        for (int group = begin; group < end; group++) {
#pragma unroll
            for (int d = 0; d < DEEP; d++) {
                write(v[d]);
                read(v[d], DEEP * (group + 1) + d);
            }
        }
#endif
#if NORM
        const int own = threadIdx.x - WARPS * 32;
        float total = 0;
#pragma unroll 8
        for (int s = own / (8 * NT); s < stripes; s += PORTIONS) total += squares[s * 64 + own % (8 * NT)];
        portions[own] = total;
#endif
    }

    // Eight results of a token for a thread; threads of a token are neighbours.
    constexpr int EIGHTS = RESULTS / 8, TOGETHER = EIGHTS < 32 ? EIGHTS : 32;
    constexpr int TURNS = (8 * NT * EIGHTS + THREADS - 1) / THREADS;
#if ADDED
    uint4 old[TURNS], next_weight[TURNS];
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        const int at = turn * THREADS + threadIdx.x, token = at / EIGHTS, m = stripe * RESULTS + at % EIGHTS * 8;
        old[turn] = next_weight[turn] = make_uint4(0, 0, 0, 0);
        if (token < tokens && m < width) {
            old[turn] = *(const uint4*)(residual + (i64)token * width + m);
            if (WEIGHTED) next_weight[turn] = *(const uint4*)(norm_weight + m);
        }
    }
#endif

#if SPLIT
    constexpr int REGISTERS = 4 * RT * NT;
    float* own = partial + (i64)stripe * shares * (REGISTERS * WARPS * 32) + threadIdx.x;
    if (warp < WARPS) {
#pragma unroll
        for (int r = 0; r < REGISTERS; r++) {
            own[(i64)(share * REGISTERS + r) * (WARPS * 32)] = acc[r / (4 * NT)][r / 4 % NT][r % 4];
        }
        __threadfence();
    }
    __syncthreads();
    if (threadIdx.x == 0) order = atomicAdd(arrived + stripe, 1);
    __syncthreads();
    if (order != shares - 1) return;
    if (warp < WARPS) {
        __threadfence();
#pragma unroll
        for (int r = 0; r < REGISTERS; r++) acc[r / (4 * NT)][r / 4 % NT][r % 4] = 0;
        // Several parts are on their way at a time: a thread waits for memory once, not once for each.
        constexpr int AT_ONCE = REGISTERS < 64 ? 64 / REGISTERS : 1;
#pragma unroll 1
        for (int first = 0; first < shares; first += AT_ONCE) {
            const float* from = own + (i64)first * (REGISTERS * WARPS * 32);
            float found[AT_ONCE][REGISTERS];
#pragma unroll
            for (int s = 0; s < AT_ONCE; s++) {
                if (first + s < shares) {
#pragma unroll
                    for (int r = 0; r < REGISTERS; r++) {
                        found[s][r] = load_fresh(from + (s * REGISTERS + r) * (WARPS * 32));
                    }
                }
            }
#pragma unroll
            for (int s = 0; s < AT_ONCE; s++) {
#pragma unroll
                for (int r = 0; r < REGISTERS; r++) {
                    if (first + s < shares) acc[r / (4 * NT)][r / 4 % NT][r % 4] += found[s][r];
                }
            }
        }
    }
    if (threadIdx.x == 0) arrived[stripe] = 0;
#else
    __syncthreads();  // x was read, and portions are there
#endif

    if (warp < WARPS) {
#if NORM
        float factors[NT][2];
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float total = 0;
                for (int q = 0; q < PORTIONS; q++) total += portions[q * 8 * NT + 8 * n + 2 * t + e];
                factors[n][e] = rsqrtf(total / K + eps);
            }
        }
#endif
#pragma unroll
        for (int i = 0; i < RT; i++) {
#pragma unroll
            for (int n = 0; n < NT; n++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int token = 8 * n + 2 * t + e;
                    float low = acc[i][n][e], high = acc[i][n][2 + e];
#if NORM
                    low *= factors[n][e];
                    high *= factors[n][e];
#endif
                    low = low * scale_of_row[i][0] + bias_of_row[i][0];
                    high = high * scale_of_row[i][1] + bias_of_row[i][1];
                    u16* to = (u16*)(shared + token * PITCH) + warp * (RESULTS / WARPS);
                    if (GATED) {
                        to[8 * i + g] = rounded(activated(low, high, 0, 0));
                    } else {
                        to[16 * i + g] = rounded(low);
                        to[16 * i + 8 + g] = rounded(high);
                    }
                }
            }
        }
    }
    __syncthreads();

    // Stores 8 results of a token, from column m on, as the next product reads them.
    auto store_for_next = [&](u16* to, int token, int m, const uint4& v) {
#if STORES_BLOCKS
        u32 words[4];
        split_columns<true>(v, words);
        store_eighth((u8*)to + (i64)(m / 128) * X_ROOM, m / 64 % 2, m / 8 % 8, token, words);
#else
        *(uint4*)(to + (i64)token * width + m) = v;
#endif
    };
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        const int at = turn * THREADS + threadIdx.x, token = at / EIGHTS, eighth = at % EIGHTS;
        const int m = stripe * RESULTS + 8 * eighth;
        const bool there = token < tokens && m < width;
        float total = 0;
        if (there) {
            uint4 v = *(const uint4*)(shared + token * PITCH + 16 * eighth);
            const i64 to = (i64)token * width + m;
#if ADDED
            const u32 olds[4] = {old[turn].x, old[turn].y, old[turn].z, old[turn].w};
            const u32 nexts[4] = {next_weight[turn].x, next_weight[turn].y, next_weight[turn].z, next_weight[turn].w};
            u32 sums[4] = {v.x, v.y, v.z, v.w}, made[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const u16 low = rounded(number((u16)sums[k]) + number((u16)olds[k]));
                const u16 high = rounded(number((u16)(sums[k] >> 16)) + number((u16)(olds[k] >> 16)));
                sums[k] = low | (u32)high << 16;
                const float a = number(low), b = number(high);
                total += a * a + b * b;
                made[k] = rounded(a * (number((u16)nexts[k]) + (WEIGHTED == 2))) |
                          (u32)rounded(b * (number((u16)(nexts[k] >> 16)) + (WEIGHTED == 2))) << 16;
            }
            v = make_uint4(sums[0], sums[1], sums[2], sums[3]);
            if (WEIGHTED) store_for_next(weighted, token, m, make_uint4(made[0], made[1], made[2], made[3]));
#endif
            if (GATED) store_for_next(out, token, m, v);
            else *(uint4*)(out + to) = v;
        }
#if WEIGHTED
#pragma unroll
        for (int away = TOGETHER / 2; away; away /= 2) total += __shfl_xor_sync(0xffffffffu, total, away);
        if (there && eighth == 0) out_squares[stripe * 64 + token] = total;
#endif
    }
}
