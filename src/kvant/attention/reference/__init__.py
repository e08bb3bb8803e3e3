"""The reference backend: every format on any device, in plain torch; the oracle for kernels."""
