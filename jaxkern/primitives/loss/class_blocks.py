"""Blocks of classes: the rows of a weight `[v, d]` and the logits that they make."""

import jax.numpy as jnp
from jax import lax


def logits_dtype(x, weight):
    return jnp.result_type(x.dtype, weight.dtype, jnp.float32)


def logits_of(x, rows, biases=None):
    logits = jnp.einsum(
        "...d,vd->...v", x, rows, preferred_element_type=logits_dtype(x, rows)
    )
    return logits if biases is None else logits + biases.astype(logits.dtype)


def biases_at(bias, classes):
    """Of a block of classes, as `rows_at` has them."""
    if bias is None or not classes.shape[0]:
        return bias
    return lax.dynamic_slice_in_dim(bias, classes[0], classes.shape[0])


def size_of_blocks(num_tokens: int, v: int, block_size: int | None) -> int:
    """`block_size`, or blocks of about equal size for which products are fast."""
    if block_size is None:
        known = isinstance(num_tokens, int)  # not symbolic
        most = max(2**27 // max(num_tokens, 1), 4096) if known else 4096
        num_blocks = max(-(-v // most), 1)
        block_size = -(-v // (256 * num_blocks)) * 256
    return min(block_size, v)


def blocks_of(num_tokens, weight, block_size):
    """Where the blocks of classes start, and their size."""
    v = weight.shape[0]
    block = size_of_blocks(num_tokens, v, block_size)
    return jnp.arange(0, v, max(block, 1)), block


def rows_at(weight, start, block):
    """A block of rows, their classes, and which of them no earlier block had.

    The last block begins early enough to be whole, so that nothing is padded.
    """
    first = jnp.minimum(start, weight.shape[0] - block)
    classes = first + jnp.arange(block)
    rows = lax.dynamic_slice_in_dim(weight, first, block)
    return rows, classes, classes >= start
