// int4_short: int4_per_token_head with a scale of 12 bits above the zero point's 4, in words of 16 bits.

struct ShortAndZero : Halfword {
  static __device__ __forceinline__ u32 low_halves(u32 scales, int row) {
    const uint2 w = lds_u2(scales + 4 * row);
    return prmt(w.x, w.y, (half_of_row(0) ? 0x32 : 0x10) | (half_of_row(1) ? 0x7600 : 0x5400));
  }
  static __device__ __forceinline__ float scale_of(u32 word) {  // kvant.kv.codecs.int4_short
    return __uint_as_float(word >= 0xFFF0u ? 0x7FC00000u : ((word >> 4) + (86u << 6)) << 17);
  }
};

struct int4_short : Int4<ShortAndZero> {};
