// Products of 9 to 64 rows of 16-bit numbers with narrow weights: warps of a program share rows of x.
//
// A program takes 16 * RT * WARPS rows of the weight and one of gridDim.y parts of its columns. Each warp has
// rows of its own, so that x is read once for all of them: blocks of 128 columns of x come to shared memory with
// the codes, STAGES - 1 blocks ahead. Where there are several parts, each program stores its sums, and the last
// one to end adds them up in their order. GATED: rows g of a tile are gates and rows g + 8 their ups.
//
// The other macros are those of few_rows.cu. SPLIT: there are several parts.

#define CODE_ROOM (WARPS * RT * 2 * PIECES * 512)
#define PITCH 272  // bytes from a token to the next: lanes of a warp then read different banks
#define SCALE_ROOM (SCALES == 2 ? WARPS * 16 : SCALES == 0 ? 0 : (FINE ? 128 / GROUP : 1) * WARPS * 16 * RT * SCALE_BYTES)
#define ZERO_ROOM (ZEROS ? WARPS * 16 * RT : 0)
#define SLOT (CODE_ROOM + SCALE_ROOM + ZERO_ROOM + 8 * NT * PITCH)
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

    auto fetch_codes = [&](int slot, int b) {
        u8* to = shared + slot * SLOT + warp * (RT * 2 * PIECES * 512);
#pragma unroll
        for (int i = 0; i < RT; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const u8* from = weight + (base_row(i, h) + g) * (i64)(NIBBLES ? K / 2 : K) + 16 * t;
#pragma unroll
                for (int p = 0; p < PIECES; p++) {
                    copy16(to + (((i * 2 + h) * PIECES + p) * 32 + lane) * 16, from + b * (64 * PIECES) + 64 * p, 16);
                }
            }
        }
        u8* beside = shared + slot * SLOT + CODE_ROOM + warp * (SCALE_ROOM / WARPS);
#if SCALES == 2
        if (lane < 2) copy4(beside + 4 * lane, scales + (i64)(base_row(0, lane) / 128 * scale_stride + b) * 4);
#elif SCALES == 1
        constexpr int SIZE = SCALE_BYTES, GROUPS = FINE ? 128 / GROUP : 1, HALVES = SIZE == 4 ? 2 : 1;
        for (int c = lane; c < GROUPS * RT * 2 * HALVES; c += 32) {
            const int q = c % HALVES, h = c / HALVES % 2, i = c / (2 * HALVES) % RT, k = c / (2 * HALVES * RT);
            const u8* at = scales + ((i64)(b * GROUPS + k) * scale_stride + base_row(i, h) + 4 * q) * SIZE;
            u8* into = beside + (k * 16 * RT + i * 16 + h * 8 + 4 * q) * SIZE;
            if (SIZE == 1) copy8(into, at, 8);
            else copy16(into, at, 16);
        }
#endif
#if ZEROS
        if (lane < 2 * RT) {
            u8* into = shared + slot * SLOT + CODE_ROOM + SCALE_ROOM + warp * 16 * RT;
            copy8(into + 8 * lane, zeros + (i64)b * scale_stride + base_row(lane / 2, lane % 2), 8);
        }
#endif
    };
    auto fetch_x = [&](int slot, int b) {
        u8* to = shared + slot * SLOT + CODE_ROOM + SCALE_ROOM + ZERO_ROOM;
        for (int c = threadIdx.x; c < 128 * NT; c += THREADS) {
            const int token = c / 16, piece = c % 16;
            const bool in = token < tokens;
            copy16(to + token * PITCH + 16 * piece, in ? x + (i64)token * K + b * 128 + 8 * piece : x, in ? 16 : 0);
        }
    };

    // Where the lane's codes of a block begin: columns of low halves, and how far those of high halves are.
    const int column = !NIBBLES ? 16 * t : 16 * t / (GROUP / 2) * GROUP + 16 * t % (GROUP / 2);
    const int half = !NIBBLES ? 64 : GROUP / 2;

#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (begin + s < end) fetch_codes(s, begin + s);
    }
#if PDL
    wait_before();
#endif
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (begin + s < end) fetch_x(s, begin + s);
        commit();
    }

    float acc[RT][NT][4] = {};
    for (int b = begin; b < end; b++) {
        const int slot = (b - begin) % STAGES, next = b + STAGES - 1;
        WAIT_GROUP(STAGES - 2);
        __syncthreads();  // all copies of block b are there, and all warps are done with the block before
        if (next < end) {
            fetch_codes((next - begin) % STAGES, next);
            fetch_x((next - begin) % STAGES, next);
        }
        commit();
        const u8* codes_at = shared + slot * SLOT + warp * (RT * 2 * PIECES * 512);
        const u8* beside = shared + slot * SLOT + CODE_ROOM + warp * (SCALE_ROOM / WARPS);
        const u8* x_at = shared + slot * SLOT + CODE_ROOM + SCALE_ROOM + ZERO_ROOM + g * PITCH;
        Fine fine[RT][2];
#pragma unroll
        for (int i = 0; i < RT; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int at = 16 * i + 8 * h + g;
                u32 z = 8, power = 0;
#if ZEROS
                z = shared[slot * SLOT + CODE_ROOM + SCALE_ROOM + warp * 16 * RT + at];
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
