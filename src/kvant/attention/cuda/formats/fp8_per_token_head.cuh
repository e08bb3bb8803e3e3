// fp8_per_token_head: e4m3 in units of a float32 scale per row.

struct fp8_per_token_head : EightBit<E4m3> {};
