"""The reference backend: every format on any device, in torch alone; the oracle for kernels."""
