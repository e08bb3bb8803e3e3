// Codes of a tile, from shared memory to the register operand of wgmma: what all formats share.
//
// A format is a struct in formats/, and FORMAT_K and FORMAT_V name the two of a kernel. Codes come by ldmatrix
// in 16-bit words (transposed for V). Two codes of a word become neighbours in the inner dimension: its order
// is free as long as the other operand has the same (`place`, for keys). Integers become exact float16
// integers, zero point subtracted, by the exponent trick (1024 + n - 1024).
//
// Every format has
//   place(d)       which of the 128 places of the product's inner dimension element d of a key takes;
//   read_keys<H>   half H of the keys of the tile at `stage`. mine: first of the thread's two tokens, the
//                  other is 8 on. t: lane modulo 4;
//   read_values    the values of the tile. g, t: lane divided by 4, and modulo 4;
//   word_at        a row's word of scales from those of a tile, and scale_of its scale, where SCALED_K or SCALED_V.

constexpr int TILE = 64, ROWS = 64, HEAD = 128;

// A tile in shared memory: 64 rows of K codes, of V codes, of K scales, of V scales. BYTES_K, BYTES_V: codes of
// a row. SB_K, SB_V: its scales; PAGE_SB_K, PAGE_SB_V: its scales in the pages. Copies take no less than 4 bytes,
// so scales of 2 bytes come with a neighbour's.
constexpr int OFF_V = TILE * BYTES_K;
constexpr int OFF_SK = OFF_V + TILE * BYTES_V;
constexpr int OFF_SV = OFF_SK + TILE * SB_K;
constexpr int STAGE = OFF_SV + TILE * SB_V;

// Where 16 bytes of a row lie: their number is mixed with the row's, so that eight rows have different banks.
template <int BYTES> __device__ __forceinline__ u32 mixed(int row, int piece) {
  const int by = BYTES == 128 ? row & 7 : BYTES == 64 ? (row >> 1) & 3 : (row >> 2) & 1;
  return row * BYTES + ((piece ^ by) * 16);
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
__device__ __forceinline__ u32 values_at(int warp, int lane) {  // a warp's outputs: 16 words, of each two elements
  const int chunk = (BYTES_V == 128 ? 2 * warp : BYTES_V == 64 ? 2 * (warp & 1) : 0) + (lane >> 3 & 1);
  return OFF_V + mixed<BYTES_V>((lane >> 4) * 8 + (lane & 7), chunk);
}

// scales: of a tile, in shared memory; row: of the tile.
struct Format {
  static __device__ __forceinline__ u32 word_at(u32 scales, int row) { return lds_u(scales + 4 * row); }
  static __device__ __forceinline__ float scale_of(u32 word) { return __uint_as_float(word); }
};

// Rows with a scale of 16 bits: a tile has the 32 bits that it lies in.
struct Halfword : Format {
  // Which half: scales of a token's heads are neighbours, and pages and tiles begin at even tokens.
  static __device__ __forceinline__ u32 half_of_row(int row) { return (blockIdx.x % HEADS + row * HEADS) & 1; }
  static __device__ __forceinline__ u32 word_at(u32 scales, int row) {
    return prmt(lds_u(scales + 4 * row), 0, half_of_row(row) ? 0x4432 : 0x4410);
  }
};

// Formats of 8-bit codes. CODE::pairs: four codes to (first two, last two) as float16. CODE::split: codes of
// two tokens (bytes a0 b0 a1 b1) to (a of both, b of both).
template <class CODE> struct EightBit : Format {
  __host__ __device__ static constexpr int place(int d) {
    int c = d / 16, r = d % 16, quad = r / 4, w = r % 4;
    return 16 * c + 2 * quad + (w & 1) + 8 * (w >> 1);
  }
  template <int HALF_> static __device__ __forceinline__ void read_keys(Keys& a, u32 stage, u32 at, int mine, int t) {
    u32 x[2][4];
#pragma unroll
    for (int c = 0; c < 2; ++c) ldsm(x[c], (stage + at) ^ (HALF_ * 64 + c * 32));
#pragma unroll
    for (int c = 0; c < 4; ++c)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        CODE::pairs(x[c >> 1][2 * (c & 1) + h], a.chunk[c][h], a.chunk[c][2 + h]);
  }
  static __device__ __forceinline__ void read_values(Values& a, u32 stage, u32 at, int warp, int g, int t) {
    u32 x[4][4];
#pragma unroll
    for (int c = 0; c < 4; ++c) ldsm_t(x[c], stage + at + c * 16 * BYTES_V);
#pragma unroll
    for (int c = 0; c < 4; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) CODE::split(x[c][e], a.chunk[c][e], a.chunk[c][4 + e]);
  }
};

// Formats of rotated rows in 4 bits, two a byte, with a zero point in the low 4 bits of a row's word. ROW: as
// Format, and low_halves, of the words of an even row and the next one.
template <class ROW> struct Int4 : ROW {
  __host__ __device__ static constexpr int place(int d) {
    int e = d % 4, w = d / 4, m = w / 8, t = (w % 8) / 2, u = w % 2;
    return 16 * (2 * m + (e >> 1)) + 2 * t + u + 8 * (e & 1);
  }
  template <int HALF_> static __device__ __forceinline__ void read_keys(Keys& a, u32 stage, u32 at, int mine, int t) {
    u32 x[4], even[2], odd[2];  // zero points of even and odd nibbles, of both tokens
    ldsm(x, (stage + at) ^ (HALF_ * 32));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const u32 zero = (ROW::word_at(stage + OFF_SK, mine + 8 * h) & 15) * 0x10001u;
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
        const u32 zeros = ROW::low_halves(stage + OFF_SV, 16 * c + 8 * h + 2 * t) & 0x000F000Fu;
        const u32 z = (zeros << (4 * odd)) | (odd ? 0xD400D400u : 0xE400E400u);
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; ++e) {
          a.chunk[c][e] = hfma2(lop3<0xEA>(x[c][e], mask, 0x64006400u), by, z);
          a.chunk[c][4 + e] = hfma2(lop3<0xEA>(x[c][e] >> 8, mask, 0x64006400u), by, z);
        }
      }
    }
  }
};
