"""What runs on NVIDIA GPUs: one row per kernel. Ops without a row run their reference."""
