// nvfp4: e2m1 in units of an e4m3 scale per 16 elements. Codes move into e4m3 bits, which the hardware converts,
// and the block scale is multiplied in float16, exactly.

struct nvfp4 : Format {
  __host__ __device__ static constexpr int place(int d) {
    int e = d % 4, w = d / 4, m = w / 8, t = (w % 8) / 2, u = w % 2;
    return 16 * (2 * m + (e & 1)) + 2 * t + (e >> 1) + 8 * u;
  }
  template <int HALF_> static __device__ __forceinline__ void read_keys(Keys& a, u32 stage, u32 at, int mine, int t) {
    u32 x[4], scale[2][2];  // [token][eight words]
    ldsm(x, (stage + at) ^ (HALF_ * 32));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const u32 w = lds_u(stage + OFF_SK + (mine + 8 * h) * 8 + 4 * HALF_);
      const u32 both = hmul2(cvt_lo(prmt(w, 0, t < 2 ? 0x4420 : 0x4431)), 0x54005400u);
      scale[h][0] = prmt(both, 0, 0x1010);
      scale[h][1] = prmt(both, 0, 0x3232);
    }
#pragma unroll
    for (int w = 0; w < 2; ++w)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const u32 y = x[w * 2 + h], f = scale[h][w];
        const u32 hi = lop3<0xEA>(y, 0x80808080u, (y >> 2) & 0x1C1C1C1Cu);
        const u32 lo = lop3<0xEA>(y << 4, 0x80808080u, (y << 2) & 0x1C1C1C1Cu);
        a.chunk[2 * w][h] = hmul2(cvt_lo(lo), f);
        a.chunk[2 * w][2 + h] = hmul2(cvt_hi(lo), f);
        a.chunk[2 * w + 1][h] = hmul2(cvt_lo(hi), f);
        a.chunk[2 * w + 1][2 + h] = hmul2(cvt_hi(hi), f);
      }
  }
  static __device__ __forceinline__ void read_values(Values& a, u32 stage, u32 at, int warp, int g, int t) {
    const int odd = warp >> 1;  // which nibbles of the codes are this warp's
    u32 x[4][4];
#pragma unroll
    for (int c = 0; c < 4; ++c) ldsm_t(x[c], stage + at + c * 16 * BYTES_V);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const u32 row = stage + OFF_SV + (16 * c + 8 * h + 2 * t) * 8 + 4 * (warp & 1);
        const u32 four = prmt(lds_u(row), lds_u(row + 8), g < 4 ? 0x6240 : 0x7351);
        const u32 f[2] = {hmul2(cvt_lo(four), 0x54005400u), hmul2(cvt_hi(four), 0x54005400u)};
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const u32 y = prmt(x[c][2 * h + e], 0, 0x3120) << (odd ? 0 : 4);
          const u32 b = lop3<0xEA>(y, 0x80808080u, (y >> 2) & 0x1C1C1C1Cu);
          a.chunk[c][2 * h + e] = hmul2(cvt_lo(b), f[e]);
          a.chunk[c][4 + 2 * h + e] = hmul2(cvt_hi(b), f[e]);
        }
      }
    }
  }
};
