"""CUDA kernels: compiling and loading."""
