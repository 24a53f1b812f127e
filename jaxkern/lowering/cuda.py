"""What runs on NVIDIA GPUs: one row per kernel. Other ops run their reference."""
