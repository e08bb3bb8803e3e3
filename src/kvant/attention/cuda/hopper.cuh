// What kernels for Hopper call its instructions, and pieces that they share. PTX says what each does.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;
typedef unsigned short u16;
#define INFINITY_ __int_as_float(0x7F800000)

__device__ __forceinline__ u32 smem_of(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ float lg2(float x) { float y; asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ u32 prmt(u32 a, u32 b, u32 s) { u32 d; asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(s)); return d; }
template <int LUT> __device__ __forceinline__ u32 lop3(u32 a, u32 b, u32 c) { u32 d; asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(d) : "r"(a), "r"(b), "r"(c), "n"(LUT)); return d; }
__device__ __forceinline__ u32 hadd2(u32 a, u32 b) { u32 d; asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
__device__ __forceinline__ u32 hmul2(u32 a, u32 b) { u32 d; asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
__device__ __forceinline__ u32 hfma2(u32 a, u32 b, u32 c) { u32 d; asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c)); return d; }
__device__ __forceinline__ u32 hmax2_nan(u32 a, u32 b) { u32 d; asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
__device__ __forceinline__ bool at_most(u32 a, u32 b) {  // both halves; NaN is not
  u32 d;
  asm("{ .reg .pred p, q; setp.le.f16x2 p|q, %1, %2; and.pred p, p, q; selp.b32 %0, 1, 0, p; }" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ u32 pack(float lo, float hi) { u32 d; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo)); return d; }
// Two numbers of 16 bits to and from a word. BFLOAT16: of which kind.
__device__ __forceinline__ void unpack_16_bit(float& lo, float& hi, u32 word) {
  if (BFLOAT16) { lo = __uint_as_float(word << 16); hi = __uint_as_float(word & 0xFFFF0000u); }
  else asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }" : "=f"(lo), "=f"(hi) : "r"(word));
}
__device__ __forceinline__ u32 pack_16_bit(float lo, float hi) {
  u32 word;
  if (BFLOAT16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(hi), "f"(lo));
  else word = pack(lo, hi);
  return word;
}
__device__ __forceinline__ u16 half_of(float x) { u16 d; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(d) : "f"(x)); return d; }
__device__ __forceinline__ float float_of(u32 half) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"((u16)half)); return y; }
__device__ __forceinline__ u32 cvt_lo(u32 x) { u32 d; asm("{ .reg .b16 a, b; mov.b32 {a, b}, %1; cvt.rn.f16x2.e4m3x2 %0, a; }" : "=r"(d) : "r"(x)); return d; }
__device__ __forceinline__ u32 cvt_hi(u32 x) { u32 d; asm("{ .reg .b16 a, b; mov.b32 {a, b}, %1; cvt.rn.f16x2.e4m3x2 %0, b; }" : "=r"(d) : "r"(x)); return d; }

// Codes as float16. pairs: four codes to (first two, last two). split: codes of two tokens (bytes a0 b0 a1 b1) to
// (a of both, b of both). Formats have more of these.
struct E4m3 {
  static __device__ __forceinline__ void pairs(u32 x, u32& a, u32& b) { a = cvt_lo(x); b = cvt_hi(x); }
  static __device__ __forceinline__ void split(u32 x, u32& a, u32& b) { x = prmt(x, 0, 0x3120); a = cvt_lo(x); b = cvt_hi(x); }
};

__device__ __forceinline__ void copy16(u32 to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ const u8* row_of(const u8* base, u32 page, u32 stride) {
  const u8* at;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(at) : "r"(page), "r"(stride), "l"(base));
  return at;
}
template <int N> __device__ __forceinline__ void copy_small(u32 to, const void* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(N), "r"(there ? N : 0) : "memory");
}
__device__ __forceinline__ void ldsm(u32 (&x)[4], u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(a) : "memory");
}
__device__ __forceinline__ void ldsm_t(u32 (&x)[4], u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(a) : "memory");
}
__device__ __forceinline__ void stsm(u32 a, u32 x0, u32 x1, u32 x2, u32 x3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(x0), "r"(x1), "r"(x2), "r"(x3) : "memory");
}
__device__ __forceinline__ u32 lds_u(u32 a) { u32 x; asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(a) : "memory"); return x; }
__device__ __forceinline__ void sts_u(u32 a, u32 x) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(a), "r"(x) : "memory"); }
__device__ __forceinline__ uint2 lds_u2(u32 a) { uint2 x; asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(a) : "memory"); return x; }

__device__ __forceinline__ void meet(int barrier, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }
__device__ __forceinline__ void pass(int barrier, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }
__device__ __forceinline__ bool any_of(int barrier, int threads, bool mine) {
  u32 all;
  asm volatile("{ .reg .pred p, q; setp.ne.u32 p, %3, 0; bar.red.or.pred q, %1, %2, p; selp.u32 %0, 1, 0, q; }" : "=r"(all) : "r"(barrier), "r"(threads), "r"((u32)mine) : "memory");
  return all;
}
// A counter of arrivals in shared memory: `arrive_with_copies` counts a thread when its copies are there.
__device__ __forceinline__ void make_counter(u32 at, int threads) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(threads) : "memory"); }
__device__ __forceinline__ void arrive_with_copies(u32 at) { asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at) : "memory"); }
__device__ __forceinline__ void wait_for(u32 at, u32 parity) {
  asm volatile(
      "{ .reg .pred p;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra again; }" ::"r"(at), "r"(parity) : "memory");
}

// The spaces of tiles, in turn. parity: of the uses so far, as the counters of copies are asked.
struct Turn {
  u32 index = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++index == STAGES) { index = 0; parity ^= 1; }
  }
};

__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void mma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// d [64 x 64] (+)= a (registers, 64 x 16) * b (shared memory, 16 x 64). MN: b lies with its 64 side by side.
template <int MN> __device__ __forceinline__ void mma(float (&d)[32], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},"
      "{%32,%33,%34,%35}, %36, p, 1, 1, %38; }\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]),
        "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]),
        "+f"(d[31])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add), "n"(MN));
}
template <int N> __device__ __forceinline__ void settle(float (&d)[N]) {  // nothing may read d before the wait above
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
__device__ __forceinline__ u64 descriptor(u32 at) {  // 128-byte swizzle, groups of 8 rows 1024 bytes apart
  return (u64)((at & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

