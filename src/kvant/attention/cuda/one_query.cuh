// What formats' files need for `one_query.cu`: how a format names its codes.

struct Format {};
template <class CODE> struct EightBit : Format { using Code = CODE; };
