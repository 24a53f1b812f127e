"""What runs on the CPU: one row per kernel. Ops without a row run their reference."""
