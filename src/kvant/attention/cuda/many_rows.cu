// Attention of 64 query rows (query, head of the group) against a stretch of one sequence's pages, for
// sm_90a. many_rows.py compiles it, behind hopper.cuh, codes.cuh and items.cuh, and says what the arguments are.
//
// Everything is computed transposed, so that what must be converted is the register operand of wgmma
// and never goes back to shared memory:
//   scores  [tokens x rows]  = K   [tokens x head] (registers) * Q^T [head x rows]   (shared, made once)
//   outputs [head x rows]   += V^T [head x tokens] (registers) * P   [tokens x rows] (shared, float16)
// A program is two warpgroups, and two programs share a multiprocessor:
// - the scorers convert keys, multiply, and write probabilities P of one tile after the other into two panels;
// - the outputs' warpgroup copies pages, converts values and multiplies them by P.
// They meet at two barriers a panel: FULL (P is written) and FREE (P is read). Copies count themselves in
// where they arrive. A tile's space is copied over when the scorers are behind FULL of that tile.
// - A row's maximum would need all warps for every tile. Probabilities are taken against the maximum
//   of an earlier tile instead, 2^-7 of float16's range below its top; only if one exceeds 2^15 (or is
//   NaN) is the tile done again against a new maximum, and the outputs shrink by what FULL brings along.
// - Scales of a token multiply its scores and its probabilities. Queries carry the softmax scale, the outer
//   key scale and log2(e). If one exceeds float16's comfort, all rows of the program are divided by one
//   power of two, `unit`.

using KeyFormat = FORMAT_K;
using ValueFormat = FORMAT_V;

constexpr int HALF = 128;  // threads of a warpgroup
constexpr float LOWEST = -1.0e30f;
constexpr float SHIFT = 7.0f;       // log2 of what the largest probability is stored as
constexpr u32 LIMIT = 0x78007800u;  // 2^15 twice, as float16: above it the maximum is renewed
constexpr float SMALL = 7.888609052210118e-31f;  // 2^-100: least reference for value scales

constexpr int SCORERS = 1, OUTPUTS = 2, FULL = 3, FREE = 5;  // barriers; FULL + 1, FREE + 1 are for odd tiles
constexpr int PAGES = PAGE < TILE ? TILE / PAGE : 1;         // of a tile
constexpr int AHEAD = 2 * STAGES;                            // tiles whose page ids are kept

// Dynamic shared memory, from a multiple of 1024: Q, P twice, tiles. The output, while it is turned, lies
// where P and tiles lay.
constexpr int Q_BYTES = ROWS * HEAD * 2;
constexpr int P_BYTES = TILE * ROWS * 2;
constexpr int PITCH = 132;  // floats of a row of the output while it is turned

struct Shared {
  u64 arrived[STAGES];       // counters of copies, of each tile's space
  int renewed[2];            // of each panel: whether the maxima were renewed,
  u32 pages[AHEAD][PAGES];   // (page ids of tiles, in turn)
  float ratio[2];            // what value scales were divided by, over what they are divided by now,
  float fades[2][ROWS];      // and what sums against the old maxima are multiplied with
  int2 seen[ROWS];           // keys that each row sees: from, to
  float level[ROWS];         // log2 of what probabilities of each row are divided by
  float columns[4][ROWS];    // of each of the scorers' warps: maxima of a tile, and at the end sums
  float largest[4];
  int scratch[32];
};
constexpr int ARRIVED = 0, RENEWED = 8 * STAGES, PAGE_IDS = RENEWED + 8;  // where these begin

template <int N> __device__ __forceinline__ void load_16_bit(float (&x)[N], const uint4* from, bool there) {
#pragma unroll
  for (int i = 0; i < N / 8; ++i) {
    const uint4 w = there ? from[i] : uint4{0, 0, 0, 0};
    const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) unpack_16_bit(x[8 * i + 2 * j], x[8 * i + 2 * j + 1], words[j]);
  }
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

// Queries to shared memory as the product's second operand. Returns `unit`. from: of this thread's row and half.
__device__ __forceinline__ float write_queries(u8* to, Shared& shared, const Work& w, const u16* from, bool there, float factor) {
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, row = tid >> 1, half = tid & 1;
  float x[64];
  load_16_bit(x, (const uint4*)from, there);
  if (half == 0) {
    int lo, hi;
    bounds_of(w.bounds, row, lo, hi);
    shared.seen[row] = make_int2(max(lo, w.visible), min(hi, w.end));
    shared.level[row] = there ? LOWEST : 0.0f;  // a padding row scores 0: no reason to renew maxima
  }
  if (ROTATE_K) { hadamard<ROTATE_K ? ROTATE_K : 2>(x, half); factor *= 1.0f / (ROTATE_K ? ROTATE_K : 1); }
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < 64; ++i) { x[i] *= factor; const float a = fabsf(x[i]); if (a < 3.0e38f) most = fmaxf(most, a); }
  for (int s = 16; s; s >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, s));
  if (lane == 0) shared.largest[warp] = most;
  meet(SCORERS, HALF);
  most = fmaxf(fmaxf(shared.largest[0], shared.largest[1]), fmaxf(shared.largest[2], shared.largest[3]));
  const float unit = most > 8192.0f ? exp2f(ceilf(log2f(most * (1.0f / 8192.0f)))) : 1.0f;
  const float inverse = 1.0f / unit;
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int p0 = KeyFormat::place(i), p1 = KeyFormat::place(64 + i);
    const int a0 = (p0 / 64) * 8192 + row * 128 + ((((p0 % 64) / 8) ^ (row & 7)) * 16) + (p0 % 8) * 2;
    const int a1 = (p1 / 64) * 8192 + row * 128 + ((((p1 % 64) / 8) ^ (row & 7)) * 16) + (p1 % 8) * 2;
    *(u16*)(to + (half ? a1 : a0)) = half_of(x[i] * inverse);
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  meet(SCORERS, HALF);
  return unit;
}

// scores (+)= keys of half the head * queries, not waited for
template <int HALF_> __device__ __forceinline__ void multiply_keys(float (&s)[32], const Keys& a, u64 queries) {
  mma_fence();
#pragma unroll
  for (int c = 0; c < 4; ++c)
    mma<0>(s, a.chunk[c][0], a.chunk[c][1], a.chunk[c][2], a.chunk[c][3], queries + HALF_ * 512 + c * 2, HALF_ + c > 0);
  mma_commit();
}

// The scorers' part: probabilities of all tiles. den: sums of this thread's, of each of its 16 rows;
// reference: what value scales were divided by. Rows of a thread: 8 (c / 2) + 2 t + c % 2.
__device__ __forceinline__ void score_tiles(Shared& shared, u32 control, const Work& w, u32 sq, u32 sp, u32 tiles, float unit, float (&den)[16], float& reference) {
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
  const int mine = 16 * warp + g;  // first of this thread's two tokens; the other is 8 on
  const u64 queries = descriptor(sq);
  const u32 at_k = keys_at(warp, lane);
  const u32 to_p = sp + (2 * warp + (lane >> 3 & 1)) * 1024 + (lane & 7) * 128 + (((lane >> 4) ^ (lane & 7)) * 16);
  float s[32], level[16], over_reference = 1.0f / SMALL;
  reference = SMALL;
#pragma unroll
  for (int i = 0; i < 32; ++i) s[i] = 0.0f;
#pragma unroll
  for (int c = 0; c < 16; ++c) { den[c] = 0.0f; level[c] = LOWEST; }
  if (!w.num_tiles) return;
  Keys first, second;  // halves of the head
  Turn turn;
  u32 tile = tiles;
  wait_for(control + ARRIVED, 0);
  KeyFormat::read_keys<0>(first, tile, at_k, mine, t);
  for (int i = 0; i < w.num_tiles; ++i) {
    // ---- scores, while this tile's second half and the next one's first half are converted
    multiply_keys<0>(s, first, queries);
    KeyFormat::read_keys<1>(second, tile, at_k, mine, t);
    here(second);
    multiply_keys<1>(s, second, queries);
    float ks0 = unit, ks1 = unit, vs0 = 1.0f, vs1 = 1.0f;
    if (SCALED_K) {
      ks0 *= KeyFormat::scale_of(KeyFormat::word_at(tile + OFF_SK, mine));
      ks1 *= KeyFormat::scale_of(KeyFormat::word_at(tile + OFF_SK, mine + 8));
    }
    if (SCALED_V) {
      vs0 = ValueFormat::scale_of(ValueFormat::word_at(tile + OFF_SV, mine));
      vs1 = ValueFormat::scale_of(ValueFormat::word_at(tile + OFF_SV, mine + 8));
    }
    turn.next();
    const u32 after = tiles + turn.index * STAGE;
    if (i + 1 < w.num_tiles) wait_for(control + ARRIVED + 8 * turn.index, turn.parity);
    mma_wait<1>();
    KeyFormat::read_keys<0>(first, after, at_k, mine, t);  // behind the last tile the result is not used
    here(first);
    const u32 odd = i & 1;
    meet(FREE + odd, THREADS);
    mma_wait<0>();
    settle(s);

    // ---- probabilities, in place of the scores
    const int pos0 = w.begin + i * TILE + mine, pos1 = pos0 + 8;
    u32 over;
    auto weigh = [&](bool masked) {
      over = 0;
      const float w0 = vs0 * over_reference, w1 = vs1 * over_reference;
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        u32 h[4];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const int c = 2 * (j + k);
          float* const x = s + 2 * c;
          x[0] = fmaf(x[0], ks0, -level[c]); x[1] = fmaf(x[1], ks0, -level[c + 1]);
          x[2] = fmaf(x[2], ks1, -level[c]); x[3] = fmaf(x[3], ks1, -level[c + 1]);
          if (masked) {
            const int2 a = shared.seen[8 * (j + k) + 2 * t], b = shared.seen[8 * (j + k) + 2 * t + 1];
            if ((pos0 < a.x) | (pos0 >= a.y)) x[0] = -INFINITY_;
            if ((pos0 < b.x) | (pos0 >= b.y)) x[1] = -INFINITY_;
            if ((pos1 < a.x) | (pos1 >= a.y)) x[2] = -INFINITY_;
            if ((pos1 < b.x) | (pos1 >= b.y)) x[3] = -INFINITY_;
          }
#pragma unroll
          for (int e = 0; e < 4; ++e) x[e] = ex2(x[e]);
          h[2 * k] = SCALED_V ? pack(x[0] * w0, x[1] * w0) : pack(x[0], x[1]);
          h[2 * k + 1] = SCALED_V ? pack(x[2] * w1, x[3] * w1) : pack(x[2], x[3]);
        }
        over = hmax2_nan(over, hmax2_nan(hmax2_nan(h[0], h[1]), hmax2_nan(h[2], h[3])));
        stsm((to_p + odd * P_BYTES) ^ (j * 16), h[0], h[1], h[2], h[3]);
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    };
    const bool masked = w.begin + (i + 1) * TILE > min(w.whole, w.end);
    if (masked) weigh(true); else weigh(false);

    // ---- a score was larger than the reference covers: once more, against another one
    const bool renew = any_of(SCORERS, HALF, !at_most(over, LIMIT));
    if (renew) {
      KeyFormat::read_keys<0>(first, tile, at_k, mine, t);
      multiply_keys<0>(s, first, queries);
      KeyFormat::read_keys<1>(second, tile, at_k, mine, t);
      multiply_keys<1>(s, second, queries);
      mma_wait<0>();
      settle(s);
      if (SCALED_V) {
        float most = fmaxf(vs0, vs1);
        for (int k = 4; k < 32; k <<= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, k));
        if (lane == 0) shared.largest[warp] = most;
      }
#pragma unroll
      for (int c = 0; c < 16; ++c) {
        const int row = 8 * (c >> 1) + 2 * t + (c & 1), at = 4 * (c >> 1) + (c & 1);
        const int2 range = shared.seen[row];
        const float a = (pos0 < range.x) | (pos0 >= range.y) ? -INFINITY_ : s[at] * ks0;
        const float b = (pos1 < range.x) | (pos1 >= range.y) ? -INFINITY_ : s[at + 2] * ks1;
        float y = fmaxf(a, b);
        for (int k = 4; k < 32; k <<= 1) y = fmaxf(y, __shfl_xor_sync(~0u, y, k));
        if (g == 0) shared.columns[warp][row] = y;
      }
      meet(SCORERS, HALF);
      if (tid < ROWS) {
        float y = shared.columns[0][tid];
#pragma unroll
        for (int k = 1; k < 4; ++k) y = fmaxf(y, shared.columns[k][tid]);
        const float old = shared.level[tid], renewed = fmaxf(old, y - SHIFT);
        shared.fades[odd][tid] = ex2(old - renewed);
        shared.level[tid] = renewed;
      }
      float renewed = reference;
      if (SCALED_V)
#pragma unroll
        for (int k = 0; k < 4; ++k) renewed = fmaxf(renewed, shared.largest[k]);
      if (tid == 0) shared.ratio[odd] = reference / renewed;
      reference = renewed;
      over_reference = 1.0f / renewed;
      meet(SCORERS, HALF);
#pragma unroll
      for (int c = 0; c < 16; ++c) {
        const int row = 8 * (c >> 1) + 2 * t + (c & 1);
        den[c] *= shared.fades[odd][row];
        level[c] = shared.level[row];
      }
      if (masked) weigh(true); else weigh(false);
      KeyFormat::read_keys<0>(first, after, at_k, mine, t);
    }
    if (tid == 0) sts_u(control + RENEWED + 4 * odd, renew);
    pass(FULL + odd, THREADS);
#pragma unroll
    for (int c = 0; c < 16; ++c) den[c] += s[4 * (c >> 1) + (c & 1)] + s[4 * (c >> 1) + 2 + (c & 1)];
    tile = after;
  }
}

// Copies of pages, by the outputs' warpgroup: every thread its pieces of each tile.
struct Copies {
  static constexpr int PER_K = BYTES_K / 16, PASS_K = HALF / PER_K, N_K = TILE / PASS_K;
  static constexpr int PER_V = BYTES_V / 16, PASS_V = HALF / PER_V, N_V = TILE / PASS_V;
  static constexpr bool SAME = BYTES_K == BYTES_V;
  const Work& w;
  u32 control;
  const int* table;
  const u8 *k, *v, *scales;      // of this thread's piece of a row, in page 0
  int row_k, row_v, row_s;
  u32 page_bytes;        // from a page to the next one
  u32 to_k, to_v, to_s;  // in a tile's space
  bool of_keys;          // whose scales are this thread's

  __device__ __forceinline__ Copies(const Work& work, u32 at, const int* pages, const u8* k_codes, const u8* k_scales, const u8* v_codes, const u8* v_scales, u32 stride)
      : w(work), control(at), table(pages), page_bytes(stride) {
    const int tid = threadIdx.x % HALF;
    of_keys = tid < TILE;
    row_k = tid / PER_K; row_v = tid / PER_V; row_s = tid % TILE;
    k = k_codes + w.head * BYTES_K + (tid % PER_K) * 16;
    v = v_codes + w.head * BYTES_V + (tid % PER_V) * 16;
    scales = of_keys ? k_scales + w.head * PAGE_SB_K : v_scales + w.head * PAGE_SB_V;
    to_k = mixed<BYTES_K>(row_k, tid % PER_K);
    to_v = OFF_V + mixed<BYTES_V>(row_v, tid % PER_V);
    to_s = of_keys ? OFF_SK + row_s * SB_K : OFF_SV + row_s * SB_V;
  }
  // Page ids of tile j come with the copies that this thread issues next.
  __device__ __forceinline__ void look_up(int j) const {
    const int tid = threadIdx.x % HALF, at = w.begin + j * TILE + tid * PAGE;
    if (tid < PAGES)
      copy_small<4>(control + PAGE_IDS + (j % AHEAD * PAGES + tid) * 4, table + (at < w.end ? (u32)at / PAGE : 0), at < w.end);
  }
  // WHOLE: all of its keys exist and are seen by some row; others become zeros.
  template <bool WHOLE> __device__ __forceinline__ void fetch_some(int j, u32 tile) const {
    const int at = w.begin + j * TILE;
    const u32 ids = control + PAGE_IDS + j % AHEAD * PAGES * 4;
    auto page_of = [&](int row) { return lds_u(ids + (PAGES == 1 ? 0 : row / PAGE * 4)); };
    auto offset = [&](int row) { return PAGE <= TILE ? (u32)row % PAGE : (u32)at % PAGE + row; };
    auto there = [&](int row) { return WHOLE || (unsigned)(at + row - w.visible) < (unsigned)(w.end - w.visible); };
    u32 page_k[N_K], page_v[N_V], page_s;
#pragma unroll
    for (int r = 0; r < N_K; ++r) page_k[r] = page_of(row_k + r * PASS_K);
#pragma unroll
    for (int r = 0; r < N_V; ++r) page_v[r] = SAME ? page_k[SAME ? r : 0] : page_of(row_v + r * PASS_V);
    if (SB_K || SB_V) page_s = page_of(row_s);
#pragma unroll
    for (int r = 0; r < N_K; ++r) {
      const int row = row_k + r * PASS_K;
      copy16(tile + to_k + r * PASS_K * BYTES_K, row_of(k + offset(row) * (HEADS * BYTES_K), page_k[r], page_bytes), there(row));
    }
#pragma unroll
    for (int r = 0; r < N_V; ++r) {
      const int row = row_v + r * PASS_V;
      copy16(tile + to_v + r * PASS_V * BYTES_V, row_of(v + offset(row) * (HEADS * BYTES_V), page_v[r], page_bytes), there(row));
    }
    if (SB_K || SB_V) {
      const u32 bytes = of_keys ? PAGE_SB_K : PAGE_SB_V;
      const u8* from = row_of(scales + offset(row_s) * (HEADS * bytes), page_s, page_bytes);
      if (PAGE_SB_K == 2 || PAGE_SB_V == 2) from = (const u8*)((u64)from & ~3ull);
      if (SB_K && of_keys) copy_small<SB_K ? SB_K : 4>(tile + to_s, from, there(row_s));
      if (SB_V && !of_keys) copy_small<SB_V ? SB_V : 4>(tile + to_s, from, there(row_s));
    }
  }
  // Tile j to `tile`; `counter` counts this thread when it is there.
  __device__ __forceinline__ void fetch(int j, u32 tile, u32 counter) const {
    const int at = w.begin + j * TILE;
    if (at >= w.visible && at + TILE <= w.end) fetch_some<true>(j, tile);
    else fetch_some<false>(j, tile);
    arrive_with_copies(counter);
  }
  __device__ __forceinline__ void begin(u32 tiles) const {
    for (int j = 0; j < AHEAD; ++j) look_up(j);
    asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory");
    meet(OUTPUTS, HALF);
#pragma unroll
    for (int j = 0; j < STAGES; ++j)
      if (j < w.num_tiles) fetch(j, tiles + j * STAGE, control + ARRIVED + 8 * j);
  }
};

// The other warpgroup's part: o0, o1 [64 dimensions x 64 rows] of values times probabilities of all tiles.
__device__ __forceinline__ void sum_outputs(Shared& shared, u32 control, const Work& w, const Copies& copies, u32 sp, u32 tiles, float (&o0)[32], float (&o1)[32]) {
  const int tid = threadIdx.x % HALF, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int i = 0; i < 32; ++i) o0[i] = o1[i] = 0.0f;
  copies.begin(tiles);
  const u32 at_v = values_at(warp, lane);
  const u64 panel = descriptor(sp);
  if (w.num_tiles > 0) pass(FREE, THREADS);
  if (w.num_tiles > 1) pass(FREE + 1, THREADS);
  Turn turn;
  for (int i = 0; i < w.num_tiles; ++i) {
    const u32 tile = tiles + turn.index * STAGE, counter = control + ARRIVED + 8 * turn.index, odd = i & 1;
    wait_for(counter, turn.parity);
    turn.next();
    Values a;
    ValueFormat::read_values(a, tile, at_v, warp, g, t);
    here(a);
    meet(FULL + odd, THREADS);
    if (lds_u(control + RENEWED + 4 * odd)) {
      const float ratio = shared.ratio[odd];
#pragma unroll
      for (int c = 0; c < 16; ++c) {
        const float fade = shared.fades[odd][8 * (c >> 1) + 2 * t + (c & 1)] * ratio;
        const int at = 4 * (c >> 1) + (c & 1);
        o0[at] *= fade; o0[at + 2] *= fade;
        o1[at] *= fade; o1[at + 2] *= fade;
      }
    }
    mma_fence();
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const u64 p = panel + odd * (P_BYTES / 16) + c * 128;
      mma<1>(o0, a.chunk[c][0], a.chunk[c][1], a.chunk[c][2], a.chunk[c][3], p, 1);
      mma<1>(o1, a.chunk[c][4], a.chunk[c][5], a.chunk[c][6], a.chunk[c][7], p, 1);
    }
    mma_commit();
    if (i + STAGES < w.num_tiles) { copies.look_up(i + AHEAD); copies.fetch(i + STAGES, tile, counter); }
    mma_wait<0>();
    settle(o0);
    settle(o1);
    if (i + 2 < w.num_tiles) pass(FREE + odd, THREADS);
  }
}

// Outputs of a thread to turned [row, PITCH].
__device__ __forceinline__ void turn_outputs(float* turned, const float (&o0)[32], const float (&o1)[32]) {
  const int tid = threadIdx.x % HALF, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int c = 0; c < 16; ++c) {
    const int row = 8 * (c >> 1) + 2 * t + (c & 1), at = 4 * (c >> 1) + (c & 1);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float a = o0[at + 2 * h], b = o1[at + 2 * h];
      if (BYTES_V != 64) {
        const int d = BYTES_V == 128 ? 2 * (16 * warp + g + 8 * h) : 8 * (g + 8 * h) + 2 * warp;
        *(float2*)(turned + row * PITCH + d) = make_float2(a, b);
      } else {
        const int d = 4 * (16 * (warp & 1) + g + 8 * h) + (warp >> 1);
        turned[row * PITCH + d] = a;
        turned[row * PITCH + d + 2] = b;
      }
    }
  }
}

__device__ __forceinline__ float sink_of(const void* sinks, int kind, int head) {  // kinds: _SINKS of many_rows.py
  float sink;
  if (kind == 1) sink = ((const float*)sinks)[head];
  else if (kind == 2) sink = __uint_as_float((u32)((const u16*)sinks)[head] << 16);
  else sink = float_of(((const u16*)sinks)[head]);
  return sink * LOG2E;
}

__device__ __forceinline__ void store_16_bit(uint4* to, const float (&x)[64]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    u32 w[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) w[j] = pack_16_bit(x[8 * i + 2 * j], x[8 * i + 2 * j + 1]);
    to[i] = make_uint4(w[0], w[1], w[2], w[3]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, PROGRAMS)
many_rows(const void* q_ptr, long long q_token, long long q_head,
          const u8* __restrict__ k_codes, const u8* __restrict__ k_scales, const u8* __restrict__ v_codes, const u8* __restrict__ v_scales,
          const float* k_outer, int k_outers, const float* v_outer, int v_outers, const void* sinks, int sink_kind,
          void* out, float* partial, float* partial_lse,
          const int* cu, const int* lens, const int* __restrict__ page_table, long long max_pages, int num_seqs,
          float softmax_scale, int causal, int window, int target, int least, int page_bytes) {
  extern __shared__ __align__(1024) u8 smem[];
  __shared__ Shared shared;
  const Item it = find_item(blockIdx.x / HEADS, cu, lens, num_seqs, window, causal, target, least, shared.scratch);
  if (it.seq < 0) return;
  const Work w = work_of(it, cu, lens, causal, window);
  u8* const base = (u8*)(((u64)smem + 1023) & ~1023ull);
  float* const turned = (float*)(base + Q_BYTES);
  const u32 sq = smem_of(base), sp = sq + Q_BYTES, tiles = sp + 2 * P_BYTES;
  u32 control = smem_of(&shared);
  asm volatile("" : "+r"(control));  // kept, not made again for every use
  if (threadIdx.x == 0)
    for (int i = 0; i < STAGES; ++i) make_counter(control + ARRIVED + 8 * i, HALF);
  __syncthreads();

  if (threadIdx.x >= HALF) {
    const Copies copies(w, control, page_table + w.seq * max_pages, k_codes, k_scales, v_codes, v_scales, page_bytes);
    float o0[32], o1[32];
    sum_outputs(shared, control, w, copies, sp, tiles, o0, o1);
    __syncthreads();
    turn_outputs(turned, o0, o1);
    __syncthreads();
    return;
  }

  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
  const int row = tid >> 1, half = tid & 1, r = w.block * ROWS + row, query = r / GROUP;
  const bool there = query < w.num_queries;
  float den[16], reference;
  {
    const long long from = (long long)(w.first_token + query) * q_token + (long long)(w.head * GROUP + r % GROUP) * q_head + half * 64;
    float factor = softmax_scale * LOG2E;
    if (k_outers) factor *= k_outer[w.head * (k_outers - 1)];
    const float unit = write_queries(base, shared, w, (const u16*)q_ptr + from, there, factor);
    score_tiles(shared, control, w, sq, sp, tiles, unit, den, reference);
  }
  __syncthreads();
#pragma unroll
  for (int c = 0; c < 16; ++c) {
    float y = den[c];
    for (int k = 4; k < 32; k <<= 1) y += __shfl_xor_sync(~0u, y, k);
    if (g == 0) shared.columns[warp][8 * (c >> 1) + 2 * t + (c & 1)] = y;
  }
  __syncthreads();

  // ---- rows, half a row a thread: done, or a part for `combine`
  const int query_head = w.head * GROUP + r % GROUP;
  const float sum = shared.columns[0][row] + shared.columns[1][row] + shared.columns[2][row] + shared.columns[3][row];
  const float level = shared.level[row];
  const bool direct = w.splits == 1;
  float value = 1.0f, total = sum;
  if (direct && sink_kind && there) {
    const float sink = sink_of(sinks, sink_kind, query_head), higher = fmaxf(level, sink);
    value = ex2(level - higher);
    total = sum * value + ex2(sink - higher);
  }
  value = total > 0.0f ? value / total : 0.0f * total;
  if (SCALED_V) value *= reference;
  if (v_outers) value *= v_outer[w.head * (v_outers - 1)];
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
    if (there) store_16_bit((uint4*)((u16*)out + ((long long)(w.first_token + query) * (HEADS * GROUP) + query_head) * HEAD + half * 64), x);
  } else {
    const long long slot = ((long long)w.item * HEADS + w.head) * ROWS + row;
    float4* to = (float4*)(partial + slot * HEAD + half * 64);
#pragma unroll
    for (int i = 0; i < 16; ++i) to[i] = make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
    if (there && half == 0) partial_lse[slot] = sum > 0.0f ? level + lg2(sum) : sum != sum ? sum : -INFINITY_;
  }
}
