// What formats' files need for `latent_rows.cu`: its sizes, and how a format names its codes.

constexpr int LATENT = 512, ROTARY = 64, WIDTH = LATENT + ROTARY;  // bytes of a row: a code is one
constexpr int ROWS = 16, HEADS = 1;

struct Format {};
template <class CODE> struct EightBit : Format { using Code = CODE; };
