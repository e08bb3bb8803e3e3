// int4_per_token_head: rotated rows in steps, a float32 scale with a zero point in its low 4 bits per row.

struct int4_per_token_head : Format {
  static __device__ __forceinline__ float scale_of(u32 word) { return __uint_as_float(word & ~15u); }
  __host__ __device__ static constexpr int place(int d) {
    int e = d % 4, w = d / 4, m = w / 8, t = (w % 8) / 2, u = w % 2;
    return 16 * (2 * m + (e >> 1)) + 2 * t + u + 8 * (e & 1);
  }
  template <int HALF_> static __device__ __forceinline__ void read_keys(Keys& a, u32 stage, u32 at, int mine, int t) {
    u32 x[4], even[2], odd[2];  // zero points of even and odd nibbles, of both tokens
    ldsm(x, (stage + at) ^ (HALF_ * 32));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const u32 zero = (lds_u(stage + OFF_SK + (mine + 8 * h) * 4) & 15) * 0x10001u;
      even[h] = zero | 0xE400E400u;
      odd[h] = (zero << 4) | 0xD400D400u;
    }
#pragma unroll
    for (int w = 0; w < 2; ++w)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const u32 y = x[w * 2 + h], y8 = y >> 8;
        a.chunk[2 * w][h] = hadd2(lop3<0xEA>(y, 0x000F000Fu, 0x64006400u), even[h]);
        a.chunk[2 * w][2 + h] = hfma2(lop3<0xEA>(y, 0x00F000F0u, 0x64006400u), 0x2C002C00u, odd[h]);
        a.chunk[2 * w + 1][h] = hadd2(lop3<0xEA>(y8, 0x000F000Fu, 0x64006400u), even[h]);
        a.chunk[2 * w + 1][2 + h] = hfma2(lop3<0xEA>(y8, 0x00F000F0u, 0x64006400u), 0x2C002C00u, odd[h]);
      }
  }
  static __device__ __forceinline__ void read_values(Values& a, u32 stage, u32 at, int warp, int g, int t) {
    const int odd = warp >> 1;  // which nibbles of the codes are this warp's
    u32 x[4][4];
#pragma unroll
    for (int c = 0; c < 4; ++c) ldsm_t(x[c], stage + at + c * 16 * BYTES_V);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const u32 mask = odd ? 0x00F000F0u : 0x000F000Fu, by = odd ? 0x2C002C00u : 0x3C003C00u;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint2 w = lds_u2(stage + OFF_SV + (16 * c + 8 * h + 2 * t) * 4);
        const u32 z = ((prmt(w.x, w.y, 0x5410) & 0x000F000Fu) << (4 * odd)) | (odd ? 0xD400D400u : 0xE400E400u);
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; ++e) {
          a.chunk[c][e] = hfma2(lop3<0xEA>(x[c][e], mask, 0x64006400u), by, z);
          a.chunk[c][4 + e] = hfma2(lop3<0xEA>(x[c][e] >> 8, mask, 0x64006400u), by, z);
        }
      }
    }
  }
};
