"""State-space duality, Mamba-2's layer."""
