"""Reads `torch_losses_vision.npz`, which `make_torch_losses_vision.py` has written."""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np


def assert_equals_torch(name: str, f: Callable, atol: float = 2e-5) -> None:
    """`f` of the stored operands: the stored result and the stored gradients."""
    with np.load(Path(__file__).with_suffix(".npz")) as golden:
        count = sum(key.startswith(f"{name}/x") for key in golden)
        operands = [jnp.asarray(golden[f"{name}/x{i}"]) for i in range(count)]
        y, pull = jax.vjp(f, *operands)
        np.testing.assert_allclose(y, golden[f"{name}/y"], rtol=2e-5, atol=atol)
        for i, dx in enumerate(pull(jnp.asarray(golden[f"{name}/dy"]))):
            expected = golden[f"{name}/dx{i}"]
            np.testing.assert_allclose(dx, expected, rtol=2e-5, atol=atol)
