"""Bytes of the block formats of the library to test with."""

import numpy as np

from jaxkern.primitives.quant.tile_formats import NARROW


def put_numbers(rng: np.random.Generator, qtype: str, blocks: np.ndarray) -> None:
    """Those before the codes, of weights of size 0.1, into blocks `[..., bytes]`."""
    shape = blocks.shape[:-1]
    if qtype == "NVFP4_256":  # all scales but NaN
        d = rng.uniform(0.0005, 0.001, shape).astype(np.float32)
        blocks[..., :4] = d[..., None].view(np.uint8)
        nan = blocks[..., 4:20] % 128 == 127
        blocks[..., 4:20] -= nan.astype(np.uint8)
        return
    kind, _, name = qtype.split("_")
    scale = rng.uniform(0.005, 0.02, shape)
    other = -8 * scale * rng.uniform(0.5, 1.0, shape)
    if kind == "INT4":
        other = rng.uniform(0, 15, shape)
    for at, number in ((0, scale), (2, other)):
        narrow = number.astype(NARROW[name])[..., None]
        blocks[..., at : at + 2] = narrow.view(np.uint8)
