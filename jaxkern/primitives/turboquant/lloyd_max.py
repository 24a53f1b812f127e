"""Lloyd-Max codebooks: the levels that quantise a standard normal number best.

Each level is the mean of its cell, each cell ends midway between two levels
(https://doi.org/10.1109/TIT.1982.1056489). For a log-concave density there is one such
set of levels.
"""

import functools
import importlib.resources
import json

import numpy as np

from jaxkern.primitives.check_arguments import check_arguments


@functools.cache
def table() -> dict[str, dict]:
    """Positive levels and mean squared errors by bits, to the last bit of float64."""
    resource = (
        importlib.resources.files("jaxkern.primitives.turboquant")
        / "lloyd_max_normal.json"
    )
    return json.loads(resource.read_text())


@check_arguments
def lloyd_max_codebook(bits: int) -> np.ndarray:
    """The optimal levels of a normal number with mean 0 and variance 1, ascending.

        level_i = E[x | x is nearest to level_i],    x ~ N(0, 1)

    `np.searchsorted` over their midpoints finds the nearest one. The 6- and 8-bit
    tables of mlx-native are not optimal: its 8-bit error is 52 % larger.

    Source: https://doi.org/10.1109/TIT.1982.1056489.

    Args:
      bits: 1 to 8.

    Returns:
      `[2**bits]` float64, a NumPy constant.

    Raises:
      ValueError: another number of bits.

    Example:
      >>> jaxkern.lloyd_max_codebook(2)
      array([-1.51 , -0.453,  0.453,  1.51 ])
    """
    positive = np.array(entry(bits)["positive_centroids"])
    return np.concatenate([-positive[::-1], positive])


@check_arguments
def lloyd_max_error(bits: int) -> float:
    """Mean squared error of `lloyd_max_codebook(bits)` on a standard normal number.

    Args:
      bits: 1 to 8.

    Returns:
      E (x - level(x))^2 with x ~ N(0, 1), as a Python float.

    Raises:
      ValueError: there is no such codebook.

    Example:
      >>> [round(jaxkern.lloyd_max_error(bits), 4) for bits in (1, 2, 4)]
      [0.3634, 0.1175, 0.0095]
    """
    return entry(bits)["mse"]


def entry(bits: int) -> dict:
    if str(bits) not in table():
        raise ValueError(f"lloyd_max_codebook: `bits` must be 1 to 8, got {bits!r}.")
    return table()[str(bits)]
