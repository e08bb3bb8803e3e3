// Products of few rows of 16-bit numbers with narrow weights: out = x w^T * scale + bias.
//
// A warp takes 16 * RT rows of the weight and a part of its columns; the warps of a program share rows and
// add their sums in a fixed order. Codes go from memory to registers in 16-byte pieces, in the layout of
// the checkpoint, and become operands of matrix instructions there. The order of columns within an
// instruction is free as long as both operands agree: lane (g, t) holds 16 neighbouring codes of rows g and
// g + 8, and the same 16 columns of token g.
//
// Macros: CODE 0 e4m3, 1 int8, 2 int4 (two codes a byte, a group's halves); SCALES 0 per output, 1 per
// group of 128 inputs [K / 128, N], 2 per block of 128 x 128; SCALE_TYPE 0 float, 1 half, 2 bfloat16;
// ZEROS; BIAS; BFLOAT16, else half; NT tiles of 8 tokens; RT tiles of 16 rows; WARPS; AHEAD blocks of 128
// columns that are loaded before they are used.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

#if BFLOAT16
#define KIND "bf16"
#define BASE 0x43004300u   // 128, twice: its low mantissa bits count ones
#define ONE 0x3f803f80u
#define MINUS_ONE 0xbf80bf80u
#define MINUS_EIGHT 0xc308c308u   // -(128 + 8)
#define FLOAT8_FACTOR 0x7b807b80u  // 2^120
#define FLOAT8_SHIFT 4
#else
#define KIND "f16"
#define BASE 0x64006400u   // 1024
#define ONE 0x3c003c00u
#define MINUS_ONE 0xbc00bc00u
#define MINUS_EIGHT 0xe408e408u
#define FLOAT8_FACTOR 0x5c005c00u  // 2^8
#define FLOAT8_SHIFT 1
#endif

#define PIECES (CODE == 2 ? 1 : 2)  // 16-byte pieces of a row's block of 128 columns

__device__ __forceinline__ uint4 load_once(const void* at) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}

__device__ __forceinline__ uint4 load(const void* at) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}

__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn." KIND "x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." KIND "." KIND ".f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four codes of a word, or of its low or high halves of bytes, as two pairs. zero: base + zero point, twice.
template <int HIGH>
__device__ __forceinline__ void decode(u32 word, u32 zero, u32& first, u32& second) {
#if CODE == 0
    u32 a = __byte_perm(word, 0, 0x1404), b = __byte_perm(word, 0, 0x3424);
    a = (a & 0x80008000u) | ((a & 0x7f007f00u) >> FLOAT8_SHIFT);
    b = (b & 0x80008000u) | ((b & 0x7f007f00u) >> FLOAT8_SHIFT);
    first = fma2(a, FLOAT8_FACTOR, 0x80008000u);
    second = fma2(b, FLOAT8_FACTOR, 0x80008000u);
#elif CODE == 1
    u32 a = __byte_perm(word, 0, 0x4140), b = __byte_perm(word, 0, 0x4342);
    first = fma2((a & 0x00800080u) | BASE, MINUS_ONE, (a & 0x007f007fu) | BASE);
    second = fma2((b & 0x00800080u) | BASE, MINUS_ONE, (b & 0x007f007fu) | BASE);
#else
    u32 half = HIGH ? word >> 4 : word;
    u32 a = __byte_perm(half, 0, 0x4140), b = __byte_perm(half, 0, 0x4342);
    a = (a & 0x000f000fu) | BASE;
    b = (b & 0x000f000fu) | BASE;
#if ZEROS
    first = fma2(zero, MINUS_ONE, a);
    second = fma2(zero, MINUS_ONE, b);
#else
    first = fma2(a, ONE, MINUS_EIGHT);
    second = fma2(b, ONE, MINUS_EIGHT);
#endif
#endif
}

__device__ __forceinline__ float scale_at(const void* scales, long long at) {
#if SCALE_TYPE == 0
    return ((const float*)scales)[at];
#elif SCALE_TYPE == 1
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(((const u16*)scales)[at]));
    return f;
#else
    return __uint_as_float((u32)((const u16*)scales)[at] << 16);
#endif
}

__device__ __forceinline__ float number(u16 bits) {
#if BFLOAT16
    return __uint_as_float((u32)bits << 16);
#else
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
    return f;
#endif
}

__device__ __forceinline__ u16 rounded(float f) {
    u16 bits;
    asm("cvt.rn." KIND ".f32 %0, %1;" : "=h"(bits) : "f"(f));
    return bits;
}

struct Block {
    uint4 codes[RT][2][PIECES];
#if SCALES
    float scale[RT][2];
#endif
#if ZEROS
    u32 zero[RT][2];
#endif
};

extern "C" __global__ void __launch_bounds__(WARPS * 32)
few_rows(const u8* weight, const void* scales, const u8* zeros, const u16* x, const u16* bias, u16* out,
         int tokens, int N, int K, int tiles, int scale_stride) {
    extern __shared__ float sums[];  // [WARPS][8 NT][16 RT]
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int row0 = blockIdx.x / tiles * (16 * RT), token0 = blockIdx.x % tiles * (8 * NT);
    const int blocks = K / 128;
    const long long row_bytes = CODE == 2 ? K / 2 : K;
    const u8* rows[RT][2];
    int index[RT][2];
    for (int i = 0; i < RT; i++) {
        for (int h = 0; h < 2; h++) {
            index[i][h] = min(row0 + 16 * i + 8 * h + g, N - 1);
            rows[i][h] = weight + index[i][h] * row_bytes + 16 * t;
        }
    }
    const u16* token[NT];
    for (int n = 0; n < NT; n++) {
        const int at = token0 + 8 * n + g;
        token[n] = at < tokens ? x + (long long)at * K + 16 * t : nullptr;
    }
    float acc[RT][NT][4] = {};

    auto fetch = [&](Block& to, int b) {
#pragma unroll
        for (int i = 0; i < RT; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
#pragma unroll
                for (int p = 0; p < PIECES; p++) {
                    to.codes[i][h][p] = load_once(rows[i][h] + (long long)b * (64 * PIECES) + 64 * p);
                }
#if SCALES == 1
                to.scale[i][h] = scale_at(scales, (long long)b * scale_stride + index[i][h]);
#elif SCALES == 2
                to.scale[i][h] = scale_at(scales, (long long)(index[i][h] / 128) * scale_stride + b);
#endif
#if ZEROS
                const u32 z = zeros[(long long)b * scale_stride + index[i][h]];
                to.zero[i][h] = BASE | z | z << 16;
#endif
            }
        }
    };

    auto use = [&](const Block& from, int b) {
#if SCALES
        float part[RT][NT][4] = {};
#else
        auto& part = acc;
#endif
#pragma unroll
        for (int q = 0; q < 4; q++) {  // 16 columns of each lane's 64: half q % 2 of piece q / 2
            const int c = q / 2;
            uint4 columns[NT];
#pragma unroll
            for (int n = 0; n < NT; n++) {
                columns[n] = make_uint4(0, 0, 0, 0);
                if (token[n]) columns[n] = load(token[n] + b * 128 + c * 64 + q % 2 * 8);
            }
#pragma unroll
            for (int j = q % 2 * 2; j < q % 2 * 2 + 2; j++) {
                u32 a[RT][4];
#pragma unroll
                for (int i = 0; i < RT; i++) {
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const uint4& piece = from.codes[i][h][PIECES == 2 ? c : 0];
                        const u32 word = j == 0 ? piece.x : j == 1 ? piece.y : j == 2 ? piece.z : piece.w;
                        u32 zero = 0;
#if ZEROS
                        zero = from.zero[i][h];
#endif
                        if (c) decode<1>(word, zero, a[i][h], a[i][h + 2]);
                        else decode<0>(word, zero, a[i][h], a[i][h + 2]);
                    }
                }
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    const uint4& v = columns[n];
                    const u32 b0 = j % 2 ? v.z : v.x, b1 = j % 2 ? v.w : v.y;
#pragma unroll
                    for (int i = 0; i < RT; i++) multiply(part[i][n], a[i], b0, b1);
                }
            }
        }
#if SCALES
#pragma unroll
        for (int i = 0; i < RT; i++) {
#pragma unroll
            for (int n = 0; n < NT; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) acc[i][n][e] += part[i][n][e] * from.scale[i][e / 2];
            }
        }
#endif
    };

    Block ahead[2][AHEAD];
#pragma unroll
    for (int u = 0; u < AHEAD; u++) {
        if (warp + u * WARPS < blocks) fetch(ahead[0][u], warp + u * WARPS);
    }
    for (int first = warp; first < blocks; first += 2 * AHEAD * WARPS) {
#pragma unroll
        for (int turn = 0; turn < 2; turn++) {
            const int now = first + turn * AHEAD * WARPS, next = now + AHEAD * WARPS;
#pragma unroll
            for (int u = 0; u < AHEAD; u++) {
                if (next + u * WARPS < blocks) fetch(ahead[1 - turn][u], next + u * WARPS);
            }
#pragma unroll
            for (int u = 0; u < AHEAD; u++) {
                if (now + u * WARPS < blocks) use(ahead[turn][u], now + u * WARPS);
            }
        }
    }

#pragma unroll
    for (int i = 0; i < RT; i++) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int column = 8 * n + 2 * t + e % 2, row = 16 * i + 8 * (e / 2) + g;
                sums[(warp * 8 * NT + column) * (16 * RT) + row] = acc[i][n][e];
            }
        }
    }
    __syncthreads();
    for (int at = threadIdx.x; at < 128 * NT * RT; at += WARPS * 32) {
        const int row = row0 + at % (16 * RT), n = token0 + at / (16 * RT);
        if (row >= N || n >= tokens) continue;
        float total = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += sums[w * (128 * NT * RT) + at];
#if SCALES == 0
        total *= scale_at(scales, row);
#endif
#if BIAS
        total += number(bias[row]);
#endif
        out[(long long)n * N + row] = rounded(total);
    }
}
