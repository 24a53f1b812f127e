"""`Dropout`, and which weights of attention it keeps: a hash of where each stands.

The bits of query row i and key row j of head n in sequence b are Threefry-2x32 with 20
rounds (Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405), the cipher of
`jax.random`, of the counter (i, j) under the two words that the caller's key gives
(b, n). So no mask is stored between the passes, and none depends on how the work is
cut: the words are cut as the heads are, and rows of queries and keys stay whole.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PRNGKeyArray, UInt32

from jaxkern.primitives.check_arguments import check_fields

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
GROUPS = 5  # of four rounds
PARITY = np.uint32(0x1BD11BDA)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dropout:
    """Weights of attention that count as 0 in training; the others grow by as much.

        weight = exp(S - lse) / (1 - rate) where kept, 0 where dropped

    Which ones follows from the key and from sequence, head, query row and key row
    alone: both passes, `jit`, `checkpoint` and every sharding drop the same. Inside
    `shard_map`, and where keys are cut for `merge_partials`, rows and sequences count
    from the own part: fold the part's number into the key.

    A pytree of its key; the rate is static. None in its place drops nothing.

    Attributes:
      rate: the share that is dropped, in [0, 1).
      key: a PRNG key, used once. Rows of `vmap` with one key drop the same weights; map
        over keys for others.

    Example:
      >>> x = jnp.ones((1, 4, 2, 8))
      >>> dropout = jaxkern.Dropout(0.5, jax.random.key(0))
      >>> jaxkern.attention(x, x, x, causal=True, dropout=dropout)[0, :, 0, 0]
      Array([0., 1., 0., 1.], dtype=float32)
    """

    rate: float = field(metadata={"static": True})
    key: PRNGKeyArray

    def __post_init__(self):
        check_fields(self)
        if not 0 <= self.rate < 1:
            raise ValueError(
                f"Dropout: `rate` is {self.rate}. It is the share of weights that are "
                "dropped: 0 or more and below 1."
            )


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
