"""4-bit floats (e2m1): 0, 1/2, 1, 3/2, 2, 3, 4, 6, their negatives; two in a byte.

Three layouts of the codes of a matrix are in use, see `pack_fp4`.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt8

from jaxkern.primitives.check_arguments import check_arguments

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LAYOUTS = ("pairs_d", "pairs_f", "half_split")


def encode_e2m1(x: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """The nearest codes, ties to the even code; beyond 6, and for NaN, the code of 6.

    The sign of a zero is kept, as in the casts of ml_dtypes.
    """
    size = jnp.abs(x)
    # between codes c and c + 1, a tie goes up where c + 1 is even
    up = (size > 0.25, size >= 0.75, size > 1.25, size >= 1.75, size > 2.5)
    up = (*up, size >= 3.5, size > 5)
    code = sum(step.astype(jnp.uint8) for step in up)
    code = jnp.where(jnp.isnan(x), jnp.uint8(7), code)
    return code | jnp.signbit(x).astype(jnp.uint8) << 3


def decode_e2m1(codes: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """The values of codes below 16, in float32: exact."""
    values = (*E2M1, *(-v for v in E2M1))
    cases = (jnp.full_like(codes, v, dtype=jnp.float32) for v in values)
    return lax.select_n(codes.astype(jnp.int32), *cases)


def pack_pairs(codes: UInt8[Array, "... d"]) -> UInt8[Array, "... d/2"]:
    """Two codes a byte, the first one low; d must be even."""
    *lead, d = codes.shape
    low, high = jnp.moveaxis(codes.reshape(*lead, d // 2, 2), -1, 0)
    return low | high << 4


def unpack_pairs(packed: UInt8[Array, "... d/2"]) -> UInt8[Array, "... d"]:
    """The inverse of `pack_pairs`."""
    *lead, n = packed.shape
    return jnp.stack([packed & 15, packed >> 4], axis=-1).reshape(*lead, 2 * n)


@check_arguments
def pack_fp4(
    codes: UInt8[Array, "f d"], layout: str, *, group_size: int | None = None
) -> UInt8[Array, "..."]:
    """Packs the 4-bit codes of a matrix, two in a byte.

    | layout | shape | a byte holds | used by |
    |---|---|---|---|
    | pairs_d | `[f, d / 2]` | (i, 2j) low, (i, 2j + 1) high | MLX, cuBLAS, here |
    | pairs_f | `[ceil(d * f / 2)]` | neighbours of the transposed `[d, f]` | RLX |
    | half_split | `[f, d / 2]` | element j and j + size / 2 of a group | ggml |

    Args:
      codes: `[f, d]`, each below 16.
      layout: "pairs_d", "pairs_f" or "half_split".
      group_size: of "half_split": 32 for ggml's MXFP4, 16 for its NVFP4.

    Returns:
      uint8, of the shape in the table.

    Raises:
      ValueError: the layout is none of these, or does not fit the shape.

    Example:
      >>> codes = jnp.array([[1, 2, 3, 4]], jnp.uint8)
      >>> jaxkern.pack_fp4(codes, "pairs_d")  # the first of two is low
      Array([[33, 67]], dtype=uint8)
    """
    check_layout("pack_fp4", layout, codes.shape, group_size)
    if layout == "pairs_d":
        return pack_pairs(codes)
    if layout == "pairs_f":
        line = codes.T.reshape(codes.size)
        return pack_pairs(jnp.pad(line, (0, codes.size % 2)))
    assert group_size is not None
    f, d = codes.shape
    halves = codes.reshape(f, d // group_size, 2, group_size // 2)
    return (halves[..., 0, :] | halves[..., 1, :] << 4).reshape(f, d // 2)


@check_arguments
def unpack_fp4(
    packed: UInt8[Array, "..."],
    layout: str,
    shape: tuple[int, int],
    *,
    group_size: int | None = None,
) -> UInt8[Array, "f d"]:
    """The inverse of `pack_fp4`: the codes of a matrix.

    Args:
      packed: uint8, of the shape in the table of `pack_fp4`.
      layout: "pairs_d", "pairs_f" or "half_split".
      shape: (f, d).
      group_size: of "half_split", see `pack_fp4`.

    Returns:
      `[f, d]`, each code below 16.

    Raises:
      ValueError: the layout is none of these, or does not fit the shape.

    Example:
      >>> packed = jnp.array([[33, 67]], jnp.uint8)
      >>> jaxkern.unpack_fp4(packed, "pairs_d", (1, 4))
      Array([[1, 2, 3, 4]], dtype=uint8)
    """
    check_layout("unpack_fp4", layout, shape, group_size)
    f, d = shape
    expected = (-(-f * d // 2),) if layout == "pairs_f" else (f, d // 2)
    if packed.shape != expected:
        raise ValueError(
            f"unpack_fp4: {layout} codes of {shape} have shape {expected}, got "
            f"{packed.shape}."
        )
    if layout == "pairs_d":
        return unpack_pairs(packed)
    if layout == "pairs_f":
        return unpack_pairs(packed)[: f * d].reshape(d, f).T
    assert group_size is not None
    groups = packed.reshape(f, d // group_size, group_size // 2)
    return jnp.concatenate([groups & 15, groups >> 4], axis=-1).reshape(f, d)


def check_layout(
    op: str, layout: str, shape: tuple[int, ...], group_size: int | None
) -> None:
    if layout not in LAYOUTS:
        raise ValueError(
            f"{op}: `layout` must be one of {', '.join(LAYOUTS)}, got {layout!r}."
        )
    if layout == "pairs_d" and shape[-1] % 2:
        raise ValueError(f"{op}: pairs need an even last dim, got {shape}.")
    if layout == "half_split" and (not group_size or shape[-1] % group_size):
        raise ValueError(
            f"{op}: half_split needs a `group_size` that divides {shape[-1]}, got "
            f"{group_size}."
        )
