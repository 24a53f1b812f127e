"""Bytes of GGUF blocks to test with."""

import gguf
import jax.numpy as jnp
import numpy as np

from jaxkern.primitives.quant.gguf_blocks import BLOCK_FORMATS
from jaxkern.primitives.quant.gguf_tensor import GGUFTensor
from jaxkern.testing.checks import Spec

QTYPES = list(BLOCK_FORMATS)


def random_blocks(qtype: str, *shape: int, seed: int = 0) -> np.ndarray:
    """Every bit random, so also infinite, NaN, subnormal and negative scales."""
    form = BLOCK_FORMATS[qtype]
    row_bytes = shape[-1] // form.elements * form.bytes
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (*shape[:-1], row_bytes), dtype=np.uint8)


def decoded(blocks: np.ndarray, qtype: str) -> np.ndarray:
    """Float32 weights by the `gguf` package, which knows only the size of Q8_K."""
    if qtype == "Q8_K":
        return decoded_q8_k(blocks)
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[qtype])


Q8_K = np.dtype([("d", "<f4"), ("qs", "i1", 256), ("bsums", "<i2", 16)])


def decoded_q8_k(blocks: np.ndarray) -> np.ndarray:
    fields = np.ascontiguousarray(blocks).view(Q8_K)
    with np.errstate(all="ignore"):
        values = fields["d"][..., None] * fields["qs"].astype(np.float32)
    return values.reshape(*blocks.shape[:-1], -1)


def weight(qtype: str, *shape: int, seed: int = 0) -> tuple[GGUFTensor, np.ndarray]:
    """A tensor of weights of size about 1, and its float64 values."""
    blocks = quiet_bytes(*random_blocks(qtype, *shape).shape)(
        np.random.default_rng(seed)
    )
    values = decoded(blocks, qtype).astype(np.float64)
    return GGUFTensor(jnp.asarray(blocks), qtype), values


def quiet_bytes(*shape: int) -> Spec:
    """Bytes that read as an f16 between 0.008 and 0.11 wherever they stand.

    So a batch that shifts them by one, as the generic checks do, has no huge scale.
    """
    return Spec(shape, np.uint8, lambda rng, s: rng.integers(0x20, 0x30, s))
