// Codes of a tile, from shared memory to the register operand of wgmma. Formats are those of codec.py.
//
// Codes come by ldmatrix in 16-bit words (transposed for V). Two codes of a word become neighbours in the
// inner dimension: its order is free as long as the other operand has the same (`place`, for keys).
// int8 and 4-bit integers become exact float16 integers, zero point subtracted, by the exponent trick
// (1024 + n - 1024); e2m1 is moved into e4m3 bits, which the hardware converts, and its block scale is
// multiplied in float16, exactly.

constexpr int TILE = 64, ROWS = 64, HEAD = 128;

constexpr int row_bytes(int kind) { return kind == UINT4 || kind == E2M1 ? 64 : 128; }
constexpr int scale_bytes(int scaling) { return scaling == NONE ? 0 : scaling == BLOCK ? 8 : 4; }
constexpr int BYTES_K = row_bytes(KIND_K), BYTES_V = row_bytes(KIND_V);
constexpr int SB_K = scale_bytes(SCALING_K), SB_V = scale_bytes(SCALING_V);
// A tile in shared memory: 64 rows of K codes, of V codes, of K scales, of V scales.
constexpr int OFF_V = TILE * BYTES_K;
constexpr int OFF_SK = OFF_V + TILE * BYTES_V;
constexpr int OFF_SV = OFF_SK + TILE * SB_K;
constexpr int STAGE = OFF_SV + TILE * SB_V;
constexpr bool SCALED_K = SCALING_K == ROW || SCALING_K == ROW_ZERO;
constexpr bool SCALED_V = SCALING_V == ROW || SCALING_V == ROW_ZERO;

// Where 16 bytes of a row lie: their number is mixed with the row's, so that eight rows have different banks.
template <int BYTES> __device__ __forceinline__ u32 mixed(int row, int piece) {
  return row * BYTES + ((piece ^ (BYTES == 128 ? row & 7 : (row >> 1) & 3)) * 16);
}
// A token's scale, of the scalings that have one.
__device__ __forceinline__ float scale_of(u32 word, int scaling) { return __uint_as_float(scaling == ROW ? word : word & ~15u); }

// Which of the 128 places of the product's inner dimension element d of a key takes.
__host__ __device__ constexpr int place(int d) {
  if (KIND_K == UINT4) {
    int e = d % 4, w = d / 4, m = w / 8, t = (w % 8) / 2, u = w % 2;
    return 16 * (2 * m + (e >> 1)) + 2 * t + u + 8 * (e & 1);
  } else if (KIND_K == E2M1) {
    int e = d % 4, w = d / 4, m = w / 8, t = (w % 8) / 2, u = w % 2;
    return 16 * (2 * m + (e & 1)) + 2 * t + (e >> 1) + 8 * u;
  } else {
    int c = d / 16, r = d % 16, quad = r / 4, w = r % 4;
    return 16 * c + 2 * quad + (w & 1) + 8 * (w >> 1);
  }
}

// Four codes of 8 bits to (first two, last two) as float16.
template <int KIND> __device__ __forceinline__ void unpack_pairs(u32 x, u32& a, u32& b) {
  if (KIND == E4M3) { a = cvt_lo(x); b = cvt_hi(x); }
  else if (KIND == E5M2) { a = prmt(x, 0, 0x1404); b = prmt(x, 0, 0x3424); }
  else {
    x ^= 0x80808080u;
    a = hadd2(prmt(x, 0x64646464u, 0x4140), 0xE480E480u);  // 1024 + (n + 128) - 1152
    b = hadd2(prmt(x, 0x64646464u, 0x4342), 0xE480E480u);
  }
}
// Codes of two tokens (bytes a0 b0 a1 b1) to (a of both, b of both).
template <int KIND> __device__ __forceinline__ void unpack_split(u32 x, u32& a, u32& b) {
  if (KIND == E4M3) { x = prmt(x, 0, 0x3120); a = cvt_lo(x); b = cvt_hi(x); }
  else if (KIND == E5M2) { a = prmt(x, 0, 0x2404); b = x & 0xFF00FF00u; }
  else {
    x ^= 0x80808080u;
    a = hadd2(prmt(x, 0x64646464u, 0x4240), 0xE480E480u);
    b = hadd2(prmt(x, 0x64646464u, 0x4341), 0xE480E480u);
  }
}


// The products' register operands of one thread; `chunk`: 16 of the inner dimension.
// Keys: 64 tokens times 64 places, half the head. Values: 2 times 64 dimensions times 64 tokens.
struct Keys { u32 chunk[4][4]; };
struct Values { u32 chunk[4][8]; };
// The compiler may neither compute an operand later than here nor sooner.
__device__ __forceinline__ void here(Keys& a) {
#pragma unroll
  for (int c = 0; c < 4; ++c)
#pragma unroll
    for (int k = 0; k < 4; ++k) asm volatile("" : "+r"(a.chunk[c][k])::"memory");
}
__device__ __forceinline__ void here(Values& a) {
#pragma unroll
  for (int c = 0; c < 4; ++c)
#pragma unroll
    for (int k = 0; k < 8; ++k) asm volatile("" : "+r"(a.chunk[c][k])::"memory");
}

// Where a thread's rows of K and V lie in a tile, for ldmatrix: lane 8 m + r brings row r of matrix m.
__device__ __forceinline__ u32 keys_at(int warp, int lane) {
  return mixed<BYTES_K>(16 * warp + (lane & 15), lane >> 4);
}
__device__ __forceinline__ u32 values_at(int warp, int lane) {  // a warp's outputs: 16 words, of each one element
  const int chunk = (BYTES_V == 128 ? 2 * warp : 2 * (warp & 1)) + (lane >> 3 & 1);
  return OFF_V + mixed<BYTES_V>((lane >> 4) * 8 + (lane & 7), chunk);
}

// HALF_ of the keys of the tile at `stage`. mine: first of the thread's two tokens, the other is 8 on.
template <int HALF_> __device__ __forceinline__ void read_keys(Keys& a, u32 stage, u32 at, int mine, int t) {
  if (KIND_K == UINT4) {
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
  } else if (KIND_K == E2M1) {
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
  } else {
    u32 x[2][4];
#pragma unroll
    for (int c = 0; c < 2; ++c) ldsm(x[c], (stage + at) ^ (HALF_ * 64 + c * 32));
#pragma unroll
    for (int c = 0; c < 4; ++c)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        unpack_pairs<KIND_K>(x[c >> 1][2 * (c & 1) + h], a.chunk[c][h], a.chunk[c][2 + h]);
  }
}

// odd: which nibbles of 4-bit codes are this warp's.
__device__ __forceinline__ void read_values(Values& a, u32 stage, u32 at, int warp, int g, int t) {
  const int odd = warp >> 1;
  u32 x[4][4];
#pragma unroll
  for (int c = 0; c < 4; ++c) ldsm_t(x[c], stage + at + c * 16 * BYTES_V);
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    if (KIND_V == UINT4) {
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
    } else if (KIND_V == E2M1) {
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
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) unpack_split<KIND_V>(x[c][e], a.chunk[c][e], a.chunk[c][4 + e]);
    }
  }
}
