// Runs on a CPU what turns a tile's codes into operands of wgmma: codes.cuh and the formats, which the compiler gets
// behind this file, with the macros of a launch. A warp's loads exchange rows between lanes, so each lane runs twice:
// the first run notes its addresses, the second one reads what the noted addresses hold.

#include <cstdint>
#include <cstring>

#define __device__
#define __host__
#define __forceinline__ inline

typedef uint32_t u32;
typedef uint64_t u64;
typedef uint8_t u8;
typedef uint16_t u16;
struct uint2 { u32 x, y; };
struct { unsigned x; } static blockIdx;

static float __uint_as_float(u32 bits) { float f; std::memcpy(&f, &bits, 4); return f; }
static _Float16 half_at(u32 word, int high) {
  const u16 bits = (u16)(word >> (16 * high));
  _Float16 f;
  std::memcpy(&f, &bits, 2);
  return f;
}
static u32 halves(_Float16 low, _Float16 high) {
  u16 a, b;
  std::memcpy(&a, &low, 2);
  std::memcpy(&b, &high, 2);
  return a | (u32)b << 16;
}
static u32 prmt(u32 a, u32 b, u32 s) {
  const u64 both = (u64)b << 32 | a;
  u32 made = 0;
  for (int i = 0; i < 4; ++i) made |= (u32)(both >> (8 * (s >> (4 * i) & 7)) & 255) << (8 * i);
  return made;
}
template <int LUT> static u32 lop3(u32 a, u32 b, u32 c) {
  static_assert(LUT == 0xEA, "(a and b) or c");
  return (a & b) | c;
}
static u32 hadd2(u32 a, u32 b) { return halves(half_at(a, 0) + half_at(b, 0), half_at(a, 1) + half_at(b, 1)); }
static u32 hmul2(u32 a, u32 b) { return halves(half_at(a, 0) * half_at(b, 0), half_at(a, 1) * half_at(b, 1)); }
static u32 hfma2(u32 a, u32 b, u32 c) {  // products and sums of a double are exact here
  const double low = (double)half_at(a, 0) * (double)half_at(b, 0) + (double)half_at(c, 0);
  const double high = (double)half_at(a, 1) * (double)half_at(b, 1) + (double)half_at(c, 1);
  return halves((_Float16)low, (_Float16)high);
}
static float float_of(u32 half) { return (float)half_at(half, 0); }
static _Float16 e4m3(u32 code) {
  const u32 exponent = code >> 3 & 15, mantissa = code & 7;
  u32 bits;
  if ((code & 127) == 127) bits = 0x7FC00000u;
  else if (exponent) bits = (exponent + 120) << 23 | mantissa << 20;
  else { const float f = (float)mantissa / 512.0f; std::memcpy(&bits, &f, 4); }
  return (_Float16)__uint_as_float(bits | (code & 128) << 24);
}
static u32 cvt_lo(u32 x) { return halves(e4m3(x & 255), e4m3(x >> 8 & 255)); }
static u32 cvt_hi(u32 x) { return cvt_lo(x >> 16); }
struct E4m3 {
  static void pairs(u32 x, u32& a, u32& b) { a = cvt_lo(x); b = cvt_hi(x); }
  static void split(u32 x, u32& a, u32& b) { x = prmt(x, 0, 0x3120); a = cvt_lo(x); b = cvt_hi(x); }
};

alignas(1024) static u8 shared_memory[1 << 16];
static u32 lds_u(u32 a) { u32 x; std::memcpy(&x, shared_memory + a, 4); return x; }
static uint2 lds_u2(u32 a) { return {lds_u(a), lds_u(a + 4)}; }

static int lane_now, loads;
static bool noting;
static u32 noted[64][32];  // [load of the lane][lane]
static u32 row_word(u32 row, int column) { return lds_u(row + 4 * column); }
static u32 element(u32 row, int column) { u16 x; std::memcpy(&x, shared_memory + row + 2 * column, 2); return x; }
static void ldsm(u32 (&x)[4], u32 a) {
  if (noting) noted[loads][lane_now] = a;
  else
    for (int m = 0; m < 4; ++m) x[m] = row_word(noted[loads][8 * m + lane_now / 4], lane_now % 4);
  ++loads;
}
static void ldsm_t(u32 (&x)[4], u32 a) {
  if (noting) noted[loads][lane_now] = a;
  else
    for (int m = 0; m < 4; ++m) {
      const u32* const rows = noted[loads] + 8 * m;
      const int column = lane_now / 4, row = lane_now % 4 * 2;
      x[m] = element(rows[row], column) | element(rows[row + 1], column) << 16;
    }
  ++loads;
}

#include "codes.inc"

using KeyFormat = FORMAT_K;
using ValueFormat = FORMAT_V;

template <int BYTES> static void put_codes(u32 at, const u8* codes) {
  for (int row = 0; row < TILE; ++row)
    for (int piece = 0; piece < BYTES / 16; ++piece)
      std::memcpy(shared_memory + at + mixed<BYTES>(row, piece), codes + row * BYTES + 16 * piece, 16);
}
// plane: [TILE, HEADS, in_page] bytes. Copies take no less than 4 bytes and begin at a multiple of them.
static void put_scales(u32 at, int bytes, const u8* plane, int in_page, int head) {
  for (int row = 0; row < TILE && bytes; ++row)
    std::memcpy(shared_memory + at + row * bytes, plane + (row * HEADS + head) * in_page / 4 * 4, bytes);
}

// One tile. codes: [TILE, BYTES_K or BYTES_V] of one head, scales: [TILE, HEADS, PAGE_SB_K or PAGE_SB_V] of all.
// k, v: [TILE, HEAD], rotated if the format is.
extern "C" void read_tile(const u8* k_codes, const u8* k_scales, const u8* v_codes, const u8* v_scales, int head, float* k, float* v) {
  static float operand[TILE][HEAD];
  blockIdx.x = 5 * HEADS + head;
  std::memset(shared_memory, 255, sizeof shared_memory);
  put_codes<BYTES_K>(0, k_codes);
  put_codes<BYTES_V>(OFF_V, v_codes);
  put_scales(OFF_SK, SB_K, k_scales, PAGE_SB_K, head);
  put_scales(OFF_SV, SB_V, v_scales, PAGE_SB_V, head);
  for (int warp = 0; warp < 4; ++warp)
    for (int run = 0; run < 2; ++run)
      for (lane_now = 0; lane_now < 32; ++lane_now) {
        const int g = lane_now >> 2, t = lane_now & 3, mine = 16 * warp + g;
        Keys half[2];
        Values a;
        noting = run == 0;
        loads = 0;
        KeyFormat::template read_keys<0>(half[0], 0, keys_at(warp, lane_now), mine, t);
        KeyFormat::template read_keys<1>(half[1], 0, keys_at(warp, lane_now), mine, t);
        ValueFormat::read_values(a, 0, values_at(warp, lane_now), warp, g, t);
        if (noting) continue;
        // Register r of a 64 x 16 operand: rows g and g + 8, then the same eight columns on.
        for (int c = 0; c < 4; ++c)
          for (int r = 0; r < 4; ++r)
            for (int high = 0; high < 2; ++high) {
              const int row = g + 8 * (r & 1), column = 16 * c + 8 * (r >> 1) + 2 * t + high;
              for (int h = 0; h < 2; ++h)
                operand[16 * warp + row][64 * h + column] = (float)half_at(half[h].chunk[c][r], high);
              const int first = BYTES_V == 128 ? 2 * (16 * warp + row)
                                : BYTES_V == 64 ? 4 * (16 * (warp & 1) + row) + (warp >> 1)
                                                : 8 * row + 2 * warp;
              const int second = BYTES_V == 64 ? first + 2 : first + 1;
              v[column * HEAD + first] = (float)half_at(a.chunk[c][r], high);
              v[column * HEAD + second] = (float)half_at(a.chunk[c][4 + r], high);
            }
      }
  for (int row = 0; row < TILE; ++row) {
    const float ks = SCALED_K ? KeyFormat::scale_of(KeyFormat::word_at(OFF_SK, row)) : 1.0f;
    const float vs = SCALED_V ? ValueFormat::scale_of(ValueFormat::word_at(OFF_SV, row)) : 1.0f;
    for (int d = 0; d < HEAD; ++d) {
      k[row * HEAD + d] = operand[row][KeyFormat::place(d)] * ks;
      v[row * HEAD + d] *= vs;
    }
  }
}
