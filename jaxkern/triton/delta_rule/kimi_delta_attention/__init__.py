"""Kimi delta attention by Triton: fwd.py, bwd.py and their kernels."""
