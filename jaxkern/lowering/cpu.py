"""What runs on the CPU: one row per kernel. Other ops run their reference."""
