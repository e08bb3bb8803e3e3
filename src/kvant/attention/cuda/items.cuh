// What a program computes: which rows of which sequence, against which stretch of its keys.

constexpr int WARPS = THREADS / 32;  // of a program, eight at most
constexpr float LOG2E = 1.4426950408889634f;

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
// Every thread gets the answer. scratch: 32 ints.
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
  if (tid == 0) scratch[8] = -1, scratch[9] = 0, scratch[10] = 1;
  __syncthreads();
  total = 0;
  for (int w = 0; w < WARPS; ++w) total += scratch[w];
  int per = max((total + target - 1) / target, least);
  int base = 0;
  for (int first = 0; first < num_seqs; first += THREADS) {
    int b, t;
    measure(first + tid, cu, lens, num_seqs, window, causal, b, t);
    int parts = (t + per - 1) / per, items = b * parts, sum = items;
    for (int s = 1; s < 32; s <<= 1) { int y = __shfl_up_sync(~0u, sum, s); if (lane >= s) sum += y; }
    if (lane == 31) scratch[16 + warp] = sum;
    __syncthreads();
    int before = base;
    for (int w = 0; w < WARPS; ++w) { if (w < warp) before += scratch[16 + w]; base += scratch[16 + w]; }
    int end = before + sum;
    if (item < end && item >= end - items) scratch[8] = first + tid, scratch[9] = end - items, scratch[10] = parts;
    __syncthreads();
  }
  return {scratch[8], scratch[9], scratch[10]};
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

struct Work {
  int seq, head, item, block, splits;  // item: where parts are kept; block: of ROWS rows
  int first_token, num_queries;
  int begin, end, num_tiles;  // keys; `begin` is a multiple of TILE
  int visible, whole;         // no row sees keys before; every row sees all from `visible` up to `whole`
  Bounds bounds;
};

__device__ __forceinline__ Work work_of(const Item& it, const int* cu, const int* lens, int causal, int window) {
  Work w;
  w.seq = it.seq;
  w.head = blockIdx.x % HEADS;
  w.item = blockIdx.x / HEADS;
  w.splits = it.splits;
  w.block = (w.item - it.first) / it.splits;
  const int split = (w.item - it.first) % it.splits;
  const int length = lens[it.seq];
  w.first_token = cu[it.seq];
  w.num_queries = cu[it.seq + 1] - w.first_token;
  w.bounds = {causal, window, length, w.num_queries, w.block};
  const int before = length - w.num_queries;
  const int first = before + w.block * ROWS / GROUP;
  const int last = before + min((w.block * ROWS + ROWS - 1) / GROUP, w.num_queries - 1);
  int start = 0, end = causal ? last + 1 : length;
  w.visible = 0;
  w.whole = causal ? first + 1 : length;
  if (window > 0) {
    w.visible = max(first - window + 1, 0);
    start = w.visible / TILE * TILE;
    if (!causal) end = min(length, last + window);
    w.whole = 0;  // all tiles take the masked way
  }
  const int step = ((max(end - start, 0) + it.splits - 1) / it.splits + TILE - 1) / TILE * TILE;
  w.begin = start + split * step;
  w.end = min(end, w.begin + step);
  w.num_tiles = w.end > w.begin ? (w.end - w.begin + TILE - 1) / TILE : 0;
  return w;
}
