// Attention of 64 query rows (query, head of the group) against a stretch of one sequence's pages, for
// sm_90a. many_rows.py compiles it and says what the arguments are; formats are those of codec.py.
//
// Everything is computed transposed, so that what must be converted is the register operand of wgmma
// and never goes back to shared memory:
//   scores  [tokens x rows]  = K   [tokens x head] (registers) * Q^T [head x rows]   (shared, made once)
//   outputs [head x rows]   += V^T [head x tokens] (registers) * P   [tokens x rows] (shared, float16)
// - Codes come by ldmatrix in 16-bit words (transposed for V). Two codes of a word become neighbours in
//   the inner dimension: its order is free as long as the queries have the same (`place`).
// - int8 and 4-bit integers become exact float16 integers, zero point subtracted, by the exponent trick
//   (1024 + n - 1024); e2m1 is moved into e4m3 bits, which the hardware converts, and its block scale
//   is multiplied in float16, exactly. Scales of a token multiply its scores and probabilities.
// - A row's maximum would need all warps for every tile. Probabilities are taken against the maximum
//   of an earlier tile instead, 2^-7 of float16's range below its top; only if one exceeds 2^15 (or is
//   NaN) is the tile done again against a new maximum. The vote is the barrier that P needs anyway.
// - Queries carry the softmax scale, the outer key scale and log2(e). If one exceeds float16's comfort,
//   all rows of the program are divided by one power of two, `unit`.
// One warpgroup a program, two programs a multiprocessor: one converts while the other multiplies.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;
typedef unsigned short u16;
#define INFINITY_ __int_as_float(0x7F800000)

constexpr int TILE = 64, ROWS = 64, HEAD = 128, THREADS = 128, WARPS = 4;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LOWEST = -1.0e30f;
constexpr float SHIFT = 7.0f;       // log2 of what the largest probability is stored as
constexpr u32 LIMIT = 0x78007800u;  // 2^15 twice, as float16: above it the maximum is renewed
constexpr float SMALL = 7.888609052210118e-31f;  // 2^-100: least reference for value scales

constexpr int row_bytes(int kind) { return kind == UINT4 || kind == E2M1 ? 64 : 128; }
constexpr int scale_bytes(int scaling) { return scaling == NONE ? 0 : scaling == BLOCK ? 8 : 4; }
constexpr int BYTES_K = row_bytes(KIND_K), BYTES_V = row_bytes(KIND_V);
constexpr int SB_K = scale_bytes(SCALING_K), SB_V = scale_bytes(SCALING_V);
constexpr int OFF_V = TILE * BYTES_K;
constexpr int OFF_SK = OFF_V + TILE * BYTES_V;
constexpr int OFF_SV = OFF_SK + TILE * SB_K;
constexpr int STAGE = OFF_SV + TILE * SB_V;
constexpr int Q_BYTES = ROWS * HEAD * 2;
constexpr int P_BYTES = TILE * ROWS * 2;
constexpr int PITCH = 132;  // floats of a row of the output while it is turned
// Dynamic shared memory: Q, P, stages. The output, while it is turned, lies where P and stages lay.

__device__ __forceinline__ u32 smem_of(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ float lg2(float x) { float y; asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ u32 prmt(u32 a, u32 b, u32 s) { u32 d; asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(s)); return d; }
template <int LUT> __device__ __forceinline__ u32 lop3(u32 a, u32 b, u32 c) { u32 d; asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(d) : "r"(a), "r"(b), "r"(c), "n"(LUT)); return d; }
__device__ __forceinline__ u32 hadd2(u32 a, u32 b) { u32 d; asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
__device__ __forceinline__ u32 hmul2(u32 a, u32 b) { u32 d; asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
__device__ __forceinline__ u32 hfma2(u32 a, u32 b, u32 c) { u32 d; asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c)); return d; }
__device__ __forceinline__ u32 hmax2_nan(u32 a, u32 b) { u32 d; asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
__device__ __forceinline__ u32 pack(float lo, float hi) { u32 d; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo)); return d; }
__device__ __forceinline__ u16 half_of(float x) { u16 d; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(d) : "f"(x)); return d; }
__device__ __forceinline__ u32 cvt_lo(u32 x) { u32 d; asm("{ .reg .b16 a, b; mov.b32 {a, b}, %1; cvt.rn.f16x2.e4m3x2 %0, a; }" : "=r"(d) : "r"(x)); return d; }
__device__ __forceinline__ u32 cvt_hi(u32 x) { u32 d; asm("{ .reg .b16 a, b; mov.b32 {a, b}, %1; cvt.rn.f16x2.e4m3x2 %0, b; }" : "=r"(d) : "r"(x)); return d; }

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
__device__ __forceinline__ uint2 lds_u2(u32 a) { uint2 x; asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(a) : "memory"); return x; }

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
__device__ __forceinline__ void settle(float (&d)[32]) {  // nothing may read d before the wait above
#pragma unroll
  for (int i = 0; i < 32; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
__device__ __forceinline__ u64 descriptor(u32 at) {  // 128-byte swizzle, groups of 8 rows 1024 bytes apart
  return (u64)((at & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

// Which of the 128 places of the product's inner dimension element d of a key takes.
__host__ __device__ constexpr int place(int d) {
  if (KIND_K == UINT4) {
    int e = d % 4, w = d / 4, m = w / 8, t = (w % 8) / 2, u = w % 2;
    return 16 * (2 * m + (e >> 1)) + 2 * t + u + 8 * (e & 1);
  } else if (KIND_K == E2M1) {
    int e = d % 4, w = d / 4, m = w / 8, t = (w % 8) / 2, u = w % 2;
    return 16 * (2 * m + (e & 1)) + 2 * t + (e >> 1) + 8 * u;
  } else {
    int c = d / 16, r = d % 16, quad = r / 4, w = r % 4;
    return 16 * c + 2 * quad + (w & 1) + 8 * (w >> 1);
  }
}

// Four codes of 8 bits to (first two, last two) as float16.
template <int KIND> __device__ __forceinline__ void unpack_pairs(u32 x, u32& a, u32& b) {
  if (KIND == E4M3) { a = cvt_lo(x); b = cvt_hi(x); }
  else if (KIND == E5M2) { a = prmt(x, 0, 0x1404); b = prmt(x, 0, 0x3424); }
  else {
    x ^= 0x80808080u;
    a = hadd2(prmt(x, 0x64646464u, 0x4140), 0xE480E480u);  // 1024 + (n + 128) - 1152
    b = hadd2(prmt(x, 0x64646464u, 0x4342), 0xE480E480u);
  }
}
// Codes of two tokens (bytes a0 b0 a1 b1) to (a of both, b of both).
template <int KIND> __device__ __forceinline__ void unpack_split(u32 x, u32& a, u32& b) {
  if (KIND == E4M3) { x = prmt(x, 0, 0x3120); a = cvt_lo(x); b = cvt_hi(x); }
  else if (KIND == E5M2) { a = prmt(x, 0, 0x2404); b = x & 0xFF00FF00u; }
  else {
    x ^= 0x80808080u;
    a = hadd2(prmt(x, 0x64646464u, 0x4240), 0xE480E480u);
    b = hadd2(prmt(x, 0x64646464u, 0x4341), 0xE480E480u);
  }
}

struct Item { int seq, first, splits; };

__device__ __forceinline__ void measure(int i, const int* cu, const int* lens, int num_seqs, int window, int causal, int& blocks, int& tiles) {
  bool there = i < num_seqs;
  int n = there ? cu[i + 1] - cu[i] : 0;
  int span = there ? lens[i] : 0;
  if (window > 0) span = min(span, (causal ? n + window : n + 2 * window) + TILE);
  blocks = (n * GROUP + ROWS - 1) / ROWS;
  tiles = max((span + TILE - 1) / TILE, 1);
}

// `tiles_per_split` and `find_item` of workmap.py, with the same numbers: `combine` reads by them.
// Every thread gets the answer. scratch: 16 ints.
__device__ Item find_item(int item, const int* cu, const int* lens, int num_seqs, int window, int causal, int target, int least, int* scratch) {
  int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  int total = 0;
  for (int first = 0; first < num_seqs; first += THREADS) {
    int b, t;
    measure(first + tid, cu, lens, num_seqs, window, causal, b, t);
    total += b * t;
  }
  for (int s = 16; s; s >>= 1) total += __shfl_xor_sync(~0u, total, s);
  if (lane == 0) scratch[warp] = total;
  if (tid == 0) scratch[4] = -1, scratch[5] = 0, scratch[6] = 1;
  __syncthreads();
  total = scratch[0] + scratch[1] + scratch[2] + scratch[3];
  int per = max((total + target - 1) / target, least);
  int base = 0;
  for (int first = 0; first < num_seqs; first += THREADS) {
    int b, t;
    measure(first + tid, cu, lens, num_seqs, window, causal, b, t);
    int parts = (t + per - 1) / per, items = b * parts, sum = items;
    for (int s = 1; s < 32; s <<= 1) { int y = __shfl_up_sync(~0u, sum, s); if (lane >= s) sum += y; }
    if (lane == 31) scratch[8 + warp] = sum;
    __syncthreads();
    int before = base;
    for (int w = 0; w < 4; ++w) { if (w < warp) before += scratch[8 + w]; base += scratch[8 + w]; }
    int end = before + sum;
    if (item < end && item >= end - items) scratch[4] = first + tid, scratch[5] = end - items, scratch[6] = parts;
    __syncthreads();
  }
  return {scratch[4], scratch[5], scratch[6]};
}

template <int N> __device__ __forceinline__ void hadamard(float (&x)[64], int half) {
  // 128 numbers in two neighbouring threads, 64 each; blocks of N
#pragma unroll
  for (int h = 1; h < 64 && h < N; h <<= 1)
#pragma unroll
    for (int i = 0; i < 64; ++i)
      if (!(i & h)) { float a = x[i], b = x[i + h]; x[i] = a + b; x[i + h] = a - b; }
  if (N == 128) {
#pragma unroll
    for (int i = 0; i < 64; ++i) { float y = __shfl_xor_sync(~0u, x[i], 1); x[i] = half ? y - x[i] : x[i] + y; }
  }
}

struct Bounds { int causal, window, length, num_queries, block; };
// Keys that row sees: [lo, hi)
__device__ __forceinline__ void bounds_of(const Bounds& b, int row, int& lo, int& hi) {
  int query = (b.block * ROWS + row) / GROUP;
  int here = b.length - b.num_queries + query;
  hi = b.causal ? here + 1 : b.window > 0 ? min(b.length, here + b.window) : b.length;
  if (query >= b.num_queries) hi = 0;
  lo = b.window > 0 ? here - b.window + 1 : 0;
}

extern "C" __global__ void __launch_bounds__(THREADS, PROGRAMS)
many_rows(const void* q_ptr, long long q_token, long long q_head,
       const u8* __restrict__ k_codes, const u8* __restrict__ k_scales, const u8* __restrict__ v_codes, const u8* __restrict__ v_scales,
       const float* k_outer, int k_outers, const float* v_outer, int v_outers, const void* sinks, int sink_kind,
       void* out, float* partial, float* partial_lse,
       const int* cu, const int* lens, const int* __restrict__ page_table, long long max_pages, int num_seqs,
       float softmax_scale, int causal, int window, int target, int least) {
  extern __shared__ __align__(1024) u8 smem[];
  __shared__ int scratch[16];
  __shared__ float columns[WARPS][64];  // maxima of the warps
  __shared__ __align__(8) float level[64];  // log2 of what probabilities of each row are divided by
  __shared__ float fades[64];
  __shared__ float largest[4];
  __shared__ int2 seen[64];  // keys that each row sees: from, to
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
  const int head = blockIdx.x % HEADS, item = blockIdx.x / HEADS;
  const Item it = find_item(item, cu, lens, num_seqs, window, causal, target, least, scratch);
  if (it.seq < 0) return;
  const int block = (item - it.first) / it.splits, split = (item - it.first) % it.splits;
  const int first_token = cu[it.seq], num_queries = cu[it.seq + 1] - first_token, length = lens[it.seq];
  const Bounds bounds = {causal, window, length, num_queries, block};
  const int first_query = block * ROWS / GROUP, last_query = min((block * ROWS + ROWS - 1) / GROUP, num_queries - 1);
  int start = 0, end = length, visible = 0, whole = length;
  if (causal) { end = length - num_queries + last_query + 1; whole = length - num_queries + first_query + 1; }
  if (window > 0) {
    visible = max(length - num_queries + first_query - window + 1, 0);
    start = visible / TILE * TILE;
    if (!causal) end = min(length, length - num_queries + last_query + window);
    whole = 0;  // all tiles take the masked way
  }
  const int step = ((max(end - start, 0) + it.splits - 1) / it.splits + TILE - 1) / TILE * TILE;
  const int begin = start + split * step;
  end = min(end, begin + step);
  const int num_tiles = end > begin ? (end - begin + TILE - 1) / TILE : 0;

  u8* const base = (u8*)(((u64)smem + 1023) & ~1023ull);
  const u32 sq = smem_of(base), sp = sq + Q_BYTES, stages = sp + P_BYTES;
  const int* const pages = page_table + it.seq * max_pages;

  // ---- copies: every thread its pieces of each tile. `at` is a multiple of TILE.
  constexpr int PER_K = BYTES_K / 16, PASS_K = THREADS / PER_K, N_K = TILE / PASS_K;
  constexpr int PER_V = BYTES_V / 16, PASS_V = THREADS / PER_V, N_V = TILE / PASS_V;
  constexpr bool SAME = BYTES_K == BYTES_V;
  const int row_k = tid / PER_K, row_v = tid / PER_V, row_s = tid & (TILE - 1);
  constexpr int PAGES = PAGE < TILE ? TILE / PAGE : 1;  // of a tile
  constexpr int AHEAD = 2 * STAGES - 2;  // tiles whose page ids are in shared memory when a tile begins
  __shared__ u32 ring[AHEAD + 1][PAGES];
  auto offset = [&](int at, int row) { return PAGE <= TILE ? (u32)row % PAGE : (u32)at % PAGE + row; };
  // Page ids of tile j lie in ring[j % (AHEAD + 1)].
  auto look_up = [&](int j) {
    const int at = begin + j * TILE + tid * PAGE;
    if (tid < PAGES) copy_small<4>(smem_of(&ring[j % (AHEAD + 1)][tid]), pages + (at < end ? (u32)at / PAGE : 0), at < end);
  };
  const u32 to_k = stages + row_k * BYTES_K + ((tid % PER_K) ^ (BYTES_K == 128 ? row_k & 7 : (row_k >> 1) & 3)) * 16;
  const u32 to_v = SAME ? to_k + OFF_V : stages + OFF_V + row_v * BYTES_V + ((tid % PER_V) ^ (BYTES_V == 128 ? row_v & 7 : (row_v >> 1) & 3)) * 16;
  const u32 to_s = stages + (tid < TILE ? OFF_SK + row_s * SB_K : OFF_SV + row_s * SB_V);
  const u8* const base_k = k_codes + head * BYTES_K + (tid % PER_K) * 16;
  const u8* const base_v = v_codes + head * BYTES_V + (tid % PER_V) * 16;
  const u8* const base_s = tid < TILE ? k_scales + head * SB_K : v_scales + head * SB_V;
  const u32 stride_k = PAGE * HEADS * BYTES_K, stride_v = PAGE * HEADS * BYTES_V;
  const u32 SB = tid < TILE ? SB_K : SB_V;
  auto fetch_some = [&](int j, int stage, bool whole_tile) {
    const int at = begin + j * TILE;
    const u32* const ids = ring[j % (AHEAD + 1)];
    auto page_of = [&](int row) -> u32 { return ids[PAGES == 1 ? 0 : row / PAGE]; };
    const unsigned span = end - visible;
    const u32 skip = stage * STAGE;
#pragma unroll
    for (int r = 0; r < N_K; ++r) {
      const int row = row_k + r * PASS_K;
      const u32 page = page_of(row);
      const bool there = whole_tile || (unsigned)(at + row - visible) < span;
      copy16(to_k + skip + r * PASS_K * BYTES_K, row_of(base_k + offset(at, row) * (HEADS * BYTES_K), page, stride_k), there);
      if (SAME) copy16(to_v + skip + r * PASS_V * BYTES_V, row_of(base_v + offset(at, row) * (HEADS * BYTES_V), page, stride_v), there);
    }
    if (!SAME)
#pragma unroll
      for (int r = 0; r < N_V; ++r) {
        const int row = row_v + r * PASS_V;
        const bool there = whole_tile || (unsigned)(at + row - visible) < span;
        copy16(to_v + skip + r * PASS_V * BYTES_V, row_of(base_v + offset(at, row) * (HEADS * BYTES_V), page_of(row), stride_v), there);
      }
    if (SB_K || SB_V) {
      const bool there = whole_tile || (unsigned)(at + row_s - visible) < span;
      const u8* const from = row_of(base_s + offset(at, row_s) * (HEADS * SB), page_of(row_s), PAGE * HEADS * SB);
      if (SB_K && (tid < TILE)) copy_small<SB_K ? SB_K : 4>(to_s + skip, from, there);
      if (SB_V && (tid >= TILE)) copy_small<SB_V ? SB_V : 4>(to_s + skip, from, there);
    }
  };
  auto fetch = [&](int j) {
    const int at = begin + j * TILE;
    if (at >= visible && at + TILE <= end) fetch_some(j, j % STAGES, true);
    else fetch_some(j, j % STAGES, false);
  };
  for (int j = 0; j < AHEAD; ++j) look_up(j);
  asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory");
  __syncthreads();
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    if (i < num_tiles) fetch(i);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  // ---- queries, in units in which a score is a power of two, as the product's second operand
  float unit = 1.0f;
  {
    const int row = tid >> 1, half = tid & 1, r = block * ROWS + row, query = r / GROUP;
    const bool there = query < num_queries;
    float x[64];
    const long long from = (long long)(first_token + query) * q_token + (long long)(head * GROUP + r % GROUP) * q_head + half * 64;
    const uint4* src = (const uint4*)((const u16*)q_ptr + from);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint4 w = there ? src[i] : uint4{0, 0, 0, 0};
      const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (BFLOAT16) { x[8 * i + 2 * j] = __uint_as_float(words[j] << 16); x[8 * i + 2 * j + 1] = __uint_as_float(words[j] & 0xFFFF0000u); }
        else asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }" : "=f"(x[8 * i + 2 * j]), "=f"(x[8 * i + 2 * j + 1]) : "r"(words[j]));
      }
    }
    if (half == 0) {
      int lo, hi;
      bounds_of(bounds, row, lo, hi);
      seen[row] = make_int2(max(lo, visible), min(hi, end));
    }
    float factor = softmax_scale * LOG2E;
    if (k_outers) factor *= k_outer[head * (k_outers - 1)];
    if (ROTATE_K) { hadamard<ROTATE_K ? ROTATE_K : 2>(x, half); factor *= 1.0f / (ROTATE_K ? ROTATE_K : 1); }
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < 64; ++i) { x[i] *= factor; const float a = fabsf(x[i]); if (a < 3.0e38f) most = fmaxf(most, a); }
    for (int s = 16; s; s >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, s));
    if (lane == 0) largest[warp] = most;
    __syncthreads();
    most = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
    if (most > 8192.0f) unit = exp2f(ceilf(log2f(most * (1.0f / 8192.0f))));
    const float inverse = 1.0f / unit;
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const int p0 = place(i), p1 = place(64 + i);
      const int a0 = (p0 / 64) * 8192 + row * 128 + ((((p0 % 64) / 8) ^ (row & 7)) * 16) + (p0 % 8) * 2;
      const int a1 = (p1 / 64) * 8192 + row * 128 + ((((p1 % 64) / 8) ^ (row & 7)) * 16) + (p1 % 8) * 2;
      *(u16*)(base + (half ? a1 : a0)) = half_of(x[i] * inverse);
    }
    if (tid < 64) level[tid] = LOWEST;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }

  float o0[32], o1[32], s[32], den[16];
  float reference = SMALL, over_reference = 1.0f / SMALL;
#pragma unroll
  for (int i = 0; i < 32; ++i) o0[i] = o1[i] = s[i] = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; ++i) den[i] = 0.0f;
  const u64 dq = descriptor(sq), dp = descriptor(sp);
  // This thread's rows in the matrix loads and stores.
  const int mat = lane >> 3, r8 = lane & 7;
  const u32 from_k = (16 * warp + (mat & 1) * 8 + r8) * BYTES_K + (((mat >> 1) ^ (BYTES_K == 128 ? r8 : r8 >> 1)) * 16);
  // Outputs of a warp: 16 words of the values, of each one element.
  const int odd = warp >> 1;
  const int chunk_v = (BYTES_V == 128 ? 2 * warp : 2 * (warp & 1)) + (mat & 1);
  const u32 at_v = OFF_V + ((mat >> 1) * 8 + r8) * BYTES_V + ((chunk_v ^ (BYTES_V == 128 ? r8 : r8 >> 1)) * 16);
  const u32 to_p = sp + (2 * warp + (mat & 1)) * 1024 + r8 * 128 + (((mat >> 1) ^ r8) * 16);
  const int mine = 16 * warp + g;  // first of this thread's two tokens; the other is 8 on
  const float2* const levels = (const float2*)level + t;

  for (int i = 0; i < num_tiles; ++i) {
    const int at = begin + i * TILE;
    const u32 stage = stages + (i % STAGES) * STAGE;
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    __syncthreads();  // the tile is here, and nobody needs the last one or its probabilities
    if (i + STAGES - 1 < num_tiles) { fetch(i + STAGES - 1); look_up(i + AHEAD); }
    asm volatile("cp.async.commit_group;" ::: "memory");

    // ---- scores, transposed: keys (registers) times queries
    float ks0 = unit, ks1 = unit, vs0 = 1.0f, vs1 = 1.0f;
    u32 zk0 = 0, zk1 = 0, zk2 = 0, zk3 = 0;
    if (SCALING_K == ROW || SCALING_K == ROW_ZERO) {
      const u32 a = lds_u(stage + OFF_SK + mine * 4), b = lds_u(stage + OFF_SK + (mine + 8) * 4);
      ks0 *= __uint_as_float(SCALING_K == ROW ? a : a & ~15u);
      ks1 *= __uint_as_float(SCALING_K == ROW ? b : b & ~15u);
      if (KIND_K == UINT4) {
        const u32 z0 = (a & 15) * 0x10001u, z1 = (b & 15) * 0x10001u;
        zk0 = z0 | 0xE400E400u; zk1 = z1 | 0xE400E400u; zk2 = (z0 << 4) | 0xD400D400u; zk3 = (z1 << 4) | 0xD400D400u;
      }
    }
    auto score = [&]() {
      if (KIND_K == UINT4 || KIND_K == E2M1) {
        u32 bk[2][4];
        if (SCALING_K == BLOCK) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const uint2 w = lds_u2(stage + OFF_SK + (mine + 8 * h) * 8);
            const u32 four = prmt(w.x, w.y, t < 2 ? 0x6420 : 0x7531);
            const u32 a = hmul2(cvt_lo(four), 0x54005400u), b = hmul2(cvt_hi(four), 0x54005400u);
            bk[h][0] = prmt(a, 0, 0x1010); bk[h][1] = prmt(a, 0, 0x3232); bk[h][2] = prmt(b, 0, 0x1010); bk[h][3] = prmt(b, 0, 0x3232);
          }
        }
        // matrices: tokens 0-7 and 8-15 of words 0-7, then of words 8-15
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          u32 x[4], a[2][2][4];  // [eight words][row][part]
          ldsm(x, (stage + from_k) ^ (c * 32));
#pragma unroll
          for (int w = 0; w < 2; ++w)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const u32 y = x[w * 2 + h];
              if (KIND_K == UINT4) {
                const u32 y8 = y >> 8, ze = h ? zk1 : zk0, zo = h ? zk3 : zk2;
                a[w][h][0] = hadd2(lop3<0xEA>(y, 0x000F000Fu, 0x64006400u), ze);
                a[w][h][1] = hfma2(lop3<0xEA>(y, 0x00F000F0u, 0x64006400u), 0x2C002C00u, zo);
                a[w][h][2] = hadd2(lop3<0xEA>(y8, 0x000F000Fu, 0x64006400u), ze);
                a[w][h][3] = hfma2(lop3<0xEA>(y8, 0x00F000F0u, 0x64006400u), 0x2C002C00u, zo);
              } else {
                const u32 hi = lop3<0xEA>(y, 0x80808080u, (y >> 2) & 0x1C1C1C1Cu);
                const u32 lo = lop3<0xEA>(y << 4, 0x80808080u, (y << 2) & 0x1C1C1C1Cu);
                const u32 f = bk[h][2 * c + w];
                a[w][h][0] = hmul2(cvt_lo(lo), f); a[w][h][1] = hmul2(cvt_hi(lo), f);
                a[w][h][2] = hmul2(cvt_lo(hi), f); a[w][h][3] = hmul2(cvt_hi(hi), f);
              }
            }
          mma_fence();
#pragma unroll
          for (int w = 0; w < 2; ++w) {
            mma<0>(s, a[w][0][0], a[w][1][0], a[w][0][1], a[w][1][1], dq + c * 512 + w * 4, c + w > 0);
            mma<0>(s, a[w][0][2], a[w][1][2], a[w][0][3], a[w][1][3], dq + c * 512 + w * 4 + 2, 1);
          }
        }
      } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          u32 a[4][4];
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            u32 x[4];
            ldsm(x, (stage + from_k) ^ (half * 64 + c * 32));
            unpack_pairs<KIND_K>(x[0], a[2 * c][0], a[2 * c][2]);
            unpack_pairs<KIND_K>(x[1], a[2 * c][1], a[2 * c][3]);
            unpack_pairs<KIND_K>(x[2], a[2 * c + 1][0], a[2 * c + 1][2]);
            unpack_pairs<KIND_K>(x[3], a[2 * c + 1][1], a[2 * c + 1][3]);
          }
          mma_fence();
#pragma unroll
          for (int c = 0; c < 4; ++c) mma<0>(s, a[c][0], a[c][1], a[c][2], a[c][3], dq + half * 512 + c * 2, half + c > 0);
        }
      }
      mma_commit();
      mma_wait<0>();
      settle(s);
    };
    // ---- probabilities, in place of the scores
    if (SCALING_V == ROW || SCALING_V == ROW_ZERO) {
      const u32 a = lds_u(stage + OFF_SV + mine * 4), b = lds_u(stage + OFF_SV + (mine + 8) * 4);
      vs0 = __uint_as_float(SCALING_V == ROW ? a : a & ~15u);
      vs1 = __uint_as_float(SCALING_V == ROW ? b : b & ~15u);
    }
    const int pos0 = at + mine, pos1 = pos0 + 8;
    u32 over;
    auto weigh = [&](bool masked) {
      over = 0;
      const float w0 = vs0 * over_reference, w1 = vs1 * over_reference;
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        u32 h[4];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const float2 m = levels[4 * (j + k)];
          float* const x = s + 4 * (j + k);
          x[0] = fmaf(x[0], ks0, -m.x); x[1] = fmaf(x[1], ks0, -m.y);
          x[2] = fmaf(x[2], ks1, -m.x); x[3] = fmaf(x[3], ks1, -m.y);
          if (masked) {
            const int2 a = seen[8 * (j + k) + 2 * t], b = seen[8 * (j + k) + 2 * t + 1];
            if ((pos0 < a.x) | (pos0 >= a.y)) x[0] = -INFINITY_;
            if ((pos0 < b.x) | (pos0 >= b.y)) x[1] = -INFINITY_;
            if ((pos1 < a.x) | (pos1 >= a.y)) x[2] = -INFINITY_;
            if ((pos1 < b.x) | (pos1 >= b.y)) x[3] = -INFINITY_;
          }
#pragma unroll
          for (int e = 0; e < 4; ++e) x[e] = ex2(x[e]);
          if (SCALING_V == ROW || SCALING_V == ROW_ZERO) {
            h[2 * k] = pack(x[0] * w0, x[1] * w0); h[2 * k + 1] = pack(x[2] * w1, x[3] * w1);
          } else {
            h[2 * k] = pack(x[0], x[1]); h[2 * k + 1] = pack(x[2], x[3]);
          }
        }
        stsm(to_p ^ (j * 16), h[0], h[1], h[2], h[3]);
        over = hmax2_nan(over, hmax2_nan(hmax2_nan(h[0], h[1]), hmax2_nan(h[2], h[3])));
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    };
    const bool masked = at + TILE > whole || at + TILE > end;
    bool renew = false;  // a score was larger than the reference covers: once more, against another one
    for (;;) {
      score();
      if (renew) {
        float most = 0.0f;
        if (SCALING_V == ROW || SCALING_V == ROW_ZERO) {
          most = fmaxf(vs0, vs1);
          for (int k = 4; k < 32; k <<= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, k));
          if (lane == 0) largest[warp] = most;
        }
  #pragma unroll
        for (int c = 0; c < 16; ++c) {
          const int j = c >> 1, e = c & 1;
          const int2 range = seen[8 * j + 2 * t + e];
          const float a = (pos0 < range.x) | (pos0 >= range.y) ? -INFINITY_ : s[4 * j + e] * ks0;
          const float b = (pos1 < range.x) | (pos1 >= range.y) ? -INFINITY_ : s[4 * j + 2 + e] * ks1;
          float y = fmaxf(a, b);
          y = fmaxf(y, __shfl_xor_sync(~0u, y, 4));
          y = fmaxf(y, __shfl_xor_sync(~0u, y, 8));
          y = fmaxf(y, __shfl_xor_sync(~0u, y, 16));
          if (g == 0) columns[warp][8 * j + 2 * t + e] = y;
        }
        __syncthreads();
        if (tid < 64) {
          float y = columns[0][tid];
  #pragma unroll
          for (int w = 1; w < WARPS; ++w) y = fmaxf(y, columns[w][tid]);
          const float old = level[tid], renewed = fmaxf(old, y - SHIFT);
          fades[tid] = ex2(old - renewed);
          level[tid] = renewed;
        }
        float ratio = 1.0f;
        if (SCALING_V == ROW || SCALING_V == ROW_ZERO) {
          float renewed = reference;
  #pragma unroll
          for (int w = 0; w < WARPS; ++w) renewed = fmaxf(renewed, largest[w]);
          ratio = reference / renewed;
          reference = renewed;
          over_reference = 1.0f / renewed;
        }
        __syncthreads();
  #pragma unroll
        for (int c = 0; c < 16; ++c) {
          const int j = c >> 1, e = c & 1;
          const float fade = fades[8 * j + 2 * t + e];
          den[c] *= fade;
          o0[4 * j + e] *= fade * ratio; o0[4 * j + 2 + e] *= fade * ratio;
          o1[4 * j + e] *= fade * ratio; o1[4 * j + 2 + e] *= fade * ratio;
        }
      }
      if (masked) weigh(true); else weigh(false);
      u32 fine;
      asm("{ .reg .pred p, q; setp.le.f16x2 p|q, %1, %2; and.pred p, p, q; selp.b32 %0, 1, 0, p; }" : "=r"(fine) : "r"(over), "r"(LIMIT));
      if (!__syncthreads_or(!fine && !renew)) break;
      renew = true;
    }
#pragma unroll
    for (int c = 0; c < 16; ++c) den[c] += s[4 * (c >> 1) + (c & 1)] + s[4 * (c >> 1) + 2 + (c & 1)];

    // ---- outputs, transposed: values (registers) times probabilities
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      u32 av[2][8];  // [chunk of 16 tokens][block 0: 4, block 1: 4]
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int c = 2 * part + k;
        u32 x[4];
        ldsm_t(x, stage + at_v + c * 16 * BYTES_V);
        if (KIND_V == UINT4) {
          const u32 mask = odd ? 0x00F000F0u : 0x000F000Fu, by = odd ? 0x2C002C00u : 0x3C003C00u;
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const uint2 w = lds_u2(stage + OFF_SV + (16 * c + 8 * h + 2 * t) * 4);
            const u32 z = ((prmt(w.x, w.y, 0x5410) & 0x000F000Fu) << (4 * odd)) | (odd ? 0xD400D400u : 0xE400E400u);
#pragma unroll
            for (int e = 2 * h; e < 2 * h + 2; ++e) {
              av[k][e] = hfma2(lop3<0xEA>(x[e], mask, 0x64006400u), by, z);
              av[k][4 + e] = hfma2(lop3<0xEA>(x[e] >> 8, mask, 0x64006400u), by, z);
            }
          }
        } else if (KIND_V == E2M1) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const u32 row = stage + OFF_SV + (16 * c + 8 * h + 2 * t) * 8 + 4 * (warp & 1);
            const u32 four = prmt(lds_u(row), lds_u(row + 8), g < 4 ? 0x6240 : 0x7351);
            const u32 f[2] = {hmul2(cvt_lo(four), 0x54005400u), hmul2(cvt_hi(four), 0x54005400u)};
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const u32 y = prmt(x[2 * h + e], 0, 0x3120) << (odd ? 0 : 4);
              const u32 b = lop3<0xEA>(y, 0x80808080u, (y >> 2) & 0x1C1C1C1Cu);
              av[k][2 * h + e] = hmul2(cvt_lo(b), f[e]);
              av[k][4 + 2 * h + e] = hmul2(cvt_hi(b), f[e]);
            }
          }
        } else {
#pragma unroll
          for (int e = 0; e < 4; ++e) unpack_split<KIND_V>(x[e], av[k][e], av[k][4 + e]);
        }
      }
      mma_fence();
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        mma<1>(o0, av[k][0], av[k][1], av[k][2], av[k][3], dp + (2 * part + k) * 128, 1);
        mma<1>(o1, av[k][4], av[k][5], av[k][6], av[k][7], dp + (2 * part + k) * 128, 1);
      }
    }
    mma_commit();
    mma_wait<0>();
    settle(o0);
    settle(o1);
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");

  // ---- sums over the warps, and the output turned round
  __syncthreads();
#pragma unroll
  for (int c = 0; c < 16; ++c) {
    float y = den[c];
    y += __shfl_xor_sync(~0u, y, 4);
    y += __shfl_xor_sync(~0u, y, 8);
    y += __shfl_xor_sync(~0u, y, 16);
    if (g == 0) columns[warp][8 * (c >> 1) + 2 * t + (c & 1)] = y;
  }
  float* const turned = (float*)(base + Q_BYTES);
#pragma unroll
  for (int c = 0; c < 16; ++c) {
    const int col = 8 * (c >> 1) + 2 * t + (c & 1), j = c >> 1, e = c & 1;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float a = o0[4 * j + e + 2 * h], b = o1[4 * j + e + 2 * h];
      if (BYTES_V == 128) {
        const int d = 2 * (16 * warp + g + 8 * h);
        *(float2*)(turned + col * PITCH + d) = make_float2(a, b);
      } else {
        const int d = 4 * (16 * (warp & 1) + g + 8 * h) + odd;
        turned[col * PITCH + d] = a;
        turned[col * PITCH + d + 2] = b;
      }
    }
  }
  __syncthreads();
  {
    const int row = tid >> 1, half = tid & 1, r = block * ROWS + row, query = r / GROUP;
    const bool there = query < num_queries;
    const int query_head = head * GROUP + r % GROUP;
    float sum = columns[0][row] + columns[1][row] + columns[2][row] + columns[3][row];
    const float base_level = level[row];
    const bool direct = it.splits == 1;
    float value = 1.0f, total = sum;
    if (direct && sink_kind && there) {
      float sink;
      if (sink_kind == 1) sink = ((const float*)sinks)[query_head];
      else if (sink_kind == 2) sink = __uint_as_float((u32)((const u16*)sinks)[query_head] << 16);
      else asm("cvt.f32.f16 %0, %1;" : "=f"(sink) : "h"(((const u16*)sinks)[query_head]));
      sink *= LOG2E;
      const float higher = fmaxf(base_level, sink);
      value = ex2(base_level - higher);
      total = sum * value + ex2(sink - higher);
    }
    value = total > 0.0f ? value / total : 0.0f * total;
    if (SCALING_V == ROW || SCALING_V == ROW_ZERO) value *= reference;
    if (v_outers) value *= v_outer[head * (v_outers - 1)];
    float x[64];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float4 y = *(const float4*)(turned + row * PITCH + half * 64 + 4 * i);
      x[4 * i] = y.x * value; x[4 * i + 1] = y.y * value; x[4 * i + 2] = y.z * value; x[4 * i + 3] = y.w * value;
    }
    if (direct) {
      if (ROTATE_V) {
        hadamard<ROTATE_V ? ROTATE_V : 2>(x, half);
#pragma unroll
        for (int i = 0; i < 64; ++i) x[i] *= 1.0f / (ROTATE_V ? ROTATE_V : 1);
      }
      if (there) {
        uint4* to = (uint4*)((u16*)out + ((long long)(first_token + query) * (HEADS * GROUP) + query_head) * HEAD + half * 64);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          u32 w[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            if (BFLOAT16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w[j]) : "f"(x[8 * i + 2 * j + 1]), "f"(x[8 * i + 2 * j]));
            else w[j] = pack(x[8 * i + 2 * j], x[8 * i + 2 * j + 1]);
          }
          to[i] = make_uint4(w[0], w[1], w[2], w[3]);
        }
      }
    } else {
      const long long slot = ((long long)item * HEADS + head) * ROWS + row;
      float4* to = (float4*)(partial + slot * HEAD + half * 64);
#pragma unroll
      for (int i = 0; i < 16; ++i) to[i] = make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
      if (there && half == 0) partial_lse[slot] = sum > 0.0f ? base_level + lg2(sum) : sum != sum ? sum : -INFINITY_;
    }
  }
}
