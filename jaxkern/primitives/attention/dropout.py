"""Which weights of attention a dropout keeps: a hash of where each weight stands.

The bits of query row i and key row j of head n in sequence b are Threefry-2x32 with 20
rounds (Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405), the cipher of
`jax.random`, of the counter (i, j) under the two words that the caller's key gives
(b, n). So no mask is stored between the passes, and none depends on how the work is
cut: the words are cut as the heads are, and rows of queries and keys stay whole.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PRNGKeyArray, UInt32

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
GROUPS = 5  # of four rounds
PARITY = np.uint32(0x1BD11BDA)


def seeds_of(key: PRNGKeyArray, b: int, n: int) -> UInt32[Array, "b n 2"]:
    """Two words for each head of each sequence."""
    return jax.random.bits(key, (b, n, 2), jnp.uint32)


def kept(
    seeds: UInt32[Array, "b n 2"], rate: float, t: int, s: int, first_row
) -> Bool[Array, "b n t s"]:
    """True where a weight is kept, for the query rows from `first_row` on."""
    rows = (jnp.arange(t) + first_row).astype(jnp.uint32)[:, None]
    keys = jnp.arange(s).astype(jnp.uint32)
    words = seeds[..., None, None]
    bits, _ = threefry(words[:, :, 0], words[:, :, 1], rows, keys)
    dropped = np.uint32(min(round(rate * 2**32), 2**32 - 1))
    return bits >= dropped


def threefry(key0, key1, x, y):
    """The two words of the block that the counter (x, y) has under (key0, key1)."""
    keys = key0, key1, key0 ^ key1 ^ PARITY
    x, y = x + keys[0], y + keys[1]
    for group in range(GROUPS):
        for distance in ROTATIONS[group % 2]:
            x = x + y
            y = ((y << distance) | (y >> (32 - distance))) ^ x
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + np.uint32(group + 1)
    return x, y
