// Products of 9 to 64 rows of 16-bit numbers with narrow weights: warps of a program share rows of x.
//
// A program takes 16 * RT * WARPS rows of the weight and one of gridDim.y parts of its columns. Each warp has
// rows of its own, so that x is read once for all of them: blocks of 128 columns of x come to shared memory with
// the codes, STAGES - 1 blocks ahead. Where there are several parts, each program stores its sums, and the last
// one to end adds them up in their order. GATED: rows g of a tile are gates and rows g + 8 their ups.
//
// The other macros are those of few_rows.cu. SPLIT: there are several parts.

#define X_ROOM (8 * NT * PITCH)
#define CODE_ROOM (WARPS * RT * 2 * PIECES * 512)
#define PITCH 272  // bytes from a token to the next: lanes of a warp then read different banks
#define SCALE_ROOM (SCALES == 2 ? WARPS * 16 : SCALES == 0 ? 0 : (FINE ? 128 / GROUP : 1) * WARPS * 16 * RT * SCALE_BYTES)
#define ZERO_ROOM (ZEROS ? WARPS * 16 * RT : 0)
#define SLOT (X_ROOM + CODE_ROOM + SCALE_ROOM + ZERO_ROOM)
#define CODES_AT X_ROOM
#define SCALES_AT (X_ROOM + CODE_ROOM)
#define ZEROS_AT (SCALES_AT + SCALE_ROOM)
#define THREADS (WARPS * 32)
#define PARTS (SCALES == 2 || (SCALES == 1 && !FINE))

// partial: [stripes, parts, 4 RT NT, THREADS]. arrived: zeros, and zeros again afterwards.
extern "C" __global__ void __launch_bounds__(THREADS)
shared_rows(const u8* weight, const u8* scales, const u8* zeros, const u16* x, const u16* bias, u16* out,
            float* partial, int* arrived, int tokens, int N, int K, int scale_stride) {
#ifdef ON_HOST
    u8* shared = host_shared();
#else
    extern __shared__ __align__(16) u8 shared[];
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

    // Where the lane's codes of a block begin: columns of low halves, and how far those of high halves are.
    const int column = !NIBBLES ? 16 * t : 16 * t / (GROUP / 2) * GROUP + 16 * t % (GROUP / 2);
    const int half = !NIBBLES ? 64 : GROUP / 2;

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
        __syncthreads();  // all copies of block b are there, and all warps are done with the block before
        if (b + STAGES - 1 < end) {
            fetch_codes(next);
            fetch_x(next);
        }
        commit();
        const u8* codes_at = slot + CODES_AT + warp * WARP_CODES;
        const u8* beside = slot + SCALES_AT + warp * (SCALE_ROOM / WARPS);
        const u8* x_at = slot + g * PITCH;
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

