// What formats' files need for `latent_rows.cu`: its sizes, and how a format names its codes.

constexpr int LATENT = 512, ROTARY = 64, WIDTH = LATENT + ROTARY;  // bytes of a row: a code is one
constexpr int ROWS = 16, HEADS = 1;

struct Format {};
template <class CODE> struct Exact : CODE { static constexpr float BIAS = 0.0f, FACTOR = 1.0f; };
template <class CODE> struct EightBit : Format { using Code = Exact<CODE>; };

// Integers n as the float16 subnormals (n + 128) * 2^-24, which tensor cores multiply exactly: two instructions
// fewer for two codes than numbers take.
struct Int8;
template <> struct Exact<Int8> {
  static constexpr float BIAS = 128.0f, FACTOR = 16777216.0f;
  static __device__ __forceinline__ void pairs(u32 x, u32& a, u32& b) {
    x ^= 0x80808080u;
    a = prmt(x, 0, 0x4140);
    b = prmt(x, 0, 0x4342);
  }
  static __device__ __forceinline__ void split(u32 x, u32& a, u32& b) {
    a = lop3<0x28>(x, 0x00800080u, 0x00FF00FFu);  // (x ^ 128) & 255
    b = lop3<0x28>(x >> 8, 0x00800080u, 0x00FF00FFu);
  }
};
