"""What a process with enough threads runs: python -m tests.pallas.interpreted_decode

The decode kernel of Hopper on six multiprocessors, in three clusters, with NaN behind
the keys that are seen.
"""

import sys

import jax.numpy as jnp

from jaxkern.pallas.attention.decode import attention as hopper
from jaxkern.pallas.attention.decode import decode_walk
from tests.pallas.attention.test_attention import check, operands
from tests.pallas.quick_callbacks import take_numpy

ALIKE, UNEVEN = [256, 250, 211, 240], [256, 0, 1, 140]
OFFSET = [5, 500, -3, 299]
CASES = {  # (b, s, k, group, h), kv_lengths, q_offset, options
    "alone": [
        ((4, 256, 2, 4, 128), None, None, {}),
        ((4, 256, 2, 4, 128), ALIKE, None, {}),
        ((4, 256, 2, 4, 128), UNEVEN, None, {}),
    ],
    "divided": [
        ((4, 256, 2, 4, 128), UNEVEN, None, {}),
        ((9, 256, 1, 8, 128), [256, 1, 9, 25, 17, 20, 3, 1, 12], None, {}),
    ],
    "together": [
        ((2, 384, 2, 4, 128), None, None, {}),
        ((2, 384, 2, 4, 128), [384, 380], None, {"scale": -0.3}),
        ((2, 384, 2, 4, 128), [900, -3], None, {}),
        ((1, 384, 2, 4, 128), [300], None, {}),
    ],
    "causal": [
        ((4, 384, 2, 4, 128), [0, 384, 100, 300], OFFSET, {"causal": True}),
        ((4, 384, 2, 4, 128), None, OFFSET, {"causal": True}),
    ],
    "dims": [
        ((4, 520, 2, 2, 64), [520, 0, 65, 7], None, {}),
        ((4, 520, 2, 2, 64), None, None, {}),
        ((4, 72, 2, 8, 256), [72, 0, 65, 7], None, {}),
    ],
    "many": [((40, 128, 1, 1, 128), [37 * i % 129 for i in range(40)], None, {})],
}


def check_decode(shape, lengths, offset, options) -> None:
    b, s, k, group, h = shape
    q, key, value = operands(b, 1, s, k, group, h)
    arrays = {}
    if offset is not None:
        arrays["q_offset"] = jnp.array(offset)
    if lengths is not None:
        arrays["kv_lengths"] = jnp.array(lengths)
        behind = (jnp.arange(s) >= arrays["kv_lengths"][:, None])[:, :, None, None]
        key, value = (jnp.where(behind, jnp.nan, x) for x in (key, value))
    clean = [jnp.nan_to_num(x) for x in (key, value)]

    def fwd(q, _, __, *rest, **options):
        return hopper.attention(q, key, value, *rest, **options)

    check(q, *clean, fwd=fwd, **arrays, **options)


def main(name: str) -> None:
    hopper.num_sms = lambda: 6
    if name == "divided":
        decode_walk.MERGE_BYTES = 0
    for case in CASES[name]:
        check_decode(*case)


if __name__ == "__main__":
    take_numpy()
    main(*sys.argv[1:])
