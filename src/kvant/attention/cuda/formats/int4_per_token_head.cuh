// int4_per_token_head: rotated rows in steps, a float32 scale with a zero point in its low 4 bits per row.

struct Float32AndZero : Format {
  static __device__ __forceinline__ u32 low_halves(u32 scales, int row) {
    const uint2 w = lds_u2(scales + 4 * row);
    return prmt(w.x, w.y, 0x5410);
  }
  static __device__ __forceinline__ float scale_of(u32 word) { return __uint_as_float(word & ~15u); }
};

struct int4_per_token_head : Int4<Float32AndZero> {};
