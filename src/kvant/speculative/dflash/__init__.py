"""DFlash: a block-diffusion drafter that reads the target's hidden states (arXiv 2602.06036)."""
