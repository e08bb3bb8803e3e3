// Products of 9 to 64 rows of 16-bit numbers with narrow weights: warps of a program share rows of x.
//
// A program takes 16 * RT * WARPS rows of the weight and one of gridDim.y parts of its columns. Each warp has
// rows of its own, so that x is read once for all of them: blocks of 128 columns of x come to shared memory with
// the codes, STAGES - 1 blocks ahead. Where there are several parts, each program stores its sums, and the last
// one to end adds them up in their order. GATED: rows g of a tile are gates and rows g + 8 their ups.
//
// LAID: four warps multiply together (wgmma): their decoded codes come from registers, and x from shared memory, where
// it lies as `lay_rows` has written it: float16, each token multiplied by a power of two, columns in the order in which
// codes are decoded, in rows of 128 bytes whose 16-byte pieces are swizzled. Sums are multiplied by `unscale` of their
// token.
//
// The other macros are those of few_rows.cu. SPLIT: there are several parts.

#if LAID
#define X_ROOM (NT * 2048)
#else
#define X_ROOM (8 * NT * PITCH)
#endif
#define CODE_ROOM (WARPS * RT * 2 * PIECES * 512)
#define PITCH 272  // bytes from a token to the next: lanes of a warp then read different banks
#define SCALE_ROOM (SCALES == 2 ? WARPS * 16 : SCALES == 0 ? 0 : (FINE ? 128 / GROUP : 1) * WARPS * 16 * RT * SCALE_BYTES)
#define ZERO_ROOM (ZEROS ? WARPS * 16 * RT : 0)
#define SLOT ((X_ROOM + CODE_ROOM + SCALE_ROOM + ZERO_ROOM + (LAID ? 1023 : 0)) / (LAID ? 1024 : 1) * (LAID ? 1024 : 1))
#define CODES_AT X_ROOM
#define SCALES_AT (X_ROOM + CODE_ROOM)
#define ZEROS_AT (SCALES_AT + SCALE_ROOM)
#define THREADS (WARPS * 32)
#define PARTS (SCALES == 2 || (SCALES == 1 && !FINE))

#if LAID
#ifndef ON_HOST
__device__ __forceinline__ void copies_are_visible() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void begin_wide() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_wide() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_wide() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// Rows of 128 bytes, eight of them together, swizzled by 128 bytes.
typedef unsigned long long Place;
__device__ __forceinline__ Place place_of(const u8* at) {
    return (Place)(shared_address(at) >> 4) | (Place)1 << 16 | (Place)64 << 32 | (Place)1 << 62;
}

#define SUMS_OF(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define WIDE(width, sums, a0, a1, a2, a3, at, keep, ...)                                                       \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #keep ", 0;\n"                                             \
                 "wgmma.mma_async.sync.aligned.m64n" #width "k16.f32.f16.f16 {" sums "}, "          \
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
#endif

// partial: [stripes, parts, 4 RT NT, THREADS]. arrived: zeros, and zeros again afterwards.
extern "C" __global__ void __launch_bounds__(THREADS)
shared_rows(const u8* weight, const u8* scales, const u8* zeros, const u16* x, const u16* bias, u16* out,
            const float* unscale, float* partial, int* arrived, int tokens, int N, int K, int scale_stride) {
#ifdef ON_HOST
    u8* shared = host_shared();
#else
    extern __shared__ __align__(16) u8 dynamic[];
    u8* shared = dynamic + (LAID ? (1024 - shared_address(dynamic) % 1024) % 1024 : 0);
#endif
    SHARED int order;  // how many programs of the stripe ended before
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int stripe = blockIdx.x, share = blockIdx.y, shares = gridDim.y;
    const int width = GATED ? N / 2 : N;
    const int first_row = (stripe * WARPS + warp) * (GATED ? 8 : 16) * RT;
    const int blocks = K / 128, begin = blocks * share / shares, end = blocks * (share + 1) / shares;
#if PDL
    launch_next();
#endif

    // The first of 8 neighbouring rows of the weight. Rows behind the last repeat it.
    auto base_row = [&](int i, int h) -> int {
        if (GATED) return h * width + min(first_row + 8 * i, width - 8);
        return min(first_row + 16 * i + 8 * h, N - 8);
    };

    // What this thread fetches of a block: its places are fixed, and pointers advance from block to block.
    constexpr int WARP_CODES = RT * 2 * PIECES * 512;
    const u8* codes_from = weight + 16 * t + begin * (64 * PIECES);
    u32 row_at[RT][2];
#pragma unroll
    for (int i = 0; i < RT; i++) {
#pragma unroll
        for (int h = 0; h < 2; h++) row_at[i][h] = (u32)(base_row(i, h) + g) * (u32)(NIBBLES ? K / 2 : K);
    }
#if SCALES == 2
    const u8* scales_from = scales + ((i64)(base_row(0, lane % 2) / 128) * scale_stride + begin) * 4;
#elif SCALES == 1
    constexpr int SIZE = SCALE_BYTES, GROUPS = FINE ? 128 / GROUP : 1, HALVES = SIZE == 4 ? 2 : 1;
    constexpr int SCALE_COPIES = GROUPS * RT * 2 * HALVES;
    const int scale_q = lane % HALVES, scale_h = lane / HALVES % 2, scale_i = lane / (2 * HALVES) % RT;
    const int scale_k = lane / (2 * HALVES * RT) % GROUPS;
    const u8* scales_from = scales + ((i64)(begin * GROUPS + scale_k) * scale_stride + base_row(scale_i, scale_h) + 4 * scale_q) * SIZE;
    const int scale_to = warp * (SCALE_ROOM / WARPS) + (scale_k * 16 * RT + scale_i * 16 + scale_h * 8 + 4 * scale_q) * SIZE;
#endif
#if ZEROS
    const u8* zeros_from = zeros + (i64)begin * scale_stride + base_row(lane / 2 % RT, lane % 2);
#endif
    auto fetch_codes = [&](u8* slot) {
        u8* to = slot + CODES_AT + warp * WARP_CODES + lane * 16;
#pragma unroll
        for (int i = 0; i < RT; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
#pragma unroll
                for (int p = 0; p < PIECES; p++) {
                    copy16(to + ((i * 2 + h) * PIECES + p) * 512, codes_from + row_at[i][h] + 64 * p, 16);
                }
            }
        }
        codes_from += 64 * PIECES;
#if SCALES == 2
        if (lane < 2) copy4(slot + SCALES_AT + warp * 16 + 4 * lane, scales_from);
        scales_from += 4;
#elif SCALES == 1
        if (lane < SCALE_COPIES) {
            if (SIZE == 1) copy8(slot + SCALES_AT + scale_to, scales_from, 8);
            else copy16(slot + SCALES_AT + scale_to, scales_from, 16);
        }
        scales_from += (i64)GROUPS * scale_stride * SIZE;
#endif
#if ZEROS
        if (lane < 2 * RT) copy8(slot + ZEROS_AT + warp * 16 * RT + 8 * lane, zeros_from, 8);
        zeros_from += scale_stride;
#endif
    };
#if LAID
    const u8* x_from = (const u8*)x + (i64)begin * X_ROOM + 16 * threadIdx.x;
    auto fetch_x = [&](u8* slot) {
#pragma unroll
        for (int c = 0; c < (X_ROOM / 16 + THREADS - 1) / THREADS; c++) {
            if (X_ROOM / 16 % THREADS == 0 || threadIdx.x + c * THREADS < X_ROOM / 16) {
                copy16(slot + 16 * (threadIdx.x + c * THREADS), x_from + 16 * c * THREADS, 16);
            }
        }
        x_from += X_ROOM;
    };
#else
    constexpr int X_COPIES = (128 * NT + THREADS - 1) / THREADS;  // of a thread; each is 8 numbers of a token
    const u8* x_from = (const u8*)x + begin * 256 + 16 * (threadIdx.x % 16);
    u32 token_at[X_COPIES], token_bytes[X_COPIES];
#pragma unroll
    for (int c = 0; c < X_COPIES; c++) {
        const int token = threadIdx.x / 16 + c * (THREADS / 16);
        token_at[c] = token < tokens ? (u32)token * (u32)(2 * K) : 0;
        token_bytes[c] = token < tokens ? 16 : 0;
    }
    auto fetch_x = [&](u8* slot) {
        u8* to = slot + threadIdx.x / 16 * PITCH + 16 * (threadIdx.x % 16);
#pragma unroll
        for (int c = 0; c < X_COPIES; c++) {
            if (128 * NT % THREADS == 0 || threadIdx.x + c * THREADS < 128 * NT) {
                copy16(to + c * (THREADS / 16) * PITCH, x_from + token_at[c], token_bytes[c]);
            }
        }
        x_from += 256;
    };
#endif

#if !LAID
    // Where the lane's codes of a block begin: columns of low halves, and how far those of high halves are.
    const int column = !NIBBLES ? 16 * t : 16 * t / (GROUP / 2) * GROUP + 16 * t % (GROUP / 2);
    const int half = !NIBBLES ? 64 : GROUP / 2;
#endif

#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (begin + s < end) fetch_codes(shared + s * SLOT);
    }
#if PDL
    wait_before();
#endif
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (begin + s < end) fetch_x(shared + s * SLOT);
        commit();
    }

    float acc[RT][NT][4] = {};
    u8 *slot = shared, *next = shared + (STAGES - 1) * SLOT;
    for (int b = begin; b < end; b++) {
        WAIT_GROUP(STAGES - 2);
#if LAID
        copies_are_visible();
#endif
        __syncthreads();  // all copies of block b are there, and all warps are done with the block before
        if (b + STAGES - 1 < end) {
            fetch_codes(next);
            fetch_x(next);
        }
        commit();
        const u8* codes_at = slot + CODES_AT + warp * WARP_CODES;
        const u8* beside = slot + SCALES_AT + warp * (SCALE_ROOM / WARPS);
#if !LAID
        const u8* x_at = slot + g * PITCH;
#endif
        Fine fine[RT][2];
#pragma unroll
        for (int i = 0; i < RT; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int at = 16 * i + 8 * h + g;
                u32 z = 8, power = 0;
#if ZEROS
                z = slot[ZEROS_AT + warp * 16 * RT + at];
#endif
#if FINE
                power = beside[16 * t / (GROUP / 2) * 16 * RT + at];
#endif
                fine[i][h] = fine_of(z, power);
            }
        }
#if PARTS
        float part[RT][NT][4] = {};
#else
        auto& part = acc;
#endif
#if LAID
#pragma unroll
        for (int c = 0; c < 2; c++) {  // low and high halves, or pieces
            u32 a[4][RT][4];
#pragma unroll
            for (int i = 0; i < RT; i++) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int piece = (i * 2 + h) * PIECES + (PIECES == 2 ? c : 0);
                    const uint4 v = *(const uint4*)(codes_at + (piece * 32 + lane) * 16);
                    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        if (c) decode<1>(words[j], fine[i][h], a[j][i][h], a[j][i][h + 2]);
                        else decode<0>(words[j], fine[i][h], a[j][i][h], a[j][i][h + 2]);
                    }
                }
            }
            begin_wide();
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const Place at = place_of(slot + 1024 * NT * c + 32 * j);
#pragma unroll
                for (int i = 0; i < RT; i++) multiply_wide(part[i], a[j][i], at, !PARTS || c || j);
            }
            commit_wide();
        }
        wait_wide();
#else
#pragma unroll
        for (int q = 0; q < 4; q++) {  // half q % 2 of the lane's piece q / 2, which is 16 columns
            const int c = q / 2;
            uint4 columns[NT];
#pragma unroll
            for (int n = 0; n < NT; n++) {
                columns[n] = *(const uint4*)(x_at + 8 * n * PITCH + 2 * (column + c * half + q % 2 * 8));
            }
            uint4 codes[RT][2];
#pragma unroll
            for (int i = 0; i < RT; i++) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int piece = (i * 2 + h) * PIECES + (PIECES == 2 ? c : 0);
                    codes[i][h] = *(const uint4*)(codes_at + (piece * 32 + lane) * 16);
                }
            }
#pragma unroll
            for (int j = q % 2 * 2; j < q % 2 * 2 + 2; j++) {
                u32 a[RT][4];
#pragma unroll
                for (int i = 0; i < RT; i++) {
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const uint4& v = codes[i][h];
                        const u32 word = j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w;
                        if (c) decode<1>(word, fine[i][h], a[i][h], a[i][h + 2]);
                        else decode<0>(word, fine[i][h], a[i][h], a[i][h + 2]);
                    }
                }
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    const u32 b0 = j % 2 ? columns[n].z : columns[n].x;
                    const u32 b1 = j % 2 ? columns[n].w : columns[n].y;
#pragma unroll
                    for (int i = 0; i < RT; i++) multiply(part[i][n], a[i], b0, b1);
                }
            }
        }
#endif
#if PARTS
#pragma unroll
        for (int i = 0; i < RT; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
#if SCALES == 2
                const float factor = ((const float*)beside)[h];
#else
                const float factor = scale_of(beside, 16 * i + 8 * h + g);
#endif
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    acc[i][n][2 * h] += part[i][n][2 * h] * factor;
                    acc[i][n][2 * h + 1] += part[i][n][2 * h + 1] * factor;
                }
            }
        }
#endif
        slot = slot == shared + (STAGES - 1) * SLOT ? shared : slot + SLOT;
        next = next == shared + (STAGES - 1) * SLOT ? shared : next + SLOT;
    }
    WAIT_GROUP(0);

#if SPLIT
    constexpr int REGISTERS = 4 * RT * NT;
    float* own = partial + (i64)stripe * shares * (REGISTERS * THREADS) + threadIdx.x;
#pragma unroll
    for (int r = 0; r < REGISTERS; r++) {
        own[(i64)(share * REGISTERS + r) * THREADS] = acc[r / (4 * NT)][r / 4 % NT][r % 4];
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) order = atomicAdd(arrived + stripe, 1);
    __syncthreads();
    if (order != shares - 1) return;
    __threadfence();
#pragma unroll
    for (int r = 0; r < REGISTERS; r++) acc[r / (4 * NT)][r / 4 % NT][r % 4] = 0;
    for (int s = 0; s < shares; s++) {
#pragma unroll
        for (int r = 0; r < REGISTERS; r++) {
            acc[r / (4 * NT)][r / 4 % NT][r % 4] += load_fresh(own + (i64)(s * REGISTERS + r) * THREADS);
        }
    }
    if (threadIdx.x == 0) arrived[stripe] = 0;
#endif

    auto finished = [&](float total, int row) -> float {
#if SCALES == 0
        total *= scale_of(scales + (i64)row * SCALE_BYTES, 0);
#endif
#if BIAS
        total += number(bias[row]);
#endif
        return total;
    };
#pragma unroll
    for (int i = 0; i < RT; i++) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int token = 8 * n + 2 * t + e;
                if (token >= tokens) continue;
                u16* to = out + (i64)token * width;
#if LAID
                acc[i][n][e] *= unscale[token];
                acc[i][n][2 + e] *= unscale[token];
#endif
                if (GATED) {
                    const int m = first_row + 8 * i + g;
                    if (m >= width) continue;
                    const float gate = finished(acc[i][n][e], m), up = finished(acc[i][n][2 + e], width + m);
                    to[m] = rounded(activated(gate, up, 0, 0));
                } else {
                    const int row = first_row + 16 * i + g;
                    if (row < N) to[row] = rounded(finished(acc[i][n][e], row));
                    if (row + 8 < N) to[row + 8] = rounded(finished(acc[i][n][2 + e], row + 8));
                }
            }
        }
    }
}

#if LAID
// Program: one token of x [tokens, K]. laid: for each block of 128 columns what a slot holds of x, see above.
// unscale: [tokens]. The token is multiplied by the power of two that makes its largest exponent 14.
extern "C" __global__ void __launch_bounds__(512)
lay_rows(const u16* x, u8* laid, float* unscale, int K) {
    SHARED float reduced[16];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = blockIdx.x;
#if PDL
    launch_next();
    wait_before();
#endif
    const u16* from = x + (i64)token * K;
    float most = 0;
    for (int at = threadIdx.x * 8; at < K; at += 512 * 8) {
        const uint4 v = *(const uint4*)(from + at);
        const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < 8; j++) most = fmaxf(most, fabsf(number((u16)(words[j / 2] >> (16 * (j % 2))))));
    }
#pragma unroll
    for (int away = 16; away; away /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, away));
    if (lane == 0) reduced[warp] = most;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < 16; w++) most = fmaxf(most, reduced[w]);
    float scale = 1.0f, back = 1.0f;
    const int exponent = (int)(__float_as_uint(most) >> 23), wanted = 254 + 14 - exponent;
    if (exponent > 14 && exponent < 255) {
        scale = __uint_as_float((u32)wanted << 23);
        back = __uint_as_float((u32)(254 - wanted) << 23);
    }
    if (threadIdx.x == 0) unscale[token] = back;
    u8* to = laid + token / 8 * 1024 + token % 8 * 128;
    // Piece p: 16 bytes of a token, of row p / 8 of 128 bytes. q: which half of a step of the instruction.
    for (int p = threadIdx.x; p < K / 8; p += 512) {
        const int row = p / 8, step = p % 8 / 2, q = p % 2;
        u32 made[4];
#pragma unroll
        for (int t = 0; t < 4; t++) {
            const u16* four = from + row * 64 + 16 * t + 4 * step;
            const int one = NIBBLES ? q : 2 * q, two = NIBBLES ? q + 2 : 2 * q + 1;
            made[t] = to_half(number(four[one]) * scale) | (u32)to_half(number(four[two]) * scale) << 16;
        }
        *(uint4*)(to + (i64)row * (1024 * NT) + ((p % 8) ^ (token % 8)) * 16) = make_uint4(made[0], made[1], made[2], made[3]);
    }
}
#endif
