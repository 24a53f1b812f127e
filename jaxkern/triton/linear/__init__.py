"""Products with plain weights on NVIDIA GPUs."""
