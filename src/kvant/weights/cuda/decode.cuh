// Narrow codes in the registers of matrix instructions, and copies to shared memory. Macros: see few_rows.cu.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

#ifndef APART
#define APART 0
#endif
#ifndef RAISED
#define RAISED 0
#endif
#define OPERAND_BFLOAT16 (BFLOAT16 && (!ONE || CODE == 3))
#if OPERAND_BFLOAT16
#define KIND "bf16"
#else
#define KIND "f16"
#endif
#define NIBBLES (CODE >= 2)
#define PIECES (NIBBLES ? 1 : 2)  // 16-byte pieces of a row's block of 128 columns
#define SIX (CODE == 4)
#define ROW_BYTES (SIX ? K / 4 * 3 : NIBBLES ? K / 2 : K)
#define SCALE_BYTES (SCALE_TYPE == 0 ? 4 : SCALE_TYPE >= 3 ? 1 : 2)
#define FINE (SCALES == 1 && GROUP < 128 && CODE == 3)  // lanes of a row hold codes of different groups
#define GROUPED (SCALES == 1 && GROUP < 128 && CODE != 3)  // an instruction takes columns of one group
#define GROUPS_OF_BLOCK (SCALES == 1 ? 128 / GROUP : 1)

#ifndef ON_HOST
#define SHARED __shared__
#define WAIT_GROUP(n) asm volatile("cp.async.wait_group %0;" :: "n"(n) : "memory")

__device__ __forceinline__ u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

// bytes 0 fills the place with zeros. The L2 cache fetches whole lines.
__device__ __forceinline__ void copy16(void* to, const void* from, u32 bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :: "r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy8(void* to, const void* from, u32 bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;"
                 :: "r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy4(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
                 :: "r"(shared_address(to)), "l"(from) : "memory");
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

__device__ __forceinline__ void launch_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

__device__ __forceinline__ void wait_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Bring what nothing has read yet to the L2 cache.
__device__ __forceinline__ void fetch_ahead(const void* at) { asm volatile("prefetch.global.L2 [%0];" :: "l"(at)); }

__device__ __forceinline__ u32 most_of_warp(u32 value) { return __reduce_max_sync(0xffffffffu, value); }

// A number that another program has stored.
__device__ __forceinline__ float load_fresh(const float* at) {
    float f;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(f) : "l"(at) : "memory");
    return f;
}

__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn." KIND "x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// (a & mask) | base, which the compiler makes two instructions of where both are constants.
__device__ __forceinline__ u32 and_or(u32 a, u32 mask, u32 base) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(base));
    return d;
}

// Two e4m3 codes to two numbers of 16 bits with 11-bit significands.
__device__ __forceinline__ u32 e4m3_half2(u16 codes) {
    u32 d;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"(codes));
    return d;
}

__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." KIND "." KIND ".f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float from_half(u16 bits) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
    return f;
}

__device__ __forceinline__ u16 to_half(float f) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(f));
    return bits;
}

__device__ __forceinline__ u16 to_bfloat16(float f) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(f));
    return bits;
}
#endif

__device__ __forceinline__ float from_bfloat16(u16 bits) { return __uint_as_float((u32)bits << 16); }

// Numbers of the model's dtype.
__device__ __forceinline__ float number(u16 bits) { return BFLOAT16 ? from_bfloat16(bits) : from_half(bits); }

__device__ __forceinline__ u16 rounded(float f) { return BFLOAT16 ? to_bfloat16(f) : to_half(f); }

__device__ __forceinline__ float nearest(float f) { return number(rounded(f)); }

template <int N>
struct Constant { static constexpr int value = N; };

// Scales and zero points of one row, as products need them.
struct Fine {
    u32 zero;   // what a code's base and zero point are taken away with, twice
    u32 high;   // the same for codes in high halves of bytes, where those are not shifted
    u32 scale;  // of a group of e2m1, twice
    u32 more;   // 0, or a second factor
};

// Words of codes to pairs of numbers: a word of 8-bit codes gives columns (0, 1) and (2, 3); a word of
// 4-bit codes gives (0, 2) and (1, 3) of low halves (HIGH 0) or of high halves, with NEIGHBOURS (0, 1) and (2, 3).
// APART: 8-bit codes give (0, 2) and (1, 3), too. RAISED: e4m3 gives numbers times 2^-120, subnormal ones included; the
// other operand and the result then make up for that.
// MORE: scales of e2m1 may have a second factor.
template <int HIGH, int MORE = 1>
__device__ __forceinline__ void decode(u32 word, const Fine& fine, u32& first, u32& second) {
#if CODE == 0 && OPERAND_BFLOAT16 && APART
    const u32 a = (word << 8 & 0x80008000u) | (word << 4 & 0x07f007f0u);
    const u32 b = (word & 0x80008000u) | (word >> 4 & 0x07f007f0u);
    first = RAISED ? a : fma2(a, 0x7b807b80u, 0x80008000u);  // times 2^120
    second = RAISED ? b : fma2(b, 0x7b807b80u, 0x80008000u);
#elif CODE == 0 && OPERAND_BFLOAT16
    u32 a = __byte_perm(word, 0, 0x1404), b = __byte_perm(word, 0, 0x3424);
    a = (a & 0x80008000u) | ((a & 0x7f007f00u) >> 4);
    b = (b & 0x80008000u) | ((b & 0x7f007f00u) >> 4);
    first = fma2(a, 0x7b807b80u, 0x80008000u);  // times 2^120
    second = fma2(b, 0x7b807b80u, 0x80008000u);
#elif CODE == 0
    first = e4m3_half2((u16)word);
    second = e4m3_half2((u16)(word >> 16));
#elif CODE == 1 && OPERAND_BFLOAT16  // 128 + the low seven bits, less 128 or 256
#if APART
    const u32 a = word, b = word >> 8;
#else
    const u32 a = __byte_perm(word, 0, 0x4140), b = __byte_perm(word, 0, 0x4342);
#endif
    first = fma2(and_or(a, 0x00800080u, 0x43004300u), 0xbf80bf80u, and_or(a, 0x007f007fu, 0x43004300u));
    second = fma2(and_or(b, 0x00800080u, 0x43004300u), 0xbf80bf80u, and_or(b, 0x007f007fu, 0x43004300u));
#elif CODE == 1  // 1024 + 128 + the code
    const u32 moved = word ^ 0x80808080u;
    first = fma2(__byte_perm(moved, 0x64646464u, APART ? 0x4240 : 0x4140), 0x3c003c00u, 0xe480e480u);
    second = fma2(__byte_perm(moved, 0x64646464u, APART ? 0x4341 : 0x4342), 0x3c003c00u, 0xe480e480u);
#else
#if NEIGHBOURS
    const u32 a = __byte_perm(word, 0, 0x4140), b = __byte_perm(word, 0, 0x4342);
#else
    const u32 a = word, b = word >> 8;
#endif
#if CODE == 2 && OPERAND_BFLOAT16  // 128 + the code
    first = fma2(and_or(HIGH ? a >> 4 : a, 0x000f000fu, 0x43004300u), 0x3f803f80u, fine.zero);
    second = fma2(and_or(HIGH ? b >> 4 : b, 0x000f000fu, 0x43004300u), 0x3f803f80u, fine.zero);
#elif CODE == 2  // 1024 + the code, or 1024 + 16 times the code
    if (HIGH) {
        first = fma2(and_or(a, 0x00f000f0u, 0x64006400u), 0x2c002c00u, fine.high);
        second = fma2(and_or(b, 0x00f000f0u, 0x64006400u), 0x2c002c00u, fine.high);
    } else {
        first = fma2(and_or(a, 0x000f000fu, 0x64006400u), 0x3c003c00u, fine.zero);
        second = fma2(and_or(b, 0x000f000fu, 0x64006400u), 0x3c003c00u, fine.zero);
    }
#else  // sign and magnitude in their places by one product, times a power of two for the bias and for the group
    const u32 c = (a & (HIGH ? 0x00f000f0u : 0x000f000fu)) * (HIGH ? 0x104u : 0x1040u);
    const u32 d = (b & (HIGH ? 0x00f000f0u : 0x000f000fu)) * (HIGH ? 0x104u : 0x1040u);
    first = fma2(c & 0x81c081c0u, fine.scale, 0x80008000u);
    second = fma2(d & 0x81c081c0u, fine.scale, 0x80008000u);
    if (MORE && fine.more) {
        first = fma2(first, fine.more, 0x80008000u);
        second = fma2(second, fine.more, 0x80008000u);
    }
#endif
#endif
}

#if SIX
// Four 6-bit codes, a byte each, to pairs of numbers: (0, 2) and (1, 3), less 32.
__device__ __forceinline__ void decode_six(u32 bytes, u32& first, u32& second) {
#if OPERAND_BFLOAT16  // 128 + the code
    first = fma2(and_or(bytes, 0x003f003fu, 0x43004300u), 0x3f803f80u, 0xc320c320u);
    second = fma2(and_or(bytes >> 8, 0x003f003fu, 0x43004300u), 0x3f803f80u, 0xc320c320u);
#else  // 1024 + the code
    first = fma2(and_or(bytes, 0x003f003fu, 0x64006400u), 0x3c003c00u, 0xe420e420u);
    second = fma2(and_or(bytes >> 8, 0x003f003fu, 0x64006400u), 0x3c003c00u, 0xe420e420u);
#endif
}
#endif

__device__ __forceinline__ float scale_of(const u8* at, int index) {
#if SCALE_TYPE == 0
    return ((const float*)at)[index];
#elif SCALE_TYPE == 1
    return from_half(((const u16*)at)[index]);
#elif SCALE_TYPE == 2
    return from_bfloat16(((const u16*)at)[index]);
#elif SCALE_TYPE == 4
    return (float)at[index];
#elif SCALE_TYPE == 5
    return (float)((const signed char*)at)[index];
#else
    return exp2f((float)at[index] - 127.0f);
#endif
}

__device__ __forceinline__ float activated(float gate, float up, float limit, float alpha) {
    gate = nearest(gate);
    up = nearest(up);
#if ACTIVATION == 2
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    return (up + 1.0f) * (gate / (1.0f + expf(-gate * alpha)));
#elif ACTIVATION == 1
    const float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
    return nearest(0.5f * gate * (1.0f + tanhf(inner))) * up;
#else
    return nearest(gate / (1.0f + expf(-gate))) * up;
#endif
}


// z: the zero point of a row of int4; power: the scale of a group of e2m1.
__device__ __forceinline__ Fine fine_of(u32 z, u32 power) {
    Fine made;
#if CODE == 2 && OPERAND_BFLOAT16
    made.zero = (0xc300u | z) * 0x10001u;  // -(128 + z)
#elif CODE == 2
    made.zero = (0xe400u | z) * 0x10001u;       // -(1024 + z)
    made.high = (0xd400u | z << 4) * 0x10001u;  // -(64 + z)
#elif CODE == 3
    made.scale = (min(power, 128u) + 126u) * 0x00800080u;
    made.more = power > 128u ? (power - 1u) * 0x00800080u : 0u;
#endif
    return made;
}
