"""CPU kernels: vector code, threads, compiled functions."""
