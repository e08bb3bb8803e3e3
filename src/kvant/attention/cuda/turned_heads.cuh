// Norms and rotations of heads in 16 bits, as rotated_store.py computes them, for `one_query.cu`.
//
// A warp has a row: each lane WORDS words of two numbers.

constexpr int WORDS = HEAD / 64;  // of two numbers, that a lane has of a row: columns 2 lane + 64 j and the next
constexpr int HALF = ROTARY / 2;
enum { NO_NORM, ROUNDED, WIDE, ONE };  // as in rotated_store.py

__device__ __forceinline__ float rounded(float x) {
  float y, z;
  unpack_16_bit(y, z, pack_16_bit(x, x));
  return y;
}
__device__ __forceinline__ float weighted(float x, float scale, float w) {
  if (NORM == NO_NORM) return x;
  x *= scale;
  if (NORM == ROUNDED) x = rounded(x);
  return rounded(x * (NORM == ONE ? w + 1.0f : w));
}
// The column whose number a column's number is rotated with.
__device__ __forceinline__ int partner_of(int column) {
  if (NEIGHBOURS || column >= ROTARY) return column;  // then both lie in one word
  return column < HALF ? column + HALF : column - HALF;
}
struct Angles { float cos[WORDS][2], sin[WORDS][2]; };
__device__ __forceinline__ void read_angles(float (&to)[2], const void* table, long long place, int column) {
  const int angle = NEIGHBOURS ? column / 2 : column < HALF ? column : column - HALF;
  const long long at = place * HALF + angle;
  if (ANGLE_BYTES == 4) {
    to[0] = ((const float*)table)[at];
    to[1] = NEIGHBOURS ? to[0] : ((const float*)table)[at + 1];
  } else if (NEIGHBOURS) {
    float none;
    unpack_16_bit(to[0], none, ((const u16*)table)[at]);
    to[1] = to[0];
  } else {
    unpack_16_bit(to[0], to[1], *(const u32*)((const u16*)table + at));
  }
}
__device__ __forceinline__ Angles angles_of(const void* cos, const void* sin, long long place, int lane) {
  Angles a;
#pragma unroll
  for (int j = 0; j < WORDS; ++j) {
    const int column = 2 * lane + 64 * j;
    a.cos[j][0] = a.cos[j][1] = 1.0f;
    a.sin[j][0] = a.sin[j][1] = 0.0f;
    if (column < ROTARY) {
      read_angles(a.cos[j], cos, place, column);
      read_angles(a.sin[j], sin, place, column);
    }
  }
  return a;
}
// Word j of a row: normalised with weights w and rotated with the numbers y at its partners, whose weights are v.
__device__ __forceinline__ u32 turned(u32 x, u32 y, u32 w, u32 v, float scale, const Angles& a, int j, int lane) {
  const int column = 2 * lane + 64 * j;
  float x0, x1, y0, y1, w0, w1, v0, v1;
  unpack_16_bit(x0, x1, x);
  unpack_16_bit(y0, y1, y);
  unpack_16_bit(w0, w1, w);
  unpack_16_bit(v0, v1, v);
  x0 = weighted(x0, scale, w0);
  x1 = weighted(x1, scale, w1);
  y0 = weighted(y0, scale, v0);
  y1 = weighted(y1, scale, v1);
  if (column >= ROTARY) return pack_16_bit(x0, x1);
  if (NEIGHBOURS) return pack_16_bit(x0 * a.cos[j][0] - x1 * a.sin[j][0], x1 * a.cos[j][1] + x0 * a.sin[j][1]);
  const float sign = column < HALF ? -1.0f : 1.0f;
  return pack_16_bit(x0 * a.cos[j][0] + sign * y0 * a.sin[j][0], x1 * a.cos[j][1] + sign * y1 * a.sin[j][1]);
}
