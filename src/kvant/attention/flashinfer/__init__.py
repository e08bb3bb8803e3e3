"""FlashInfer's kernels for long prompts over 16-bit pages; Triton's for everything else."""
