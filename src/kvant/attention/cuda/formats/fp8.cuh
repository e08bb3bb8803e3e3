// fp8_e4m3, fp8_e5m2 and turboquant_k8: 8-bit floats with an outside scale or none.

struct E5m2 {
  static __device__ __forceinline__ void pairs(u32 x, u32& a, u32& b) { a = prmt(x, 0, 0x1404); b = prmt(x, 0, 0x3424); }
  static __device__ __forceinline__ void split(u32 x, u32& a, u32& b) { a = prmt(x, 0, 0x2404); b = x & 0xFF00FF00u; }
};

struct fp8_e4m3 : EightBit<E4m3> {};
struct fp8_e5m2 : EightBit<E5m2> {};
struct turboquant_k8 : EightBit<E4m3> {};
