// Attention of 16 query rows (query, head) against a stretch of one sequence's latents in 8 bits, for sm_90a.
// latent_rows.py compiles it, behind hopper.cuh, latent_rows.cuh, a format and items.cuh.
//
// All heads share a stored row: LATENT + ROTARY codes are the key, the first LATENT codes are the value.
// Each of the four warps owns a quarter of the columns, for scores as for outputs. So a warp keeps its part of
// the queries in registers, and every code crosses shared memory once in each direction and product.
// Scores of the warps are added in shared memory, where eight threads take a row each.
// - Queries are divided by their row's largest magnitude, so float16 holds them.
// - A code times FACTOR, less BIAS, is its number. FACTOR enters the scores with the softmax scale, BIAS as sums
//   of the queries and of the probabilities.
// - A token's scale multiplies its scores and its probabilities. Probabilities are divided by the largest scale
//   so far, and stay below 2^15.

using Code = FORMAT_K::Code;
constexpr float BIAS = Code::BIAS, FACTOR = Code::FACTOR;

constexpr int PITCH = WIDTH + 16;      // bytes of a row in shared memory: eight rows have different banks
constexpr int SCORES = TILE + 8;       // floats of a row of scores
constexpr int PROBABILITIES = TILE + 8;  // halves of a row of probabilities
constexpr int THIRTIES = TILE / 32;
constexpr int STEPS = 9;               // of 16 columns in a warp's part: eight of the latent, one of the rotary part
constexpr float LOWEST = -1.0e30f;
constexpr float HEADROOM = 32768.0f;
constexpr float SMALL = 7.888609052210118e-31f;  // 2^-100: least reference for scales

// Dynamic shared memory: tiles, their scales, scores of four warps, probabilities.
constexpr int OFF_SCALES = STAGES * TILE * PITCH;
constexpr int OFF_SCORES = OFF_SCALES + STAGES * TILE * 4;
constexpr int OFF_P = OFF_SCORES + WARPS * ROWS * SCORES * 4;
static_assert(OFF_P + ROWS * PROBABILITIES * 2 == SHARED_BYTES, "latent_rows.py counts as this file does");

__device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void unpack_half(float& lo, float& hi, u32 word) {
  asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }" : "=f"(lo), "=f"(hi) : "r"(word));
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
__device__ __forceinline__ float over_eight(float x, bool largest) {  // of eight neighbouring lanes
#pragma unroll
  for (int k = 1; k < 8; k <<= 1) {
    const float y = __shfl_xor_sync(~0u, x, k);
    x = largest ? fmaxf(x, y) : x + y;
  }
  return x;
}

// Copies of tiles, in order. Four threads copy a token's codes, 64 bytes side by side at a time. Page ids are
// read one tile ahead.
struct Copies {
  const int* table;
  const u8 *codes, *scales;
  u32 page_bytes, tiles;
  int at, end, index = 0;
  int ids[THIRTIES], scale_id;

  __device__ __forceinline__ Copies(const Work& w, const int* table_, const u8* codes_, const u8* scales_, u32 page_bytes_, u32 tiles_)
      : table(table_), codes(codes_), scales(scales_), page_bytes(page_bytes_), tiles(tiles_), at(w.begin), end(w.end) { read_ids(); }
  __device__ __forceinline__ int id_of(int token) const { return token < end ? __ldg(table + token / PAGE) : 0; }
  __device__ __forceinline__ void read_ids() {
    const int tid = threadIdx.x;
#pragma unroll
    for (int h = 0; h < THIRTIES; ++h) ids[h] = id_of(at + 32 * h + tid / 4);
    if (SCALED_K && tid < TILE) scale_id = id_of(at + tid);
  }
  __device__ __forceinline__ void next() {
    if (at < end) {
      const int tid = threadIdx.x;
#pragma unroll
      for (int h = 0; h < THIRTIES; ++h) {
        const int token = 32 * h + tid / 4;
        const bool there = at + token < end;
        const u8* from = row_of(codes, ids[h], page_bytes) + (at + token) % PAGE * WIDTH + tid % 4 * 16;
        const u32 to = tiles + (index * TILE + token) * PITCH + tid % 4 * 16;
#pragma unroll
        for (int i = 0; i < WIDTH / 64; ++i) copy16(to + 64 * i, from + 64 * i, there);
      }
      if (SCALED_K && tid < TILE)
        copy_small<4>(tiles + OFF_SCALES + (index * TILE + tid) * 4, row_of(scales, scale_id, page_bytes) + (at + tid) % PAGE * 4, at + tid < end);
      at += TILE;
      read_ids();
    }
    index = index + 1 == STAGES ? 0 : index + 1;
    commit();
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, PROGRAMS)
latent_rows(const u16* q_ptr, long long q_token, long long q_head, const u8* __restrict__ codes, const u8* __restrict__ scales,
            const float* outer, void* out, float* partial, float* partial_lse,
            const int* cu, const int* lens, const int* __restrict__ page_table, long long max_pages, int num_seqs,
            float softmax_scale, int target, int least, int page_bytes) {
  extern __shared__ __align__(1024) u8 smem[];
  __shared__ int scratch[32];
  __shared__ float of_warps[WARPS][ROWS], of_rows[ROWS];
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const Item it = find_item(blockIdx.x, cu, lens, num_seqs, 0, 1, target, least, scratch);
  if (it.seq < 0) return;
  const Work w = work_of(it, cu, lens, 1, 0);
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
  const u32 tiles = smem_of(smem);
  float* const scores = (float*)(smem + OFF_SCORES);

  Copies copies(w, page_table + w.seq * max_pages, codes, scales, page_bytes, tiles);
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) copies.next();

  // ---- queries: rows g and g + 8; four columns of each step, in the order in which codes are paired
  u32 q[STEPS][4];
  float largest[2] = {0.0f, 0.0f}, bias[2] = {0.0f, 0.0f};
  const float sign = softmax_scale < 0.0f ? -1.0f : 1.0f;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = w.block * ROWS + g + 8 * h, query = r / GROUP;
    const bool there = query < w.num_queries;
    const u16* from = q_ptr + (long long)(w.first_token + query) * q_token + (long long)(r % GROUP) * q_head + 4 * t;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const int column = s < 8 ? 128 * warp + 16 * s : LATENT + 16 * warp;
      const uint2 x = there ? *(const uint2*)(from + column) : make_uint2(0, 0);
      q[s][h] = x.x;
      q[s][2 + h] = x.y;
      float a, b, c, d;
      unpack_16_bit(a, b, x.x);
      unpack_16_bit(c, d, x.y);
      largest[h] = fmaxf(largest[h], fmaxf(fmaxf(fabsf(a), fabsf(b)), fmaxf(fabsf(c), fabsf(d))));
    }
    largest[h] = fmaxf(largest[h], __shfl_xor_sync(~0u, largest[h], 1));
    largest[h] = fmaxf(largest[h], __shfl_xor_sync(~0u, largest[h], 2));
    if (t == 0) of_warps[warp][g + 8 * h] = largest[h];
  }
  __syncthreads();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = g + 8 * h;
    const float norm = fmaxf(fmaxf(fmaxf(of_warps[0][r], of_warps[1][r]), fmaxf(of_warps[2][r], of_warps[3][r])), 1.0e-30f);
    const float by = sign / norm;
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
#pragma unroll
      for (int k = h; k < 4; k += 2) {
        float a, b;
        unpack_16_bit(a, b, q[s][k]);
        q[s][k] = pack(a * by, b * by);
        if (BIAS > 0.0f) {
          unpack_half(a, b, q[s][k]);
          bias[h] -= a + b;
        }
      }
    if (BIAS > 0.0f) {
      bias[h] += __shfl_xor_sync(~0u, bias[h], 1);
      bias[h] += __shfl_xor_sync(~0u, bias[h], 2);
      bias[h] *= BIAS / FACTOR;
    }
  }

  // ---- this thread's part of the softmax: eight threads a row, four tokens of every 32 each
  const int row = tid >> 3, sub = tid & 7;
  const int query = (w.block * ROWS + row) / GROUP;
  int low, high;
  bounds_of(w.bounds, row, low, high);
  const float norm = fmaxf(fmaxf(fmaxf(of_warps[0][row], of_warps[1][row]), fmaxf(of_warps[2][row], of_warps[3][row])), 1.0e-30f);
  float factor = norm * fabsf(softmax_scale) * (FACTOR * LOG2E);
  const float outside = outer ? *outer : 1.0f;
  factor *= outside;
  float top = LOWEST, den = 0.0f, zeros = 0.0f, reference = SMALL;

  float even[8][4] = {}, odd[8][4] = {};  // outputs: even and odd columns of each 16
  int index = 0;
  for (int i = 0; i < w.num_tiles; ++i) {
    wait<STAGES - 2>();
    __syncthreads();  // this tile is there, and the one before is read
    copies.next();
    const u32 tile = tiles + (index * TILE + lane) * PITCH;
    {
      float x[TILE / 8][4];
#pragma unroll
      for (int n = 0; n < TILE / 8; ++n)
#pragma unroll
        for (int k = 0; k < 4; ++k) x[n][k] = bias[k >> 1];
#pragma unroll
      for (int s = 0; s < STEPS; ++s)
#pragma unroll
        for (int h = 0; h < THIRTIES; ++h) {
          u32 word[4], a, b;
          ldsm(word, tile + 32 * h * PITCH + (s < 8 ? 128 * warp + 16 * s : LATENT + 16 * warp));
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            Code::pairs(word[m], a, b);
            multiply(x[4 * h + m], q[s], a, b);
          }
        }
      float* to = scores + (warp * ROWS + g) * SCORES + 2 * t;
#pragma unroll
      for (int n = 0; n < TILE / 8; ++n) {
        *(float2*)(to + 8 * n) = make_float2(x[n][0], x[n][1]);
        *(float2*)(to + 8 * SCORES + 8 * n) = make_float2(x[n][2], x[n][3]);
      }
    }
    __syncthreads();
    {
      const int at = w.begin + i * TILE + 4 * sub;
      const bool masked = w.begin + (i + 1) * TILE > min(w.whole, w.end);
      const int seen = min(high, w.end);
      float x[THIRTIES][4], scale[THIRTIES][4];
      float most = LOWEST, strongest = SMALL;
#pragma unroll
      for (int h = 0; h < THIRTIES; ++h) {
        float4 sum = *(const float4*)(scores + row * SCORES + 32 * h + 4 * sub);
#pragma unroll
        for (int k = 1; k < WARPS; ++k) {
          const float4 part = *(const float4*)(scores + (k * ROWS + row) * SCORES + 32 * h + 4 * sub);
          sum.x += part.x; sum.y += part.y; sum.z += part.z; sum.w += part.w;
        }
        x[h][0] = sum.x; x[h][1] = sum.y; x[h][2] = sum.z; x[h][3] = sum.w;
        if (SCALED_K) {
          const float4 of = *(const float4*)(smem + OFF_SCALES + (index * TILE + 32 * h + 4 * sub) * 4);
          scale[h][0] = of.x; scale[h][1] = of.y; scale[h][2] = of.z; scale[h][3] = of.w;
        }
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (SCALED_K) {
            x[h][e] *= scale[h][e];
            strongest = fmaxf(strongest, scale[h][e]);
          }
        if (masked)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if (at + 32 * h + e >= seen) x[h][e] = LOWEST;
#pragma unroll
        for (int e = 0; e < 4; ++e) most = fmaxf(most, x[h][e]);
      }
      const float new_top = fmaxf(top, over_eight(most, true));
      const float level = new_top * factor;
      float fade = ex2((top - new_top) * factor), sum = 0.0f, by = 1.0f;
      if (SCALED_K) strongest = fmaxf(reference, over_eight(strongest, true)), by = HEADROOM / strongest;
      u32 packed[THIRTIES][2];
#pragma unroll
      for (int h = 0; h < THIRTIES; ++h) {
        float p[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          p[e] = ex2(x[h][e] * factor - level);
        }
        if (masked)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if (at + 32 * h + e >= seen) p[e] = 0.0f, scale[h][e] = 0.0f;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          sum += p[e];
          if (SCALED_K) p[e] *= scale[h][e] * by;
        }
        packed[h][0] = pack(p[0], p[1]);
        packed[h][1] = pack(p[2], p[3]);
      }
      den = den * fade + sum;
      if (SCALED_K) fade *= reference / strongest, reference = strongest;
      if (BIAS > 0.0f) {
        zeros *= fade;
#pragma unroll
        for (int h = 0; h < THIRTIES; ++h)
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            float a, b;
            unpack_half(a, b, packed[h][k]);
            zeros += a + b;
          }
      }
      top = new_top;
#pragma unroll
      for (int h = 0; h < THIRTIES; ++h)
        *(uint2*)(smem + OFF_P + (row * PROBABILITIES + 32 * h + 4 * sub) * 2) = make_uint2(packed[h][0], packed[h][1]);
      if (sub == 0) of_rows[row] = fade;
    }
    __syncthreads();
    {
      const float fades[2] = {of_rows[g], of_rows[g + 8]};
      if (__any_sync(~0u, fades[0] != 1.0f || fades[1] != 1.0f))
#pragma unroll
        for (int c = 0; c < 8; ++c)
#pragma unroll
          for (int k = 0; k < 4; ++k) even[c][k] *= fades[k >> 1], odd[c][k] *= fades[k >> 1];
      const u32 from = tiles + OFF_P + (((lane & 8) + (lane & 7)) * PROBABILITIES + (lane >> 4) * 8) * 2;
#pragma unroll
      for (int h = 0; h < THIRTIES; ++h) {
        u32 p[2][4];
        ldsm(p[0], from + 32 * h * 2);
        ldsm(p[1], from + (32 * h + 16) * 2);
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          u32 word[4], a[4], b[4];
          ldsm_t(word, tile + 32 * h * PITCH + 128 * warp + 16 * c);
#pragma unroll
          for (int m = 0; m < 4; ++m) Code::split(word[m], a[m], b[m]);
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            multiply(even[c], p[k], a[2 * k], a[2 * k + 1]);
            multiply(odd[c], p[k], b[2 * k], b[2 * k + 1]);
          }
        }
      }
    }
    index = index + 1 == STAGES ? 0 : index + 1;
  }
  __syncthreads();  // factors of the last tile are read

  den = over_eight(den, false);
  if (BIAS > 0.0f) zeros = over_eight(zeros, false);
  const bool direct = w.splits == 1;
  if (sub == 0) {
    float value = den > 0.0f ? 1.0f / den : 0.0f * den;  // NaN stays NaN
    if (SCALED_K) value *= reference / HEADROOM;
    of_rows[row] = value * outside * FACTOR;
    if (BIAS > 0.0f) of_warps[0][row] = zeros * (BIAS / FACTOR);
    if (!direct && query < w.num_queries)
      partial_lse[(long long)w.item * ROWS + row] = den > 0.0f ? top * factor + lg2(den) : den != den ? den : -INFINITY_;
  }
  __syncthreads();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = w.block * ROWS + g + 8 * h, at = r / GROUP;
    if (at >= w.num_queries) continue;
    const float value = of_rows[g + 8 * h], zero = BIAS > 0.0f ? of_warps[0][g + 8 * h] : 0.0f;
    u16* const to = (u16*)out + ((long long)(w.first_token + at) * GROUP + r % GROUP) * LATENT + 128 * warp + 4 * t;
    float* const part = partial + ((long long)w.item * ROWS + g + 8 * h) * LATENT + 128 * warp + 4 * t;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const float y[4] = {(even[c][2 * h] - zero) * value, (odd[c][2 * h] - zero) * value, (even[c][2 * h + 1] - zero) * value,
                          (odd[c][2 * h + 1] - zero) * value};
      if (direct) *(uint2*)(to + 16 * c) = make_uint2(pack_16_bit(y[0], y[1]), pack_16_bit(y[2], y[3]));
      else *(float4*)(part + 16 * c) = make_float4(y[0], y[1], y[2], y[3]);
    }
  }
}
