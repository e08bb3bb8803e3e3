// Attention of one query per sequence over keys and values in 16 or 8 bits, for sm_90a: decode steps of short
// contexts. one_query.py compiles it, behind hopper.cuh and the formats.
//
// A cluster of CLUSTER programs has one sequence and one KV head. Their warps share the stored tokens in chunks of
// 16, each warp for itself: it copies rows to shared memory, STAGES chunks ahead, and keeps its own softmax.
// - Only the newest token's row is written in this step. So a warp copies all other rows of its first chunks while
//   the kernels before still run, and only the newest row afterwards.
// - ROTATES: q, k and v come as one product. Programs normalise and rotate the heads, as rotated_store.py does, and
//   one of the cluster stores the newest row and has it in shared memory.
// - Tokens are the 16 rows of a matrix product, heads of the group its 8 columns.
// - Codes of 8 bits (EIGHT) become float16 in registers. Queries are divided by their row's largest magnitude, and
//   probabilities times value scales by the largest scale so far, so float16 holds them.
// - Warps join their parts in shared memory. Programs then send theirs to the program that writes these columns.

constexpr int ROW = EIGHT ? HEAD : HEAD * 2;  // bytes of a stored row, without its scale
constexpr int PITCH = ROW + 16;        // of a row in shared memory: eight rows have different banks
constexpr int CHUNK = 16;              // tokens
constexpr int STAGE = 2 * CHUNK * PITCH;  // keys, then values
constexpr int STEPS = HEAD / 16;
constexpr int PART = HEAD + 4;         // floats of a row of a warp's result
constexpr int COLUMNS = 8;             // heads of a product
constexpr int SLICE = GROUP * HEAD / CLUSTER;  // numbers that a program writes
constexpr float LOG2E = 1.4426950408889634f;
constexpr bool SCALED = SCALED_K || SCALED_V;  // rows have scales
constexpr float HEADROOM = 32768.0f;           // of probabilities times value scales
constexpr int ROWS = GROUP + 2;  // queries, then the key and the value, of which one program of a cluster stores them
constexpr int ROUNDS = (ROWS + WARPS - 1) / WARPS;
static_assert(!(EIGHT && ROTATES), "another kernel encodes rows of 8 bits");
static_assert(GROUP <= COLUMNS && SLICE % 4 == 0 && CLUSTER <= STEPS * 4, "");
static_assert(WARPS * STAGES * STAGE == SHARED_BYTES, "one_query.py counts as this file does");

__device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if (BFLOAT16 && !EIGHT)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 transposed(u32 x) {  // of a block of 8 x 8 numbers of 16 bits
  u32 d;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(x));
  return d;
}
__device__ __forceinline__ void expect(u32 counter, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(counter), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_row(u32 to, const u8* from, u32 counter) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(ROW), "r"(counter) : "memory");
}
__device__ __forceinline__ u32 in_program(u32 at, int rank) {  // the same place in another program's shared memory
  u32 d;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(d) : "r"(at), "r"(rank));
  return d;
}
__device__ __forceinline__ void send(u32 to, float4 x) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(to), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}
__device__ __forceinline__ void send(u32 to, float2 x) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1,%2};" ::"r"(to), "f"(x.x), "f"(x.y) : "memory");
}
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ float over_tokens(float x, bool largest) {  // of the eight lanes that share heads
#pragma unroll
  for (int k = 4; k < 32; k <<= 1) {
    const float y = __shfl_xor_sync(~0u, x, k);
    x = largest ? fmaxf(x, y) : x + y;
  }
  return x;
}
__device__ __forceinline__ float sink_of(const void* sinks, int kind, int head) {  // kinds: _SINKS of one_query.py
  if (kind == 1) return ((const float*)sinks)[head];
  if (kind == 2) return __uint_as_float((u32)((const u16*)sinks)[head] << 16);
  return float_of(((const u16*)sinks)[head]);
}

__device__ __forceinline__ u32 packed(float lo, float hi) { return EIGHT ? pack(lo, hi) : pack_16_bit(lo, hi); }

// Adds up parts of a row: top: largest score of all parts, base 2; -infinity has no weight, and NaN stays NaN.
__device__ __forceinline__ float weight(float part, float top) { return part == -INFINITY_ ? 0.0f : ex2(part - top); }
__device__ __forceinline__ void add(float4& to, float by, float4 x) {
  to.x += by * x.x; to.y += by * x.y; to.z += by * x.z; to.w += by * x.w;
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(32 * WARPS)
one_query(const u16* q_ptr, long long q_token, long long q_head, const u8* k_codes, const u8* v_codes,
          int page_bytes, const void* sinks, int sink_kind, u16* out, const int* cu, const int* lens,
          const int* __restrict__ page_table, long long max_pages, int num_tokens, int num_seqs, float softmax_scale, int window,
          const void* __restrict__ cos, const void* __restrict__ sin, const long long* positions, const long long* slots,
          const u16* __restrict__ q_weight, const u16* __restrict__ k_weight, float eps,
          const u8* k_scales, const u8* v_scales, const float* k_outer, int k_outers, const float* v_outer, int v_outers) {
  extern __shared__ __align__(128) u8 smem[];
  __shared__ __align__(8) u64 landed[WARPS][STAGES];
  __shared__ float2 of_warps[WARPS][COLUMNS];                       // top and sum of a warp's rows
  __shared__ __align__(16) float received[CLUSTER][SLICE];          // from all programs
  __shared__ __align__(8) float2 received_of[CLUSTER][COLUMNS];
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (CLUSTER > 1) cluster_arrive();  // later: all programs have begun, and their memory may be written
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
  const int rank = blockIdx.x % CLUSTER, head = blockIdx.x / CLUSTER, seq = blockIdx.y;

  // ---- this warp's chunks: every SLOTS-th one
  constexpr int SLOTS = CLUSTER * WARPS;
  const int slot = warp * CLUSTER + rank;
  const int length = lens[seq];
  const int begin = window > 0 ? max(length - window, 0) : 0;
  const int first = begin / CHUNK, chunks = (length + CHUNK - 1) / CHUNK - first;
  const int mine = chunks > slot ? (chunks - slot + SLOTS - 1) / SLOTS : 0;
  const int* table = page_table + seq * max_pages;
  const u8* codes = (lane < CHUNK ? k_codes : v_codes) + head * ROW;
  const u32 ring = smem_of(smem) + warp * (STAGES * STAGE), counters = smem_of(landed[warp]);
  const u32 my_row = ring + lane * PITCH;
  __shared__ float scales[SCALED ? WARPS : 1][STAGES][32];  // of keys, then of values

  // Lanes without a token of the chunk that the query sees have another's row: it is finite, and gets no weight.
  auto token_of = [&](int i) { return min(max((first + slot + i * SLOTS) * CHUNK + lane % CHUNK, begin), length - 1); };
  auto row_at = [&](int token, int page) { return row_of(codes, page, page_bytes) + token % PAGE * (HEADS * ROW); };

  int pages[STAGES];
#pragma unroll
  for (int i = 0; i < STAGES; ++i) pages[i] = i < mine ? table[token_of(i) / PAGE] : 0;
  int page = STAGES < mine ? table[token_of(STAGES) / PAGE] : 0;
  // With ROTATES the newest row is not copied: it comes from `heads`.
  auto copy_chunk = [&](int i, int stage, int page) {  // this lane's row of chunk i
    copy_row(my_row + stage * STAGE, row_at(token_of(i), page), counters + 8 * stage);
    if (SCALED) {
      const u8* from = row_of(lane < CHUNK ? k_scales : v_scales, page, page_bytes) + (token_of(i) % PAGE * HEADS + head) * 4;
      if (lane < CHUNK ? SCALED_K : SCALED_V) copy_small<4>(smem_of(&scales[warp][stage][lane]), from, true);
      arrive_with_copies(counters + 8 * stage);
    }
  };
  auto is_newest = [&](int i) { return token_of(i) == length - 1; };
  auto expect_chunk = [&](int i, int stage) {
    const int rows = ROTATES ? __popc(__ballot_sync(~0u, !is_newest(i))) : 2 * CHUNK;
    if (lane == 0) expect(counters + 8 * stage, rows * ROW);
    __syncwarp();
  };
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < STAGES; ++i) make_counter(counters + 8 * i, SCALED ? 33 : 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < STAGES; ++i) {
    if (i < mine) {
      expect_chunk(i, i);
      if (!is_newest(i)) copy_chunk(i, i, pages[i]);
    }
  }

  u32 q[STEPS][2];  // head g, columns 2 t, 2 t + 1 and those 8 behind them
#if ROTATES
  // ---- heads of the newest token: row r of GROUP + 2 belongs to warp r % WARPS
  __shared__ __align__(16) u16 heads[ROWS][HEAD + 8];
  const int token = seq;
  const bool there = true, stores = chunks > 0 && (chunks - 1) % SLOTS % CLUSTER == rank;
  const long long slot_of_newest = slots[token];
  const u16* rows[ROUNDS];
  u32 x[ROUNDS][WORDS], y[ROUNDS][WORDS], w[ROUNDS][WORDS], v[ROUNDS][WORDS];
#pragma unroll
  for (int n = 0; n < ROUNDS; ++n) {
    const int r = warp + n * WARPS, behind = HEADS * GROUP * Q_STEP;
    rows[n] = q_ptr + token * q_token
        + (r < GROUP ? (head * GROUP + r) * Q_STEP : r == GROUP ? behind + head : behind + HEADS + head) * HEAD;
    const u16* weights = r < GROUP ? q_weight : k_weight;
#pragma unroll
    for (int j = 0; j < WORDS; ++j) {
      const int column = 2 * lane + 64 * j;
      w[n][j] = NORM ? *(const u32*)(weights + column) : 0;
      v[n][j] = NORM ? *(const u32*)(weights + partner_of(column)) : 0;
    }
  }
  Angles angles;
  if (BY_POSITION) angles = angles_of(cos, sin, positions[token], lane);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (!BY_POSITION) angles = angles_of(cos, sin, token, lane);
#pragma unroll
  for (int n = 0; n < ROUNDS; ++n) {
    const int r = warp + n * WARPS;
#pragma unroll
    for (int j = 0; j < WORDS; ++j) {
      const int column = 2 * lane + 64 * j;
      const bool is_read = r < GROUP || (r < ROWS && stores);
      x[n][j] = is_read ? *(const u32*)(rows[n] + column) : 0;
      y[n][j] = is_read ? *(const u32*)(rows[n] + partner_of(column)) : 0;
    }
  }
#pragma unroll
  for (int n = 0; n < ROUNDS; ++n) {
    const int r = warp + n * WARPS;
    float scale = 1.0f;
    if (NORM) {
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < WORDS; ++j) {
        float a, b;
        unpack_16_bit(a, b, x[n][j]);
        sum += a * a + b * b;
      }
#pragma unroll
      for (int k = 1; k < 32; k <<= 1) sum += __shfl_xor_sync(~0u, sum, k);
      scale = rsqrtf(sum / HEAD + eps);
    }
    const bool is_value = r == GROUP + 1, is_stored = r >= GROUP && r < ROWS && stores;
    u8* to = (u8*)(is_value ? v_codes : k_codes) + head * ROW;
    if (is_stored && slot_of_newest >= 0)
      to = (u8*)row_of(to, (u32)(slot_of_newest / PAGE), page_bytes) + slot_of_newest % PAGE * (HEADS * ROW);
#pragma unroll
    for (int j = 0; j < WORDS; ++j) {
      const int column = 2 * lane + 64 * j;
      const u32 word = is_value ? x[n][j] : turned(x[n][j], y[n][j], w[n][j], v[n][j], scale, angles, j, lane);
      if (r < GROUP || is_stored) *(u32*)&heads[r][column] = word;
      if (is_stored && slot_of_newest >= 0) *(u32*)(to + 2 * column) = word;
    }
  }
  __syncthreads();
#pragma unroll
  for (int s = 0; s < STEPS; ++s)
#pragma unroll
    for (int h = 0; h < 2; ++h) q[s][h] = g < GROUP ? *(const u32*)&heads[g][16 * s + 8 * h + 2 * t] : 0;
#else
  asm volatile("griddepcontrol.wait;" ::: "memory");
#pragma unroll
  for (int i = 0; i < STAGES; ++i)
    if (i < mine && is_newest(i)) copy_chunk(i, i, pages[i]);
  const int token = cu[seq];
  const bool there = cu[seq + 1] > token;
#if EIGHT
  // Lane t multiplies the columns 16 s + 4 t to 16 s + 4 t + 3 of step s.
  float largest = 0.0f;
  {
    const u16* from = q_ptr + token * q_token + (long long)(head * GROUP + g) * q_head + 4 * t;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const uint2 x = there && g < GROUP ? *(const uint2*)(from + 16 * s) : make_uint2(0, 0);
      float a, b, c, d;
      unpack_16_bit(a, b, q[s][0] = x.x);
      unpack_16_bit(c, d, q[s][1] = x.y);
      largest = fmaxf(largest, fmaxf(fmaxf(fabsf(a), fabsf(b)), fmaxf(fabsf(c), fabsf(d))));
    }
  }
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
  largest = fmaxf(fmaxf(largest, __shfl_xor_sync(~0u, largest, 2)), 1.0e-30f);
#pragma unroll
  for (int s = 0; s < STEPS; ++s) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float a, b;
      unpack_16_bit(a, b, q[s][h]);
      q[s][h] = pack(a * (1.0f / largest), b * (1.0f / largest));
    }
  }
#else
  {
    const u16* from = q_ptr + token * q_token + (long long)(head * GROUP + g) * q_head + 2 * t;
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
#pragma unroll
      for (int h = 0; h < 2; ++h) q[s][h] = there && g < GROUP ? *(const u32*)(from + 16 * s + 8 * h) : 0;
  }
#endif
#endif

  // ---- chunks: scores [16 tokens, 8 heads], results [16 columns, 8 heads] for each 16 columns
  float factor[2] = {softmax_scale * LOG2E, softmax_scale * LOG2E}, v_factor = 1.0f;
#if EIGHT
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    factor[h] *= __shfl_sync(~0u, largest, 4 * (2 * t + h));
    if (k_outers) factor[h] *= k_outer[head * (k_outers - 1)];
  }
  if (v_outers) v_factor = v_outer[head * (v_outers - 1)];
#endif
#if SCALED_V
  float reference = 7.888609052210118e-31f;  // 2^-100
#endif
  const u32 k_at = ring + lane % 16 * PITCH + lane / 16 * 16;
  const u32 v_at = ring + CHUNK * PITCH + (lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 16;
  float top[2] = {-INFINITY_, -INFINITY_}, sum[2] = {0.0f, 0.0f}, acc[STEPS][4];
#pragma unroll
  for (int s = 0; s < STEPS; ++s) acc[s][0] = acc[s][1] = acc[s][2] = acc[s][3] = 0.0f;
  u32 parity = 0;
  for (int i = 0, stage = 0; i < mine; ++i) {
    wait_for(counters + 8 * stage, parity);
#if ROTATES
    if (slot + i * SLOTS == chunks - 1) {
      if (is_newest(i)) {
        const uint4* from = (const uint4*)heads[GROUP + lane / CHUNK];
        uint4* to = (uint4*)(smem + (my_row + stage * STAGE - smem_of(smem)));
#pragma unroll 4
        for (int n = 0; n < ROW / 16; ++n) to[n] = from[n];
      }
      __syncwarp();
    }
#endif
    float even[4] = {0.0f, 0.0f, 0.0f, 0.0f}, odd[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      u32 a[4];
#if EIGHT
      const u32 from = ring + stage * STAGE + g * PITCH + 16 * s + 4 * t;
      FORMAT_K::Code::pairs(lds_u(from), a[0], a[2]);
      FORMAT_K::Code::pairs(lds_u(from + 8 * PITCH), a[1], a[3]);
#else
      ldsm(a, k_at + stage * STAGE + 32 * s);
#endif
      multiply(s % 2 ? odd : even, a, q[s][0], q[s][1]);
    }
    const int at = (first + slot + i * SLOTS) * CHUNK + g;
    float p[4], fade[2];
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const int place = at + x / 2 * 8;
      float score = (even[x] + odd[x]) * factor[x % 2];
      if (SCALED_K) score *= scales[warp][stage][g + x / 2 * 8];
      p[x] = place >= begin && place < length ? score : -INFINITY_;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float higher = fmaxf(top[h], over_tokens(fmaxf(p[h], p[h + 2]), true));
      fade[h] = ex2(top[h] - higher);
      top[h] = higher;
      p[h] = ex2(p[h] - higher);
      p[h + 2] = ex2(p[h + 2] - higher);
      sum[h] = sum[h] * fade[h] + (p[h] + p[h + 2]);
    }
#if SCALED_V
    {
      const float first = scales[warp][stage][CHUNK + g], second = scales[warp][stage][CHUNK + 8 + g];
      const float higher = fmaxf(reference, over_tokens(fmaxf(first, second), true)), by = HEADROOM / higher;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        fade[h] *= reference / higher;
        p[h] *= first * by;
        p[h + 2] *= second * by;
      }
      reference = higher;
    }
#endif
    const u32 b0 = transposed(packed(p[0], p[1])), b1 = transposed(packed(p[2], p[3]));
#if EIGHT
    u32 codes_of[4];  // of tokens 2 t, 2 t + 1 and those 8 behind them, at columns 4 g to 4 g + 3 of 32
#endif
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      u32 a[4];
#if EIGHT
      if (s % 2 == 0) {
        const u32 from = ring + stage * STAGE + (CHUNK + 2 * t) * PITCH + 16 * s + 4 * g;
#pragma unroll
        for (int n = 0; n < 4; ++n) codes_of[n] = lds_u(from + (n % 2 + n / 2 * 8) * PITCH);
      }
      const u32 pick = s % 2 ? 0x7632 : 0x5410;
      FORMAT_V::Code::split(prmt(codes_of[0], codes_of[1], pick), a[0], a[1]);
      FORMAT_V::Code::split(prmt(codes_of[2], codes_of[3], pick), a[2], a[3]);
#else
      ldsm_t(a, v_at + stage * STAGE + 32 * s);
#endif
#pragma unroll
      for (int x = 0; x < 4; ++x) acc[s][x] *= fade[x % 2];
      multiply(acc[s], a, b0, b1);
    }
    __syncwarp();  // all lanes have read the chunk
    if (i + STAGES < mine) {
      expect_chunk(i + STAGES, stage);
      if (!ROTATES || !is_newest(i + STAGES)) copy_chunk(i + STAGES, stage, page);
      if (i + STAGES + 1 < mine) page = table[token_of(i + STAGES + 1) / PAGE];
    }
    if (++stage == STAGES) { stage = 0; parity ^= 1; }
  }

  // ---- the warps' parts, in place of their chunks
  float* const part = (float*)(smem + warp * (STAGES * STAGE));
#if SCALED_V
  v_factor *= reference / HEADROOM;
#endif
  // Columns of a lane's numbers: those of rows g and g + 8 of step s.
  auto column_of = [&](int s, int half) { return EIGHT ? s / 2 * 32 + 4 * g + s % 2 * 2 + half : 16 * s + 8 * half + g; };
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    sum[h] = over_tokens(sum[h], false);
    if (g == 0) of_warps[warp][2 * t + h] = make_float2(top[h], sum[h]);
    if (2 * t + h < GROUP) {
#pragma unroll
      for (int s = 0; s < STEPS; ++s) {
        part[(2 * t + h) * PART + column_of(s, 0)] = acc[s][h] * v_factor;
        part[(2 * t + h) * PART + column_of(s, 1)] = acc[s][2 + h] * v_factor;
      }
    }
  }
  __syncthreads();
  if (CLUSTER > 1) cluster_wait();

  auto write = [&](int h, int column, float2 both, float4 x) {  // both: top and sum
    float by = 1.0f;
    if (sinks) {
      const float sink = sink_of(sinks, sink_kind, head * GROUP + h) * LOG2E, higher = fmaxf(both.x, sink);
      by = weight(both.x, higher);
      both.y = both.y * by + ex2(sink - higher);
    }
    by = both.y > 0.0f ? by / both.y : 0.0f * both.y;
    u16* to = out + ((long long)token * (HEADS * GROUP) + head * GROUP + h) * HEAD + column;
    if (there) *(uint2*)to = make_uint2(pack_16_bit(x.x * by, x.y * by), pack_16_bit(x.z * by, x.w * by));
  };

  for (int unit = tid; unit < GROUP * HEAD / 4; unit += 32 * WARPS) {
    const int h = unit / (HEAD / 4), column = unit % (HEAD / 4) * 4;
    float2 both = make_float2(-INFINITY_, 0.0f);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) both.x = fmaxf(both.x, of_warps[w][h].x);
    float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float by = weight(of_warps[w][h].x, both.x);
      both.y += by * of_warps[w][h].y;
      add(x, by, *(const float4*)((const float*)(smem + w * (STAGES * STAGE)) + h * PART + column));
    }
    if (CLUSTER == 1) {
      write(h, column, both, x);
    } else {
      const int to = unit * 4 / SLICE;
      send(in_program(smem_of(&received[rank][unit * 4 % SLICE]), to), x);
      if (column / 4 < CLUSTER) send(in_program(smem_of(&received_of[rank][h]), column / 4), both);
    }
  }
  if (CLUSTER > 1) {
    cluster_arrive();
    cluster_wait();
    for (int unit = tid; unit < SLICE / 4; unit += 32 * WARPS) {
      const int h = (rank * SLICE + unit * 4) / HEAD, column = (rank * SLICE + unit * 4) % HEAD;
      float2 both = make_float2(-INFINITY_, 0.0f);
#pragma unroll
      for (int r = 0; r < CLUSTER; ++r) both.x = fmaxf(both.x, received_of[r][h].x);
      float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int r = 0; r < CLUSTER; ++r) {
        const float by = weight(received_of[r][h].x, both.x);
        both.y += by * received_of[r][h].y;
        add(x, by, *(const float4*)&received[r][unit * 4]);
      }
      write(h, column, both, x);
    }
  }

  // ---- tokens of no sequence
  if (rank == 0)
    for (int other = cu[num_seqs] + seq; other < num_tokens; other += num_seqs)
      for (int unit = tid; unit < GROUP * HEAD / 4; unit += 32 * WARPS)
        *(uint2*)(out + ((long long)other * HEADS + head) * (GROUP * HEAD) + unit * 4) = make_uint2(0, 0);
}
