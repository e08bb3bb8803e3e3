// int8_per_token_head: integers in units of a float32 scale per row.

struct Int8 {
  static __device__ __forceinline__ void pairs(u32 x, u32& a, u32& b) {
    x ^= 0x80808080u;
    a = hadd2(prmt(x, 0x64646464u, 0x4140), 0xE480E480u);  // 1024 + (n + 128) - 1152
    b = hadd2(prmt(x, 0x64646464u, 0x4342), 0xE480E480u);
  }
  static __device__ __forceinline__ void split(u32 x, u32& a, u32& b) {
    x ^= 0x80808080u;
    a = hadd2(prmt(x, 0x64646464u, 0x4240), 0xE480E480u);
    b = hadd2(prmt(x, 0x64646464u, 0x4341), 0xE480E480u);
  }
};

struct int8_per_token_head : EightBit<Int8> {};
