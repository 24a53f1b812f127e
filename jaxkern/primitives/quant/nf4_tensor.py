"""NF4, the 4-bit normal float of QLoRA: w = level(code) * largest |w| of its group.

The 16 levels are quantiles of a normal distribution, 0 and 1 among them
(https://arxiv.org/abs/2305.14314, section 3 and appendix E).
"""

import functools
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8

from jaxkern.primitives.quant.block_fields import entries
from jaxkern.primitives.quant.quantized_tensor import (
    QuantizedTensor,
    check_leading_index,
    repr_of,
)

# as float32, in the order of their codes
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
    *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)
OUTER_SIZE = 256  # scales that share a scale, where they are quantised too


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NF4Tensor(QuantizedTensor):
    """A weight of shape `[..., d]` in 4-bit normal floats, in groups along d.

        w[..., i] = level(code[..., i]) * absmax[..., i // group_size]
        absmax    = scales, or with quantised scales, o = g // 256:
        absmax[..., g] = dynamic(scale_codes[..., g]) * scales[..., o] + offsets[..., o]

    The bytes are those of bitsandbytes, see `nf4_from_bitsandbytes`.

    Attributes:
      codes: `[..., d / 2]`, uint8, the even i in the high half of byte i // 2.
      scales: `[..., d / group_size]`, any float dtype; or one for each 256 groups of a
        row, rounded up, where these have `scale_codes`.
      scale_codes: None, or `[..., d / group_size]`, uint8, places in `dynamic_levels`.
      offsets: as `scales` where there are scale codes, else None.
      group_size: weights that share an absmax; 64 in QLoRA.

    Example:
      >>> w = jaxkern.quantize_nf4(jnp.ones((2, 128)))
      >>> isinstance(w, jaxkern.NF4Tensor)
      True
      >>> w.shape, w.codes.shape, w.scales.shape
      ((2, 128), (2, 64), (2, 2))
    """

    codes: UInt8[Array, "... bytes"]
    scales: Float[Array, "... outer"]
    scale_codes: UInt8[Array, "... groups"] | None = None
    offsets: Float[Array, "... outer"] | None = None
    group_size: int = field(default=64, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weights: `[..., d]`."""
        lead = self.codes.shape[:-1]
        if any(a.shape[:-1] != lead for a in jax.tree.leaves(self)):
            shapes = [a.shape for a in jax.tree.leaves(self)]
            raise TypeError(
                f"NF4Tensor: all arrays must share their leading dims, got {shapes}."
            )
        arrays = (self.codes, self.scale_codes, self.scales, self.offsets)
        return (*lead, nf4_width("NF4Tensor", *arrays, self.group_size))

    def __getitem__(self, index) -> "NF4Tensor":
        """Index leading dims: `stack[layer]`, `experts[ids]`, `rows[2:5]`."""
        if index is ...:
            return self
        check_leading_index(self, index)
        return jax.tree.map(lambda a: a[index], self)

    def __repr__(self) -> str:
        double = "" if self.scale_codes is None else ", quantised scales"
        return repr_of(self, f"nf4 / {self.group_size}{double}")


def nf4_width(
    op: str,
    codes: Array,
    scale_codes: Array | None,
    scales: Array,
    offsets: Array | None,
    group_size: int,
) -> int:
    """Weights in a row; TypeError in the name of `op` if the arrays do not fit."""
    d = 2 * codes.shape[-1]
    check_group_size(op, group_size, d)
    if codes.dtype != jnp.uint8 or (scale_codes is None) != (offsets is None):
        raise TypeError(
            f"{op}: `codes` must be uint8, and `scale_codes` and `offsets` come "
            f"together, got {codes.dtype}, {scale_codes} and {offsets}."
        )
    groups = d // group_size
    inner = scales if scale_codes is None else scale_codes
    outer = groups if scale_codes is None else -(-groups // OUTER_SIZE)
    ends = {inner.shape[-1] - groups, scales.shape[-1] - outer}
    if ends != {0} or (offsets is not None and offsets.shape != scales.shape):
        raise TypeError(
            f"{op}: rows of {d} weights have {groups} groups of {group_size} and "
            f"{outer} scales, got {inner.shape[-1]} and {scales.shape[-1]}."
        )
    return d


def check_group_size(op: str, group_size: int, d: int) -> None:
    if group_size < 2 or group_size % 2 or d % group_size:
        raise TypeError(
            f"{op}: `group_size` must be even and divide d = {d}, got {group_size}."
        )


@functools.cache
def dynamic_levels() -> np.ndarray:
    """The 256 levels in [-1, 1] of an 8-bit dynamic data type, ascending, float32.

    Seven decades, the lowest from 1e-7: decade i has 2**i levels of each sign, the
    middles of equal parts of [0.1, 1] times 10**(i - 6); and 0 and 1
    (https://arxiv.org/abs/2110.02861, section 2.1).
    """
    levels = [0.0, 1.0]
    for i in range(7):
        ends = np.linspace(0.1, 1, 2**i + 1)
        middles = 10.0 ** (i - 6) * (ends[:-1] + ends[1:]) / 2
        levels += [*middles, *-middles]
    return np.sort(np.array(levels, np.float32))


def decode_nf4(
    codes: UInt8[Array, "... bytes"],
    *scales: Array,
    group_size: int,
    dtype: jnp.dtype | None,
) -> Float[Array, "... d"]:
    """The weights, computed in float32 or wider, rounded to `dtype` if there is one.

    `scales`: absmax; or the scale codes, their scales and their offsets.
    """
    *lead, n = codes.shape
    wide = jnp.promote_types(scales[-1].dtype, jnp.float32)
    absmax = scales[0].astype(wide)
    if len(scales) > 1:
        scale_codes, outer, offsets = scales
        groups = scale_codes.shape[-1]

        def by_group(a: Float[Array, "... outer"]) -> Float[Array, "... groups"]:
            each = jnp.repeat(a.astype(wide)[..., None], OUTER_SIZE, axis=-1)
            return each.reshape(*lead, a.shape[-1] * OUTER_SIZE)[..., :groups]

        level = entries(jnp.asarray(dynamic_levels(), wide), scale_codes)
        absmax = level * by_group(outer) + by_group(offsets)
    code = jnp.stack([codes >> 4, codes & 15], axis=-1).astype(jnp.int32)
    code = code.reshape(*lead, 2 * n).reshape(*lead, 2 * n // group_size, group_size)
    values = (jnp.full_like(code, np.float32(v), dtype=wide) for v in LEVELS)
    w = lax.select_n(code, *values) * absmax[..., None]
    w = w.reshape(*lead, 2 * n)
    return w if dtype is None else w.astype(dtype)
