// normal2: rotated rows in four equal steps, four a byte, and a float16 scale per row. A number is its code less 1.5.

struct normal2 : Halfword {
  static __device__ __forceinline__ float scale_of(u32 word) { return float_of(word); }
  __host__ __device__ static constexpr int place(int d) {
    int e = d % 8, w = d / 8, m = w / 8, t = (w % 8) / 2, u = w % 2;
    return 64 * m + 16 * (e >> 1) + 2 * t + u + 8 * (e & 1);
  }
  // Element e of the two words in x: its bits move to where they count 16, (1024 + 16 n) / 16 - 65.5.
  static __device__ __forceinline__ u32 element(u32 x, int e) {
    const u32 moved = e < 2 ? x << (4 - 2 * e) : x >> (2 * e - 4);
    return hfma2(lop3<0xEA>(moved, 0x00300030u, 0x64006400u), 0x2C002C00u, 0xD418D418u);
  }
  template <int HALF_> static __device__ __forceinline__ void read_keys(Keys& a, u32 stage, u32 at, int mine, int t) {
    u32 x[4];
    ldsm(x, stage + at);
#pragma unroll
    for (int c = 0; c < 4; ++c)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        a.chunk[c][h] = element(x[2 * HALF_ + h], 2 * c);
        a.chunk[c][2 + h] = element(x[2 * HALF_ + h], 2 * c + 1);
      }
  }
  static __device__ __forceinline__ void read_values(Values& a, u32 stage, u32 at, int warp, int g, int t) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      u32 x[4];
      ldsm_t(x, stage + at + c * 16 * BYTES_V);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        a.chunk[c][e] = element(x[e], 2 * warp);
        a.chunk[c][4 + e] = element(x[e], 2 * warp + 1);
      }
    }
  }
};
