"""A forward on CPUs: weights in their storage formats, products and all between them as compiled code."""
