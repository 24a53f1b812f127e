"""What mlx quantised, as written by tests/golden/make_mlx_affine.py."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxkern.primitives.quant.affine_tensor import AffineTensor

with np.load(Path(__file__).parents[2] / "golden/mlx_affine.npz") as file:
    GOLDEN = dict(file)
KEYS = [k.removesuffix("_codes") for k in GOLDEN if k.endswith("_codes")]


def arrays(key: str, *names: str) -> list[np.ndarray]:
    """Arrays of one setting; bfloat16 is stored as its 16 bits."""
    found = [GOLDEN[f"{key}_{name}"] for name in names]
    dtype = jnp.dtype(key.split("_")[0])
    return [a.view(dtype) if a.dtype == np.uint16 else a for a in found]


def tensor(key: str) -> AffineTensor:
    _, bits, group_size = key.split("_")
    parts = map(jnp.asarray, arrays(key, "codes", "scales", "biases"))
    return AffineTensor(*parts, int(bits), int(group_size))
