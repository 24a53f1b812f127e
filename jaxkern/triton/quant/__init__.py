"""Products with quantised weights on NVIDIA GPUs."""
