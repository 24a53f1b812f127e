"""Cuts images into patches and puts them together: pure data movement."""

import jax.numpy as jnp
from jaxtyping import Array, Shaped

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.vision.window import Layout, Pair, from_nchw, pair, to_nchw


@check_arguments
def patchify(
    x: Shaped[Array, "... channel height width"],
    patch: int | Pair,
    *,
    layout: Layout = "NCHW",
) -> Shaped[Array, "... patches numbers"]:
    """Cuts images into patches that do not overlap, a row of numbers each (im2col).

        patches[..., r * (width / pw) + q, (c * ph + i) * pw + j] =
            x[..., c, r * ph + i, q * pw + j]

    Patches are in row-major order, each in the order of a weight `[out, c, ph, pw]`: a
    vision transformer's embedding is `patchify(x, p) @ weight.reshape(out, -1).T`.
    `torch.nn.functional.unfold` is the same, transposed. With layout="NHWC" each patch
    has the order (i, j, c), that of a weight `[ph, pw, c, out]`.

    Source: https://arxiv.org/abs/2010.11929.

    Args:
      x: `[..., channel, height, width]`, or with layout="NHWC"
        `[..., height, width, channel]`; any dtype.
      patch: one number, or (ph, pw); must divide height and width.
      layout: "NCHW" or "NHWC".

    Returns:
      patches: `[..., height / ph * width / pw, channel * ph * pw]`, dtype of x.

    Raises:
      ValueError: the patch does not divide the image.

    Example:
      >>> image = jnp.arange(8).reshape(1, 2, 4)  # one channel
      >>> jaxkern.patchify(image, 2)
      Array([[0, 1, 4, 5],
             [2, 3, 6, 7]], dtype=int32)
    """
    x = to_nchw("patchify", x, layout)
    *lead, c, height, width = x.shape
    rows, columns, ph, pw = grid("patchify", height, width, patch)
    cut = x.reshape(*lead, c, rows, ph, columns, pw)
    cut = jnp.moveaxis(cut, (-4, -2), (-5, -4))  # [rows columns c ph pw]
    return from_nchw(cut, layout).reshape(*lead, rows * columns, c * ph * pw)


@check_arguments
def unpatchify(
    patches: Shaped[Array, "... patches numbers"],
    patch: int | Pair,
    height: int,
    width: int,
    *,
    layout: Layout = "NCHW",
) -> Shaped[Array, "... channel height width"]:
    """The inverse of `patchify`, and its transpose.

    Args:
      patches: `[..., height / ph * width / pw, channel * ph * pw]`, any dtype.
      patch: one number, or (ph, pw).
      height, width: of the image.
      layout: that of the image, and with it the order within a patch; see patchify.

    Returns:
      x: `[..., channel, height, width]`, or that in layout.

    Raises:
      ValueError: sizes do not fit.

    Example:
      >>> patches = jnp.array([[0, 1, 4, 5], [2, 3, 6, 7]])
      >>> jaxkern.unpatchify(patches, 2, 2, 4)
      Array([[[0, 1, 2, 3],
              [4, 5, 6, 7]]], dtype=int32)
    """
    rows, columns, ph, pw = grid("unpatchify", height, width, patch)
    *lead, count, numbers = patches.shape
    if count != rows * columns or numbers % (ph * pw):
        raise ValueError(
            f"unpatchify: an image of {height} x {width} pixels has {rows * columns} "
            f"patches of {ph} x {pw}, got {count} with {numbers} numbers each."
        )
    c = numbers // (ph * pw)
    order = (c, ph, pw) if layout == "NCHW" else (ph, pw, c)
    cut = to_nchw("unpatchify", patches.reshape(*lead, rows, columns, *order), layout)
    cut = jnp.moveaxis(cut, (-5, -4), (-4, -2))  # [c rows ph columns pw]
    return from_nchw(cut.reshape(*lead, c, height, width), layout)


@check_arguments
def block_merge(
    x: Shaped[Array, "... height width d"], m: int = 2
) -> Shaped[Array, "... tokens d"]:
    """Orders a grid of tokens so that each m x m block is contiguous (Qwen-VL).

        y[..., (r * (width / m) + q) * m * m + i * m + j] = x[..., r * m + i, q * m + j]

    Reshaped to `[..., height * width / m**2, m**2 * d]` a row is a block.

    Args:
      x: `[..., height, width, d]`, any dtype.
      m: must divide height and width.

    Returns:
      y: `[..., height * width, d]`, dtype of x.

    Raises:
      ValueError: m does not divide the grid.

    Example:
      >>> grid = jnp.arange(8).reshape(2, 4, 1)
      >>> jaxkern.block_merge(grid)[:, 0]
      Array([0, 1, 4, 5, 2, 3, 6, 7], dtype=int32)
    """
    *lead, height, width, d = x.shape
    return patchify(x, m, layout="NHWC").reshape(*lead, height * width, d)


@check_arguments
def block_unmerge(
    x: Shaped[Array, "... tokens d"], height: int, width: int, m: int = 2
) -> Shaped[Array, "... height width d"]:
    """The inverse of `block_merge`: `[..., height * width, d]` to a grid.

    Args:
      x: `[..., height * width, d]`, any dtype, block after block.
      height, width: of the grid, in tokens; multiples of m.
      m: side of a block.

    Returns:
      `[..., height, width, d]`, dtype of x.

    Raises:
      ValueError: the tokens do not fill the grid in such blocks.

    Example:
      >>> tokens = jnp.array([0, 1, 4, 5, 2, 3, 6, 7]).reshape(8, 1)
      >>> jaxkern.block_unmerge(tokens, 2, 4)[:, :, 0]
      Array([[0, 1, 2, 3],
             [4, 5, 6, 7]], dtype=int32)
    """
    *lead, tokens, d = x.shape
    if tokens != height * width or tokens % (m * m):
        raise ValueError(
            f"block_unmerge: `x` must have {height} x {width} tokens in blocks of "
            f"{m} x {m}, got {tokens}."
        )
    blocks = x.reshape(*lead, tokens // (m * m), m * m * d)
    return unpatchify(blocks, m, height, width, layout="NHWC")


def grid(op: str, height: int, width: int, patch: int | Pair) -> tuple[int, ...]:
    """(rows of patches, columns, height of a patch, width)."""
    ph, pw = pair(op, "patch", patch)
    if height % ph or width % pw:
        raise ValueError(
            f"{op}: `patch` must divide the {height} x {width} image, got {ph} x {pw}."
        )
    return height // ph, width // pw, ph, pw
