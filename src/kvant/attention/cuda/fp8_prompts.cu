// Attention of a prompt's queries on Hopper's fp8 tensor cores, for sm_90a, over codes of fp8 pages.
// fp8_prompts.py compiles it behind hopper.cuh and says what the arguments are.
//
// `lay_out` copies codes out of pages into tiles of 128 tokens, as wgmma reads them from shared memory:
//   K [128 tokens x 128 bytes], swizzled; V turned, [HEAD x 128 tokens], swizzled, and the 16 tokens of
//   each k-group in the order in which the scores' accumulators hold them, so that probabilities become
//   an operand where they are.
// `fp8_prompts` reads tiles by bulk copies. A program is GROUPS warpgroups of 64 query rows of one head. They
// share tiles and nothing else: while one takes exponentials, the others' products run.
// - Queries are rounded to e4m3 behind a power of two of their row; so are probabilities, against a running
//   maximum that is an integer in base 2. Rounding to four significant bits does not depend on which power
//   that is, hence not on tiles.
// - Products with values are summed in the tensor cores over one tile and added in float32, in the operation
//   that fades what was there: the tensor cores' own sums lose what is far below the largest.

constexpr int TILE = 128;
constexpr int ROWS = 64 * GROUPS;       // of a program
constexpr int K_BYTES = TILE * 128;     // a row of fewer bytes leaves the rest of its 128 unread
constexpr int V_BYTES = HEAD * TILE;
constexpr int SCALE_BYTES = TILE * 4;
constexpr int AT_V = K_BYTES, AT_KS = AT_V + V_BYTES, AT_VS = AT_KS + (SCALED_K ? SCALE_BYTES : 0);
constexpr int AT_UNIT = AT_VS + (SCALED_V ? SCALE_BYTES : 0);
constexpr int USED = AT_UNIT + (SCALED_V ? 16 : 0);
constexpr int STAGE = (USED + 1023) / 1024 * 1024;  // of a tile, in memory and in shared memory
constexpr int WARPS = 4 * GROUPS;
constexpr int Q_BYTES = 64 * 128;       // of a warpgroup
constexpr int LAG = 2;                  // tiles that a warpgroup may be behind before copies wait for it
constexpr float LOWEST = -1.0e30f;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float TOP = 8.0f;  // log2 of the largest rounded number: e4m3 ends at 448

__device__ __forceinline__ float power_of_two(int e) { return __int_as_float((min(max(e, -126), 127) + 127) << 23); }
__device__ __forceinline__ int ceil_log2(float x) {  // of x > 0 that is not subnormal
  const int bits = __float_as_int(x);
  return (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0);
}
__device__ __forceinline__ u32 round4(float a, float b, float c, float d) {  // to e4m3, a lowest
  u32 x;
  asm("{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, %2, %1; cvt.rn.satfinite.e4m3x2.f32 hi, %4, %3; mov.b32 %0, {lo, hi}; }"
      : "=r"(x) : "f"(a), "f"(b), "f"(c), "f"(d));
  return x;
}

// ---- pages to tiles

// Program (tile, KV head, sequence from first_seq on); tiles of a head of a sequence lie side by side.
extern "C" __global__ void __launch_bounds__(256)
lay_out(const u8* __restrict__ k_codes, const float* __restrict__ k_scales, const u8* __restrict__ v_codes, const float* __restrict__ v_scales,
        const int* __restrict__ page_table, long long max_pages, const int* __restrict__ lens, int first_seq, int tiles, long long page_bytes, u8* __restrict__ out) {
  __shared__ u32 turned[TILE][HEAD / 4 + 1];
  __shared__ float largest[8];
  const int tile = blockIdx.x % tiles, head = blockIdx.x / tiles % HEADS, seq = blockIdx.x / tiles / HEADS;
  const int tid = threadIdx.x, start = tile * TILE, length = lens[first_seq + seq];
  if (start >= length) return;
  u8* const to = out + (long long)blockIdx.x * STAGE;
  const int* const pages = page_table + (first_seq + seq) * max_pages;
  // The row of a token, of `width` bytes.
  auto row_of_token = [&](const void* plane, int token, int width) {
    return (const u8*)plane + pages[token / PAGE] * page_bytes + (token % PAGE * HEADS + head) * width;
  };
  constexpr int CHUNKS = HEAD / 16;  // of 16 bytes
#pragma unroll
  for (int i = tid; i < TILE * CHUNKS; i += 256) {
    const int r = i / CHUNKS, c = i % CHUNKS, token = start + r;
    uint4 k = {0, 0, 0, 0}, v = {0, 0, 0, 0};
    if (token < length) {
      k = *(const uint4*)(row_of_token(k_codes, token, HEAD) + c * 16);
      v = *(const uint4*)(row_of_token(v_codes, token, HEAD) + c * 16);
    }
    *(uint4*)(to + r * 128 + ((c ^ (r & 7)) * 16)) = k;
    turned[r][4 * c] = v.x; turned[r][4 * c + 1] = v.y; turned[r][4 * c + 2] = v.z; turned[r][4 * c + 3] = v.w;
  }
  if (SCALED_K && tid < TILE) ((float*)(to + AT_KS))[tid] = start + tid < length ? *(const float*)row_of_token(k_scales, start + tid, 4) : 0.0f;
  float scale = 0.0f;
  if (SCALED_V) {
    if (tid < TILE && start + tid < length) scale = *(const float*)row_of_token(v_scales, start + tid, 4);
    float most = scale;
    for (int s = 16; s; s >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, s));
    if (tid % 32 == 0) largest[tid / 32] = most;
  }
  __syncthreads();
  if (SCALED_V) {  // value scales over a power of two that is not below the tile's largest
    const float most = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
    const int e = most > 1.0e-37f ? min(ceil_log2(most), 126) : -126;
    if (tid < TILE) ((float*)(to + AT_VS))[tid] = scale * power_of_two(-e);
    if (tid == 0) *(float*)(to + AT_UNIT) = e;
  }
#pragma unroll
  for (int i = tid; i < CHUNKS * 4 * 32; i += 256) {  // four dimensions of four tokens
    const int w = i % 32, d = i / 32, t = 16 * (w / 4) + 2 * (w % 4);
    const u32 a = turned[t][d], b = turned[t + 1][d], e = turned[t + 8][d], f = turned[t + 9][d];
    const u32 ab = prmt(a, b, 0x5140), ab2 = prmt(a, b, 0x7362), ef = prmt(e, f, 0x5140), ef2 = prmt(e, f, 0x7362);
    const u32 words[4] = {prmt(ab, ef, 0x5410), prmt(ab, ef, 0x7632), prmt(ab2, ef2, 0x5410), prmt(ab2, ef2, 0x7632)};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int r = 4 * d + k;
      *(u32*)(to + AT_V + r * 128 + (((w / 4) ^ (r & 7)) * 16) + (w % 4) * 4) = words[k];
    }
  }
}

// ---- products

#define D16(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3]), "+f"(x[i + 4]), "+f"(x[i + 5]), "+f"(x[i + 6]), "+f"(x[i + 7]), \
  "+f"(x[i + 8]), "+f"(x[i + 9]), "+f"(x[i + 10]), "+f"(x[i + 11]), "+f"(x[i + 12]), "+f"(x[i + 13]), "+f"(x[i + 14]), "+f"(x[i + 15])
// d [64 x 128] (+)= a (registers, 64 x 32 of e4m3) * b (shared memory, 128 rows of 32 bytes of TYPE)
#define MMA128(TYPE, d, a, b, add) asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0;\n" \
  "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3." TYPE " " \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}," \
  "{%64,%65,%66,%67}, %68, p, 1, 1; }\n" \
  : D16(d, 0), D16(d, 16), D16(d, 32), D16(d, 48) : "r"((a)[0]), "r"((a)[1]), "r"((a)[2]), "r"((a)[3]), "l"(b), "r"((int)(add)))
// the same with a in shared memory, 64 rows of 32 bytes
#define MMA_SHARED(TYPE, d, a, b, add) asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0;\n" \
  "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3." TYPE " " \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}," \
  "%64, %65, p, 1, 1; }\n" \
  : D16(d, 0), D16(d, 16), D16(d, 32), D16(d, 48) : "l"(a), "l"(b), "r"((int)(add)))
#define MMA64(TYPE, d, a, b, add) asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0;\n" \
  "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3." TYPE " " \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}," \
  "{%32,%33,%34,%35}, %36, p, 1, 1; }\n" \
  : D16(d, 0), D16(d, 16) : "r"((a)[0]), "r"((a)[1]), "r"((a)[2]), "r"((a)[3]), "l"(b), "r"((int)(add)))

// scores [64 x 128] = queries * keys of a tile, not waited for
__device__ __forceinline__ void multiply_keys(float (&s)[64], u64 queries, u64 keys) {
  mma_fence();
#pragma unroll
  for (int k = 0; k < HEAD / 32; ++k) {
    if (E5M2_K) MMA_SHARED("e5m2", s, queries + 2 * k, keys + 2 * k, k > 0);
    else MMA_SHARED("e4m3", s, queries + 2 * k, keys + 2 * k, k > 0);
  }
  mma_commit();
}
// sums [64 x HEAD] = probabilities * values of a tile
__device__ __forceinline__ void multiply_values(float (&s)[HEAD / 2], const u32 (&p)[4][4], u64 values) {
  mma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#if HEAD == 128
    if (E5M2_V) MMA128("e5m2", s, p[k], values + 2 * k, k > 0);
    else MMA128("e4m3", s, p[k], values + 2 * k, k > 0);
#else
    if (E5M2_V) MMA64("e5m2", s, p[k], values + 2 * k, k > 0);
    else MMA64("e4m3", s, p[k], values + 2 * k, k > 0);
#endif
  }
  mma_commit();
}
__device__ __forceinline__ void arrive(u32 counter) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(counter) : "memory"); }
__device__ __forceinline__ void copy_tile(u32 to, const u8* from, u32 counter) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(counter), "r"(USED) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(USED), "r"(counter) : "memory");
}

// A row of 16-bit queries of this thread, its share of HEAD: 4 numbers from 4 t on of every 16.
struct Row {
  float x[HEAD / 4];
  __device__ __forceinline__ void load(const u16* from, bool there) {
#pragma unroll
    for (int i = 0; i < HEAD / 16; ++i) {
      const uint2 w = there ? *(const uint2*)(from + 16 * i) : uint2{0, 0};
      const u32 words[2] = {w.x, w.y};
#pragma unroll
      for (int j = 0; j < 2; ++j) unpack_16_bit(x[4 * i + 2 * j], x[4 * i + 2 * j + 1], words[j]);
    }
  }
  // Multiply so that the row's largest is in (128, 256]; returns what undoes that.
  __device__ __forceinline__ float lift() {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < HEAD / 4; ++i) most = fmaxf(most, fabsf(x[i]));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    const int e = most > 1.0e-30f ? min(ceil_log2(most), 100) - 8 : 0;
    const float times = power_of_two(-e);
#pragma unroll
    for (int i = 0; i < HEAD / 4; ++i) x[i] *= times;
    return power_of_two(e);
  }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
fp8_prompts(const u16* __restrict__ q_ptr, long long q_token, long long q_head, const u8* __restrict__ laid_out,
            const float* k_outer, int k_outers, const float* v_outer, int v_outers, u16* __restrict__ out,
            const int* __restrict__ cu, const int* __restrict__ lens, int first_seq, int blocks, int tiles, float softmax_scale, int causal) {
  extern __shared__ __align__(1024) u8 smem[];
  __shared__ u64 counters[2 * STAGES];
  const int block = blocks - 1 - blockIdx.x % blocks, head = blockIdx.x / blocks % (HEADS * GROUP), place = blockIdx.x / blocks / (HEADS * GROUP);
  const int first_token = cu[first_seq + place], num_queries = cu[first_seq + place + 1] - first_token, length = lens[first_seq + place];
  if (block * ROWS >= num_queries) return;
  const int kv_head = head / GROUP, offset = length - num_queries;
  const int end = causal ? min(length, offset + (block + 1) * ROWS) : length, num_tiles = (end + TILE - 1) / TILE;
  u8* const base = (u8*)(((u64)smem + 1023) & ~1023ull);
  const u32 space = smem_of(base) + GROUPS * Q_BYTES, filled = smem_of(counters), freed = filled + 8 * STAGES;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const u8* from = laid_out + ((long long)place * HEADS + kv_head) * tiles * STAGE;  // of the next tile to copy
  if (tid == 0) {
    for (int i = 0; i < STAGES; ++i) { make_counter(filled + 8 * i, 1); make_counter(freed + 8 * i, WARPS); }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    for (int i = 0; i < STAGES && i < num_tiles; ++i, from += STAGE) copy_tile(space + i * STAGE, from, filled + 8 * i);
  }

  const int g = lane >> 2, t = lane & 3, r0 = block * ROWS + 16 * warp + g;  // this thread's rows: r0, r0 + 8
  float factor[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    Row row;
    row.load(q_ptr + (long long)(first_token + r0 + 8 * h) * q_token + head * q_head + 4 * t, r0 + 8 * h < num_queries);
    factor[h] = row.lift() * softmax_scale * LOG2E;
    if (k_outers) factor[h] *= k_outer[kv_head * (k_outers - 1)];
    u8* const to = base + (16 * warp + g + 8 * h) * 128 + 4 * t;
#pragma unroll
    for (int c = 0; c < HEAD / 16; ++c) *(u32*)(to + ((c ^ g) * 16)) = round4(row.x[4 * c], row.x[4 * c + 1], row.x[4 * c + 2], row.x[4 * c + 3]);
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  const u64 queries = descriptor(smem_of(base) + warp / 4 * Q_BYTES);
  // Keys that each row sees end here; padding rows see what the last row sees.
  const int sees[2] = {causal ? min(offset + r0 + 1, length) : length, causal ? min(offset + r0 + 9, length) : length};
  // Tiles that all rows see whole, and tiles that one of them sees: of the warpgroup if it skips tiles of others.
  const int top = block * ROWS + (SKIPS ? 64 * (warp / 4) : 0);
  const int open = (causal ? min(offset + top + 1, length) : length) / TILE;
  const int seen = !SKIPS ? num_tiles : top >= num_queries ? 0 : ((causal ? min(offset + top + 64, length) : length) + TILE - 1) / TILE;
  float o[HEAD / 2], s[64], den[2] = {0.0f, 0.0f}, level[2] = {LOWEST, LOWEST}, unit = SCALED_V ? -126.0f : 0.0f;
#pragma unroll
  for (int i = 0; i < HEAD / 2; ++i) o[i] = 0.0f;
#pragma unroll
  for (int i = 0; i < 64; ++i) s[i] = 0.0f;
  Turn turn, behind;
  auto refill = [&](int i) {  // the space of the tile LAG before tile i
    if (i < LAG) return;
    if (tid == 0 && i - LAG + STAGES < num_tiles) {
      wait_for(freed + 8 * behind.index, behind.parity);
      copy_tile(space + behind.index * STAGE, from, filled + 8 * behind.index);
      from += STAGE;
    }
    behind.next();
  };
  int i = 0;
  for (; i < seen; ++i, turn.next()) {
    const u32 tile = space + turn.index * STAGE;
    wait_for(filled + 8 * turn.index, turn.parity);
    multiply_keys(s, queries, descriptor(tile));
    refill(i);
    mma_wait<0>();
    settle(s);
    // s[4 j + 2 h + c]: row h, key 8 j + 2 t + c
    if (SCALED_K) {
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const uint2 k = lds_u2(tile + AT_KS + 32 * j + 8 * t);
#pragma unroll
        for (int h = 0; h < 2; ++h) { s[4 * j + 2 * h] *= __uint_as_float(k.x); s[4 * j + 2 * h + 1] *= __uint_as_float(k.y); }
      }
    }
    if (i >= open) {
#pragma unroll
      for (int j = 0; j < 64; ++j)
        if (i * TILE + 8 * (j / 4) + 2 * t + (j & 1) >= sees[j / 2 & 1]) s[j] = -INFINITY_;
    }
    // Value scales are over 2^unit, the largest so far: this tile's probabilities are 2^below smaller.
    float below = 0.0f, shrink = 1.0f, fade[2];
    if (SCALED_V) {
      const float mine = __uint_as_float(lds_u(tile + AT_UNIT)), larger = fmaxf(unit, mine);
      below = fmaxf(mine - larger, -100.0f);
      shrink = ex2(unit - larger);
      unit = larger;
    }
    u32 p[4][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = fmaxf(s[2 * h], s[2 * h + 1]);
#pragma unroll
      for (int j = 1; j < 16; ++j) most = fmaxf(most, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      const float higher = fmaxf(level[h], ceilf(most * factor[h]));
      fade[h] = ex2(level[h] - higher);
      level[h] = higher;
      const float above = TOP - higher + below;
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        float &x = s[4 * j + 2 * h], &y = s[4 * j + 2 * h + 1];
        x = ex2(fmaf(x, factor[h], above));
        y = ex2(fmaf(y, factor[h], above));
        sum += x + y;
      }
      den[h] = fmaf(den[h], fade[h], SCALED_V ? sum * ex2(-below) : sum);
      if (SCALED_V) fade[h] *= shrink;
    }
    if (SCALED_V) {
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const uint2 v = lds_u2(tile + AT_VS + 32 * j + 8 * t);
#pragma unroll
        for (int h = 0; h < 2; ++h) { s[4 * j + 2 * h] *= __uint_as_float(v.x); s[4 * j + 2 * h + 1] *= __uint_as_float(v.y); }
      }
    }
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int h = 0; h < 4; ++h) {  // rows alternate, then 16 tokens
        const float* const x = s + 16 * k + 8 * (h >> 1) + 2 * (h & 1);
        p[k][h] = round4(x[0], x[1], x[4], x[5]);
      }
#if HEAD == 128
    float(&sums)[64] = s;  // the scores are not needed any more
#else
    float sums[HEAD / 2];
#pragma unroll
    for (int j = 0; j < HEAD / 2; ++j) sums[j] = 0.0f;
#endif
    multiply_values(sums, p, descriptor(tile + AT_V));
    mma_wait<0>();
    settle(sums);
    if (lane == 0) arrive(freed + 8 * turn.index);
#pragma unroll
    for (int j = 0; j < HEAD / 2; ++j) o[j] = fmaf(o[j], fade[j / 2 & 1], sums[j]);
  }
  for (; SKIPS && i < num_tiles; ++i, turn.next()) {  // tiles of the other warpgroups alone
    wait_for(filled + 8 * turn.index, turn.parity);
    refill(i);
    if (lane == 0) arrive(freed + 8 * turn.index);
  }

  float value = ex2(unit);
  if (v_outers) value *= v_outer[kv_head * (v_outers - 1)];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float sum = den[h];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const int row = r0 + 8 * h;
    if (row >= num_queries) continue;
    const float times = value / sum;
    u16* const to = out + ((long long)(first_token + row) * (HEADS * GROUP) + head) * HEAD + 2 * t;
#pragma unroll
    for (int j = 0; j < HEAD / 8; ++j) *(u32*)(to + 8 * j) = pack_16_bit(o[4 * j + 2 * h] * times, o[4 * j + 2 * h + 1] * times);
  }
}
