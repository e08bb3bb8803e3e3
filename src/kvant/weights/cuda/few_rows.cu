// Products of few rows of 16-bit numbers with narrow weights: out = x w^T * scale + bias, for linear layers
// and for experts.
//
// A warp takes 16 * RT rows of the weight and a part of its columns; the warps of a program share rows and
// add their sums in a fixed order. Codes go to shared memory ahead of their use in 16-byte pieces, in the
// layout of the checkpoint; each lane reads what it has fetched itself and makes operands of matrix
// instructions of it. The order of columns within an instruction is free as long as both operands agree:
// lane (g, t) holds 16 bytes of rows g and g + 8 from byte 16 t on, and the same columns of token g.
//
// ONE: a single row x. It is read once into shared memory, normalised there with NORM (2: by 1 + weight), and multiplied by a
// power of two so that float16 holds it exactly; its product is divided by that at the end.
// EXPERTS: 1, program y takes all pairs of expert y (lists, counts); 2, the pair y; 3, the sum of all
// experts of token y. GATED: rows g are gates and rows g + 8 their ups, and the results are activated.
// ADDED: the residual is added to the rounded result.
//
// Macros: CODE 0 e4m3, 1 int8, 2 int4, 3 e2m1 (two codes a byte, a group's halves), 4 int6
// (`kvant.weights.codecs`); SCALES 0 per output,
// 1 per group of GROUP inputs [K / GROUP, rows], 2 per block of 128 x 128; SCALE_TYPE 0 float, 1 half,
// 2 bfloat16, 3 a power of two, 4 uint8, 5 int8; ZEROS; OFFSETS: numbers beside scales, in the place of zero points,
// are added; SUPER: inputs that share float16 factors of scales and of offsets, whose sign turns; 0 without; BIAS; BFLOAT16, else half; NT tiles of 8 tokens; RT tiles of 16 rows;
// WARPS; STAGES blocks of 128 columns that a warp has fetched; K columns, or `inputs`; TOP_K for EXPERTS 3; ALTERNATING order of gates and
// ups; ACTIVATION 0 silu, 1 gelu_tanh, 2 clamped; SHARE: results are multiplied by weights of pairs; PDL:
// the program may start while the kernel before it runs; BARE: 4-bit codes for a single row stay 1024 + code, or
// 1024 + 16 times the code in high halves, whose columns of x are divided by 16. What that adds is taken from a block's
// sum; RESIDENT programs have room in a multiprocessor's registers; 0 for any number; ROUTED: number of experts, if
// the program chooses them by `logits` [tokens, ROUTED]; SOFTMAX_FIRST, RENORMALISE, ROUNDED_SHARES: how shares are made of the chosen logits.

#define PARTS (SCALES == 2 || (SCALES == 1 && !FINE) || EXPERTS == 3)  // sums of a block are scaled
#define RAGGED (K % 128 != 0)
#define BLOCKS ((K + 127) / 128)
#define CODE_ROOM (RT * 2 * PIECES * 512)
#define SCALE_ROOM (SCALES == 2 ? 16 : SCALES == 0 ? (EXPERTS == 3 ? 64 * RT : 0) \
                    : GROUPS_OF_BLOCK * 16 * RT * SCALE_BYTES)
#define BESIDE (OFFSETS || SUPER)  // more than scales or zero points lies beside codes
#define OFFSETS_AT (CODE_ROOM + SCALE_ROOM)
#define FACTORS_AT (OFFSETS_AT + (OFFSETS ? SCALE_ROOM : 0))
#define UPPER_AT (FACTORS_AT + (SUPER ? (OFFSETS ? 64 : 32) * RT : 0))
#define SLOT (UPPER_AT + (SIX ? 512 * RT : 0) + (ZEROS ? 16 * RT : 0))
#define RING (WARPS * STAGES * SLOT)
#define SUMS (WARPS * 16 * RT * (ONE ? 4 : 32 * NT))
#define THREADS (WARPS * 32)
#if RESIDENT
#define BOUNDS __launch_bounds__(THREADS, RESIDENT)
#else
#define BOUNDS __launch_bounds__(THREADS)
#endif
#define NEXT (!ONE && FINE && NT == 1)  // rows of x are read a block before their products
// One product, at most one result per thread: what only that result needs is fetched before the launch in front ends.
#define EARLY (ONE && !EXPERTS && (GATED ? 8 : 16) * RT <= THREADS)

#if ROUTED
// A warp's keys of a token's logits. They order experts by logit, and the lowest first among equal ones; NaN is last.
struct Keys {
    u32 keys[(ROUTED + 31) / 32];

    __device__ Keys(const u16* logits, int lane) {
#pragma unroll
        for (int i = 0; i < (ROUTED + 31) / 32; i++) {
            const int expert = lane + 32 * i;
            keys[i] = 0;
            if (expert >= ROUTED) continue;
            const u32 bits = logits[expert] == 0x8000 ? 0 : logits[expert];
            const bool nan = (bits & 0x7fff) > (BFLOAT16 ? 0x7f80 : 0x7c00);
            const u32 order = nan ? 0 : bits & 0x8000 ? 0xffff - bits : bits | 0x8000;
            keys[i] = order << 16 | (0xffff - expert);
        }
    }
    // Returns the largest key of all lanes, and takes it out.
    __device__ u32 take_best() {
        u32 best = 0;
#pragma unroll
        for (u32 key : keys) best = best > key ? best : key;
        best = most_of_warp(best);
#pragma unroll
        for (u32& key : keys) key = key == best ? 0 : key;
        return best;
    }
    static __device__ int expert_of(u32 key) { return 0xffff - (key & 0xffff); }
    static __device__ float logit_of(u32 key) {
        const u32 order = key >> 16;
        return number((u16)(order & 0x8000 ? order & 0x7fff : 0xffff - order));
    }
};
#endif

// weight, scales, zeros: of all experts' rows. x: [rows of x, K]. rows: of one weight, N. bias: [N] for each
// weight. lists: [experts, most] pairs; counts: pairs of each; ids, shares: [tokens, top_k]. scale_stride:
// between groups, or between rows of blocks. residual, out: as wide as results. inputs: columns, where K is not
// known before.
extern "C" __global__ void BOUNDS
few_rows(const u8* weight, const u8* scales, const u8* zeros, const u8* factors, const u16* x, const u16* bias,
         const u16* norm_weight, const u16* residual, u16* out, const int* lists, const int* counts,
         const int* ids, const float* shares, const u16* logits, int tokens, int N, int tiles,
         int scale_stride, int most, int top_k, int inputs, float eps, float limit, float alpha,
         float share_factor) {
#ifdef ON_HOST
    u8* shared = host_shared();
#else
    extern __shared__ __align__(16) u8 shared[];
#endif
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int stripe = blockIdx.x / tiles, y = blockIdx.y;
    const int width = GATED ? N / 2 : N;  // results of a row of x
    const int first_row = stripe * (GATED ? 8 : 16) * RT;
    u8* ring = shared + warp * (STAGES * SLOT);
    float* sums = (float*)shared;  // when all codes were read

#if PDL
#if EXPERTS == 2
    // The sum of a token's experts behind this reads `ids` or `logits` before it waits, so it must not start
    // before they are complete.
    wait_before();
    launch_next();
#else
    launch_next();
#if EXPERTS == 1
    wait_before();
#endif
#endif
#endif

    int expert = 0, count = tokens;
    if (EXPERTS == 1) {
        expert = y;
        count = counts[y];
        if (count == 0) return;
    } else if (EXPERTS == 2) {
#if ROUTED
        Keys keys(logits + (i64)(y / top_k) * ROUTED, lane);
        u32 best = 0;
        for (int rank = 0; rank <= y % top_k; rank++) best = keys.take_best();
        expert = Keys::expert_of(best);
#else
        expert = ids[y];
#endif
    }

    // The first of 8 neighbouring rows of a weight, for half h of tile i. Rows behind the last repeat it.
    auto base_row = [&](int i, int h) -> int {
        if (GATED && !ALTERNATING) return h * width + min(first_row + 8 * i, width - 8);
        return min((GATED ? 2 * first_row : first_row) + 16 * i + 8 * h, N - 8);
    };
    auto lane_row = [&](int i, int h) -> int {
        if (GATED && ALTERNATING) {
            const int at = 2 * g + h;
            return base_row(i, at / 8) + at % 8;
        }
        return base_row(i, h) + g;
    };
    // Where the scale of the lane's row is among the 16 of a tile.
    auto place = [&](int h) -> int { return GATED && ALTERNATING ? 2 * g + h : 8 * h + g; };

    // Where the lane's codes of a block begin: columns of low halves, and how far those of high halves are.
    const int column = !NIBBLES ? 16 * t : 16 * t / (GROUP / 2) * GROUP + 16 * t % (GROUP / 2);
    const int half = !NIBBLES ? 64 : GROUP / 2;
    // Which 16 bytes of a piece the lane fetches into. With groups, lanes then read words without conflicts.
    const int kept = GROUPED ? 4 * g + (t + g / 2) % 4 : lane;

#if EXPERTS == 3
    SHARED int chosen[TOP_K];
    SHARED float portion[TOP_K];
#if ROUTED
    if (warp == 0) {
        Keys keys(logits + (i64)y * ROUTED, lane);
        u32 best[TOP_K];
        float share[TOP_K], total = 0, of_chosen = 0;
#pragma unroll
        for (int j = 0; j < TOP_K; j++) {
            best[j] = keys.take_best();
            share[j] = expf(Keys::logit_of(best[j]) - Keys::logit_of(best[0]));
        }
        for (int e = lane; e < ROUTED; e += 32)
            total += expf(number(logits[(i64)y * ROUTED + e]) - Keys::logit_of(best[0]));
#pragma unroll
        for (int away = 16; away; away /= 2) total += __shfl_xor_sync(0xffffffffu, total, away);
#pragma unroll
        for (int j = 0; j < TOP_K; j++) {
            if (SOFTMAX_FIRST) share[j] /= total;
            of_chosen += share[j];
        }
#pragma unroll
        for (int j = 0; j < TOP_K; j++) {
            if (RENORMALISE) share[j] /= of_chosen;
            share[j] *= share_factor;
            if (total != total) share[j] = total;  // a NaN among the logits
            if (ROUNDED_SHARES) share[j] = nearest(share[j]);
            if (lane == j) chosen[j] = Keys::expert_of(best[j]), portion[j] = share[j];
        }
    }
#else
    if (threadIdx.x < TOP_K) {
        chosen[threadIdx.x] = ids[(i64)y * TOP_K + threadIdx.x];
        portion[threadIdx.x] = shares[(i64)y * TOP_K + threadIdx.x];
    }
#endif
    __syncthreads();
#endif
    const int units = EXPERTS == 3 ? TOP_K * BLOCKS : BLOCKS;
#if BESIDE
    // Scales or offsets of 8 rows at a time, of all groups of block b.
    auto copy_groups = [&](u8* to, const u8* all, i64 row0, int b) {
        constexpr int SIZE = SCALE_BYTES;
        for (int c = lane; c < GROUPS_OF_BLOCK * RT * 2; c += 32) {
            const int h = c % 2, i = c / 2 % RT, k = c / (2 * RT);
            const bool in = !RAGGED || b * 128 + k * GROUP < K;
            const i64 group = (i64)b * GROUPS_OF_BLOCK + k;
            const u8* at = in ? all + (group * scale_stride + row0 + base_row(i, h)) * SIZE : all;
            u8* into = to + (k * 16 * RT + i * 16 + h * 8) * SIZE;
            if (SIZE == 1) copy8(into, at, in ? 8 : 0);
            else copy16(into, at, in ? 16 : 0);
        }
    };
    auto fetch_beside = [&](u8* to, i64 row0, int b) {
        copy_groups(to + CODE_ROOM, scales, row0, b);
#if OFFSETS
        copy_groups(to + OFFSETS_AT, zeros, row0, b);
#endif
#if SUPER
        for (int c = lane; c < (OFFSETS ? 4 : 2) * RT; c += 32) {
            const int h = c % 2, i = c / 2 % RT, o = c / (2 * RT);
            const i64 at = ((i64)o * (K / SUPER) + b / (SUPER / 128)) * scale_stride + row0 + base_row(i, h);
            copy16(to + FACTORS_AT + (o * 16 * RT + i * 16 + h * 8) * 2, factors + at * 2, 16);
        }
#endif
#if SIX
#pragma unroll
        for (int i = 0; i < RT; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const u8* at = weight + (row0 + lane_row(i, h)) * (i64)ROW_BYTES + K / 2 + b * 32 + 16 * t;
                if (t < 2) copy16(to + UPPER_AT + ((i * 2 + h) * 8 + g) * 32 + 16 * t, at, 16);
            }
        }
#endif
    };
#endif
#if EXPERTS != 3
    // What this lane fetches of block 0.
    const u8* const codes_from = weight + (i64)expert * N * ROW_BYTES + 16 * t;
    u32 row_at[RT][2];
#pragma unroll
    for (int i = 0; i < RT; i++) {
#pragma unroll
        for (int h = 0; h < 2; h++) row_at[i][h] = (u32)lane_row(i, h) * (u32)ROW_BYTES;
    }
#if SCALES == 2
    const u8* const scales_from = scales + ((i64)expert * N + base_row(0, lane % 2)) / 128 * scale_stride * 4;
#elif SCALES == 1 && !BESIDE
    constexpr int SIZE = SCALE_BYTES, GROUPS = GROUPS_OF_BLOCK;
    constexpr int HALVES = SIZE == 4 ? 2 : 1;  // copies for 8 rows
    constexpr int SCALE_COPIES = GROUPS * RT * 2 * HALVES;
    const int scale_q = lane % HALVES, scale_h = lane / HALVES % 2, scale_i = lane / (2 * HALVES) % RT;
    const int scale_k = lane / (2 * HALVES * RT) % GROUPS;
    const u8* const scales_from = scales + ((i64)scale_k * scale_stride + (i64)expert * N +
                                            base_row(scale_i, scale_h) + 4 * scale_q) * SIZE;
    const int scale_to = (scale_k * 16 * RT + scale_i * 16 + scale_h * 8 + 4 * scale_q) * SIZE;
#endif
#if ZEROS
    const u8* const zeros_from = zeros + (i64)expert * N + base_row(lane / 2 % RT, lane % 2);
#endif
    auto fetch = [&](int slot, int b) {
        u8* to = ring + slot * SLOT;
        const u8* from = codes_from + (u32)(b * 64 * PIECES);
#pragma unroll
        for (int i = 0; i < RT; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
#pragma unroll
                for (int p = 0; p < PIECES; p++) {
                    const bool in = !RAGGED || b * 128 + column + 64 * p < K;
                    const u8* at = in || FINE ? from + row_at[i][h] + 64 * p : weight;
                    copy16(to + (((i * 2 + h) * PIECES + p) * 32 + kept) * 16, at, in ? 16 : 0);
                }
            }
        }
#if SCALES == 2
        if (lane < 2) copy4(to + CODE_ROOM + 4 * lane, scales_from + 4 * b);
#elif BESIDE
        fetch_beside(to, (i64)expert * N, b);
#elif SCALES == 1
        if (lane < SCALE_COPIES) {
            const bool in = !RAGGED || b * 128 + scale_k * GROUP < K;
            const u8* at = in || FINE ? scales_from + (i64)b * (GROUPS * SIZE * scale_stride) : scales;
            if (SIZE == 1) copy8(to + CODE_ROOM + scale_to, at, in ? 8 : 0);
            else copy16(to + CODE_ROOM + scale_to, at, in ? 16 : 0);
        }
#endif
#if ZEROS
        if (lane < 2 * RT) copy8(to + CODE_ROOM + SCALE_ROOM + 8 * lane, zeros_from + (i64)b * scale_stride, 8);
#endif
    };
#else
    auto fetch = [&](int slot, int unit) {
        int b = unit, e = expert;
#if EXPERTS == 3
        b = unit % BLOCKS;
        e = chosen[unit / BLOCKS];
#endif
        u8* to = ring + slot * SLOT;
        const i64 row0 = (i64)e * N;
#pragma unroll
        for (int i = 0; i < RT; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const u8* from = weight + (row0 + lane_row(i, h)) * (i64)ROW_BYTES + 16 * t;
#pragma unroll
                for (int p = 0; p < PIECES; p++) {
                    const bool in = !RAGGED || b * 128 + column + 64 * p < K;
                    const u8* at = in ? from + (i64)b * (64 * PIECES) + 64 * p : weight;
                    copy16(to + (((i * 2 + h) * PIECES + p) * 32 + kept) * 16, at, in ? 16 : 0);
                }
            }
        }
        u8* beside = to + CODE_ROOM;
#if SCALES == 2
        if (lane < 2) {
            const i64 row = row0 + base_row(0, lane);
            copy4(beside + 4 * lane, scales + ((row / 128) * scale_stride + b) * 4);
        }
#elif BESIDE
        fetch_beside(to, row0, b);
#elif SCALES == 1 || EXPERTS == 3
        constexpr int SIZE = SCALES ? SCALE_BYTES : 4, GROUPS = GROUPS_OF_BLOCK;
        constexpr int HALVES = SIZE == 4 ? 2 : 1;  // copies for 8 rows
        for (int c = lane; c < GROUPS * RT * 2 * HALVES; c += 32) {
            const int q = c % HALVES, h = c / HALVES % 2, i = c / (2 * HALVES) % RT, k = c / (2 * HALVES * RT);
            const i64 row = row0 + base_row(i, h) + 4 * q;
            const bool in = !RAGGED || b * 128 + k * GROUP < K;
            const i64 group = SCALES ? (i64)b * GROUPS + k : 0;
            const u8* at = scales + (group * scale_stride + row) * SIZE;
            u8* into = beside + (k * 16 * RT + i * 16 + h * 8 + 4 * q) * SIZE;
            if (SIZE == 1) copy8(into, in ? at : scales, in ? 8 : 0);
            else copy16(into, in ? at : scales, in ? 16 : 0);
        }
#endif
#if ZEROS
        if (lane < 2 * RT) {
            const i64 row = row0 + base_row(lane / 2, lane % 2);
            copy8(beside + SCALE_ROOM + 8 * lane, zeros + (i64)b * scale_stride + row, 8);
        }
#endif
    };
#endif

#if ONE
    u16* staged = (u16*)(shared + (RING > SUMS ? RING : SUMS));  // [rows of x, K]
#if BARE
    float* added_by_block = (float*)(staged + K);  // [BLOCKS, 2]: times 1, times the zero point
#endif
    SHARED float reduced[2 * WARPS];  // largest magnitudes and squares of warps
#else
    const u16* token[NT];
#endif
    float unscale = 1.0f;  // of a staged row

#pragma unroll
    for (int s = 0; s < STAGES; s++) {
        if (warp + s * WARPS < units) fetch(s, warp + s * WARPS);
        commit();
    }
#if ONE
    constexpr int ROWS = EXPERTS == 3 ? TOP_K : 1;
    constexpr int EACH = (ROWS * K / 8 + THREADS - 1) / THREADS;  // pieces of 8 numbers of a thread
#endif
#if EARLY
    // What nothing has read before is fetched early: scales and bias of the thread's own result, and the norm's weight.
    const int own = min(first_row + (int)threadIdx.x, width - 1), own_low = GATED && ALTERNATING ? 2 * own : own;
    const int own_high = GATED ? (ALTERNATING ? own_low + 1 : width + own) : own;
    float own_scale[2] = {1.0f, 1.0f}, own_bias[2] = {0.0f, 0.0f};
#if SCALES == 0
    own_scale[0] = scale_of(scales + (i64)own_low * SCALE_BYTES, 0);
    own_scale[1] = scale_of(scales + (i64)own_high * SCALE_BYTES, 0);
#endif
#if BIAS
    own_bias[0] = number(bias[own_low]);
    own_bias[1] = number(bias[own_high]);
#endif
#if NORM
    uint4 by_norm[EACH];
#pragma unroll
    for (int n = 0; n < EACH; n++) {
        const int at = (n * THREADS + (int)threadIdx.x) * 8;
        by_norm[n] = make_uint4(0, 0, 0, 0);
        if (at < K) by_norm[n] = *(const uint4*)(norm_weight + at);
    }
#endif
#endif
#if PDL && (!EXPERTS || EXPERTS == 3)
    wait_before();
#endif
#if EARLY && ADDED
    const u16 own_residual = residual[(i64)y * width + own];
#endif

#if ONE
    {
        const u16* from = x + (i64)(EXPERTS == 3 ? y * TOP_K : EXPERTS == 2 && GATED ? y / top_k : y) * K;
        float v[EACH][8];
        float most_found = 0, squares = 0;
#pragma unroll
        for (int n = 0; n < EACH; n++) {
            const int at = (n * THREADS + (int)threadIdx.x) * 8;
            uint4 raw = make_uint4(0, 0, 0, 0), by = raw;
            if (at < ROWS * K) {
                raw = *(const uint4*)(from + at);
#if NORM && EARLY
                by = by_norm[n];
#elif NORM
                by = *(const uint4*)(norm_weight + at);
#endif
            }
            const u32 words[4] = {raw.x, raw.y, raw.z, raw.w}, factors[4] = {by.x, by.y, by.z, by.w};
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float value = number((u16)(words[j / 2] >> (16 * (j % 2))));
#if NORM
                squares += value * value;
                value *= (NORM == 2) + number((u16)(factors[j / 2] >> (16 * (j % 2))));
#endif
                v[n][j] = value;
                most_found = fmaxf(most_found, fabsf(value));
            }
        }
#pragma unroll
        for (int away = 16; away; away /= 2) {
            most_found = fmaxf(most_found, __shfl_xor_sync(0xffffffffu, most_found, away));
            squares += __shfl_xor_sync(0xffffffffu, squares, away);
        }
        if (lane == 0) {
            reduced[warp] = most_found;
            reduced[WARPS + warp] = squares;
        }
        __syncthreads();
        most_found = squares = 0;
        for (int w = 0; w < WARPS; w++) {
            most_found = fmaxf(most_found, reduced[w]);
            squares += reduced[WARPS + w];
        }
        float row_scale = 1.0f;
#if !OPERAND_BFLOAT16
        // The largest exponent becomes 14: 2^(14 - exponent), for exponents that leave it a normal number.
        const int exponent = (int)(__float_as_uint(most_found) >> 23);
        const int wanted = 254 + 14 - exponent;
        if (exponent > 14 && exponent < 255) {
            row_scale = __uint_as_float((u32)wanted << 23);
            unscale = __uint_as_float((u32)(254 - wanted) << 23);
        }
#endif
#if NORM
        unscale *= rsqrtf(squares / K + eps);
#endif
#pragma unroll
        for (int n = 0; n < EACH; n++) {
            const int at = (n * THREADS + (int)threadIdx.x) * 8;
#if BARE
            float by_one = 0, by_zero = 0;
#endif
            if (at < ROWS * K) {
                u32 made[4];
#if !BARE
                const float scale = row_scale;
#else
                const bool high = at % 128 >= 64;  // columns of high halves
                const float scale = high ? row_scale * 0.0625f : row_scale;
#endif
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    // Pairs as codes are decoded: neighbours, or those two apart.
                    const int one = NIBBLES ? j / 2 * 4 + j % 2 : 2 * j, two = NIBBLES ? one + 2 : one + 1;
                    const float a = v[n][one] * scale, b = v[n][two] * scale;
                    made[j] = OPERAND_BFLOAT16 ? to_bfloat16(a) | (u32)to_bfloat16(b) << 16
                                               : to_half(a) | (u32)to_half(b) << 16;
                }
                *(uint4*)(staged + at) = make_uint4(made[0], made[1], made[2], made[3]);
#if BARE
                float sum = 0;
#pragma unroll
                for (int j = 0; j < 4; j++) sum += from_half((u16)made[j]) + from_half((u16)(made[j] >> 16));
                by_one = sum * (ZEROS ? 1024.0f : high ? 1152.0f : 1032.0f);
                by_zero = sum * (high ? 16.0f : 1.0f);
#endif
            }
#if BARE
#pragma unroll
            for (int away = 8; away; away /= 2) {  // 16 threads have a block
                by_one += __shfl_xor_sync(0xffffffffu, by_one, away);
                if (ZEROS) by_zero += __shfl_xor_sync(0xffffffffu, by_zero, away);
            }
            if (lane % 16 == 0 && at < ROWS * K) {
                added_by_block[at / 128 * 2] = by_one;
                if (ZEROS) added_by_block[at / 128 * 2 + 1] = by_zero;
            }
#endif
        }
        __syncthreads();
    }
#endif

    const int token0 = ONE ? 0 : blockIdx.x % tiles * (8 * NT);
    // With lists, a program takes all pairs of its expert in turn.
    for (int first = token0; first < count; first += EXPERTS == 1 ? 8 * NT : 1 << 30) {
        if (EXPERTS == 1 && first > token0) {
            __syncthreads();  // sums were read
#pragma unroll
            for (int s = 0; s < STAGES; s++) {
                if (warp + s * WARPS < units) fetch(s, warp + s * WARPS);
                commit();
            }
        }
#if NEXT
        uint4 next[4][NT];  // columns of the warp's next block
        auto fetch_columns = [&](int q, int b) {
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const bool in = token[n] && b * 128 + column < K;
                if (in) next[q][n] = *(const uint4*)(token[n] + b * 128 + q / 2 * half + q % 2 * 8);
                else next[q][n] = make_uint4(0, 0, 0, 0);
            }
        };
#endif
#if !ONE
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const int at = first + 8 * n + g;
            token[n] = nullptr;
            if (at < count) {
                i64 row = at;
                if (EXPERTS == 1) {
                    row = lists[(i64)expert * most + at];
                    if (GATED) row /= top_k;
                }
                token[n] = x + row * K + (GROUPED ? 4 * t : column);
            }
        }
#endif
#if NEXT
#pragma unroll
        for (int q = 0; q < 4; q++) fetch_columns(q, warp);
#endif
        float acc[RT][NT][4] = {};
#if ONE && !GROUPED
        uint4 columns[1] = {make_uint4(0, 0, 0, 0)};  // of lanes that have no token: always zeros
#endif

        for (int turn = 0; warp + turn * WARPS < units; turn++) {
            const int unit = warp + turn * WARPS, slot = turn % STAGES;
            const int b = EXPERTS == 3 ? unit % BLOCKS : unit;
            WAIT_GROUP(STAGES - 1);
            __syncwarp();
            const u8* from = ring + slot * SLOT;
            const u8* beside = from + CODE_ROOM;
#if GROUPED
            // Each instruction takes a word of every lane: 16 columns, or halves of 16 bytes, of one group.
            constexpr int LAST = NIBBLES ? 1 : 0, RUN = SIX ? 32 : GROUP;
            constexpr int WORDS = SIX ? 1 : (NIBBLES ? 4 : 8) / GROUPS_OF_BLOCK;  // of a group
            const Fine fine = fine_of(OFFSETS ? 0 : 8, 0);
            float part[RT][NT][4], inputs_sum[NT][4];
#pragma unroll
            for (int word = 0; word < (NIBBLES ? 4 : 8); word++) {
                u32 codes[RT][2], upper[RT][2];
#pragma unroll
                for (int i = 0; i < RT; i++) {
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const int piece = (i * 2 + h) * PIECES + word / 4;
                        codes[i][h] = *(const u32*)(from + (piece * 32 + 4 * g + (word + g / 2) % 4) * 16 + 4 * t);
#if SIX
                        upper[i][h] = *(const u32*)(from + UPPER_AT + ((i * 2 + h) * 8 + g) * 32 + word * 8 + t % 2 * 4);
                        upper[i][h] >>= t / 2 * 2;
#endif
                    }
                }
#pragma unroll
                for (int c = 0; c <= LAST; c++) {
                    const int w = word % WORDS, q = SIX ? 2 * word + c : word / WORDS;
                    const int run = word * 32 / RUN;  // of codes: one that a word of 4-bit codes is in
                    const int offset = b * 128 + (NIBBLES ? run * RUN + w * 16 + c * (RUN / 2) : word * 16);
                    if (SIX || (w == 0 && c == 0)) {
#pragma unroll
                        for (int n = 0; n < NT; n++) {
#pragma unroll
                            for (int e = 0; e < 4; e++) {
                                inputs_sum[n][e] = 0;
#pragma unroll
                                for (int i = 0; i < RT; i++) part[i][n][e] = 0;
                            }
                        }
                    }
                    u32 a[RT][4];
#pragma unroll
                    for (int i = 0; i < RT; i++) {
#pragma unroll
                        for (int h = 0; h < 2; h++) {
#if SIX
                            const u32 low = codes[i][h] >> (4 * c) & 0x0f0f0f0fu;
                            const u32 six = low | (upper[i][h] >> (4 * c) & 0x03030303u) << 4;
                            decode_six(six, a[i][h], a[i][h + 2]);
#else
                            if (c) decode<1>(codes[i][h], fine, a[i][h], a[i][h + 2]);
                            else decode<0>(codes[i][h], fine, a[i][h], a[i][h + 2]);
#endif
                        }
                    }
#pragma unroll
                    for (int n = 0; n < NT; n++) {
                        uint2 v = make_uint2(0, 0);
#if ONE
                        const int row = EXPERTS == 3 ? unit / BLOCKS : 0;
                        if (g == 0 && (!RAGGED || offset < K)) v = *(const uint2*)(staged + row * K + offset + 4 * t);
#else
                        if (token[n] && (!RAGGED || offset < K)) v = *(const uint2*)(token[n] + offset);
#if NIBBLES
                        v = make_uint2(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.x, v.y, 0x7632));
#endif
#endif
#pragma unroll
                        for (int i = 0; i < RT; i++) multiply(part[i][n], a[i], v.x, v.y);
#if OFFSETS
                        constexpr u32 ONES = OPERAND_BFLOAT16 ? 0x3f803f80u : 0x3c003c00u;
                        const u32 ones[4] = {ONES, ONES, ONES, ONES};
                        multiply(inputs_sum[n], ones, v.x, v.y);
#endif
                    }
                    if (!SIX && (w < WORDS - 1 || c < LAST)) continue;
                    float share = 1.0f;
#if EXPERTS == 3
                    share = portion[unit / BLOCKS];
#endif
#pragma unroll
                    for (int i = 0; i < RT; i++) {
#pragma unroll
                        for (int h = 0; h < 2; h++) {
                            const int at = 16 * i + place(h);
                            float factor = share * scale_of(beside, q * 16 * RT + at), added = 0;
#if OFFSETS
                            added = share * scale_of(from + OFFSETS_AT, q * 16 * RT + at);
#endif
#if SUPER
                            factor *= from_half(((const u16*)(from + FACTORS_AT))[at]);
#if OFFSETS
                            added *= -from_half(((const u16*)(from + FACTORS_AT))[16 * RT + at]);
#endif
#endif
#pragma unroll
                            for (int n = 0; n < NT; n++) {
#pragma unroll
                                for (int e = 0; e < 2; e++) {
                                    acc[i][n][2 * h + e] += part[i][n][2 * h + e] * factor;
                                    if (OFFSETS) acc[i][n][2 * h + e] += inputs_sum[n][e] * added;
                                }
                            }
                        }
                    }
                }
            }
#else
            Fine fine[RT][2];
#pragma unroll
            for (int i = 0; i < RT; i++) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int at = 16 * i + place(h);
                    u32 z = 8, power = 0;
#if ZEROS
                    z = beside[SCALE_ROOM + at];
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
            auto products = [&](auto with) {
#pragma unroll
                for (int q = 0; q < 4; q++) {  // half q % 2 of the lane's piece q / 2, which is 16 columns
                    const int c = q / 2;
#if ONE
                    const int offset = b * 128 + column + c * half + q % 2 * 8;
                    if (g == 0) {
                        const int row = EXPERTS == 3 ? unit / BLOCKS : 0;
                        if (RAGGED) columns[0] = make_uint4(0, 0, 0, 0);
                        if (!RAGGED || offset < K) columns[0] = *(const uint4*)(staged + row * K + offset);
                    }
#else
                    uint4 columns[NT];
#pragma unroll
                    for (int n = 0; n < NT; n++) {
#if NEXT
                        uint4 v = next[q][n];
#else
                        uint4 v = make_uint4(0, 0, 0, 0);
                        const int offset = b * 128 + c * half + q % 2 * 8;
                        if (token[n] && (!RAGGED || column + offset < K)) v = *(const uint4*)(token[n] + offset);
#endif
#if NIBBLES
                        v = make_uint4(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.x, v.y, 0x7632),
                                       __byte_perm(v.z, v.w, 0x5410), __byte_perm(v.z, v.w, 0x7632));
#endif
                        columns[n] = v;
                    }
#if NEXT
                    fetch_columns(q, b + WARPS);
#endif
#endif
                    uint4 codes[RT][2];
#pragma unroll
                    for (int i = 0; i < RT; i++) {
#pragma unroll
                        for (int h = 0; h < 2; h++) {
                            const int piece = (i * 2 + h) * PIECES + (PIECES == 2 ? c : 0);
                            codes[i][h] = *(const uint4*)(from + (piece * 32 + lane) * 16);
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
#if BARE
                                const u32 mask = c ? 0x00f000f0u : 0x000f000fu;
                                a[i][h] = and_or(word, mask, 0x64006400u);
                                a[i][h + 2] = and_or(word >> 8, mask, 0x64006400u);
#else
                                if (c) decode<1, decltype(with)::value>(word, fine[i][h], a[i][h], a[i][h + 2]);
                                else decode<0, decltype(with)::value>(word, fine[i][h], a[i][h], a[i][h + 2]);
#endif
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
            };
#if FINE && !ONE
            // Scales above 2 take a second factor. If no lane has one, the warp takes no instruction for it.
            u32 large = 0;
#pragma unroll
            for (int i = 0; i < RT; i++) large |= fine[i][0].more | fine[i][1].more;
            if (__any_sync(0xffffffffu, large)) products(Constant<1>());
            else products(Constant<0>());
#else
            products(Constant<1>());
#endif
#if PARTS
            float share = 1.0f;
#if EXPERTS == 3
            share = portion[unit / BLOCKS];
#endif
#pragma unroll
            for (int i = 0; i < RT; i++) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float factor = share;
#if SCALES == 2
                    factor *= ((const float*)beside)[h];
#elif SCALES == 1 && !FINE
                    factor *= scale_of(beside, 16 * i + place(h));
#elif SCALES == 0
                    factor *= ((const float*)beside)[16 * i + place(h)];
#endif
#if BARE
                    float added = added_by_block[2 * unit];
#if ZEROS
                    added += (float)beside[SCALE_ROOM + 16 * i + place(h)] * added_by_block[2 * unit + 1];
#endif
                    part[i][0][2 * h] -= added;
#endif
#pragma unroll
                    for (int n = 0; n < NT; n++) {
                        acc[i][n][2 * h] += part[i][n][2 * h] * factor;
                        acc[i][n][2 * h + 1] += part[i][n][2 * h + 1] * factor;
                    }
                }
            }
#endif
#endif
            __syncwarp();
            if (unit + STAGES * WARPS < units) fetch(slot, unit + STAGES * WARPS);
            commit();
        }
        WAIT_GROUP(0);

        // Sums of warps. Rows as lanes hold them: half h of tile i is 16 i + 8 h + g.
        __syncthreads();
        constexpr int COLUMNS = ONE ? 1 : 8 * NT;
#pragma unroll
        for (int i = 0; i < RT; i++) {
#pragma unroll
            for (int n = 0; n < NT; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int at = 8 * n + 2 * t + e % 2, row = 16 * i + 8 * (e / 2) + g;
                    if (!ONE || at == 0) sums[(warp * COLUMNS + at) * (16 * RT) + row] = acc[i][n][e];
                }
            }
        }
        __syncthreads();
        const i64 row0 = (i64)expert * N;
        auto total_of = [&](int at, int local) -> float {  // local: row of the stripe as lanes hold it
            float total = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++) total += sums[(w * COLUMNS + at) * (16 * RT) + local];
            return total * unscale;
        };
        auto finished = [&](float total, int row, int high) -> float {
#if EARLY
            return total * own_scale[high] + own_bias[high];
#endif
#if SCALES == 0 && EXPERTS != 3
            total *= scale_of(scales + (row0 + row) * SCALE_BYTES, 0);
#endif
#if BIAS
            if (EXPERTS != 3) total += number(bias[row0 + row]);
#endif
            return total;
        };
        constexpr int EACH_TOKEN = (GATED ? 8 : 16) * RT;
        for (int at = threadIdx.x; at < EACH_TOKEN * COLUMNS; at += THREADS) {
            const int local = at % EACH_TOKEN, n = at / EACH_TOKEN, m = first_row + local;
            if (m >= width || first + n >= count) continue;
            float result;
            if (GATED) {
                const int i = local / 8, r = local % 8;
                const float gate = finished(total_of(n, 16 * i + r), ALTERNATING ? 2 * m : m, 0);
                const float up = finished(total_of(n, 16 * i + 8 + r), ALTERNATING ? 2 * m + 1 : width + m, 1);
                result = activated(gate, up, limit, alpha);
            } else {
                result = finished(total_of(n, local), m, 0);
            }
            i64 to = first + n;
            if (EXPERTS == 1) to = lists[(i64)expert * most + first + n];
            if (EXPERTS >= 2) to = y;
#if SHARE
            if (EXPERTS < 3) result *= shares[to];
#endif
#if BIAS && EXPERTS == 3
            for (int j = 0; j < TOP_K; j++) result += number(bias[(i64)chosen[j] * N + m]) * portion[j];
#endif
            to = to * width + m;
#if EARLY && ADDED
            result = nearest(result) + number(own_residual);
#elif ADDED
            result = nearest(result) + number(residual[to]);
#endif
            out[to] = rounded(result);
        }
    }
}
