"""What a process with enough threads runs: python -m tests.pallas.interpreted_rows D KB

Odd rows, infinities, NaN, wrong labels, against the references.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern.pallas.activation.softmax import softmax_bwd, softmax_fwd
from jaxkern.pallas.loss.cross_entropy import weighted_cross_entropy_fwd
from jaxkern.pallas.rows import plan as plans
from jaxkern.primitives.activation.softmax import (
    softmax_bwd_reference,
    softmax_reference,
)
from jaxkern.primitives.loss.cross_entropy import weighted_cross_entropy_fwd_reference
from tests.pallas.quick_callbacks import take_numpy

ROWS = 9  # two rounds of four clusters, and one more


def check(found, expected) -> None:
    for y, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        y, e = np.asarray(y, np.float32), np.asarray(e, np.float32)
        np.testing.assert_allclose(y, e, rtol=2**-7, atol=1e-6)


def main(d: int, kilobytes: int) -> None:
    plans.num_sms = lambda: 8
    plans.SHARED = kilobytes * 1024
    keys = jax.random.split(jax.random.key(0), 4)
    x = 3 * jax.random.normal(keys[0], (ROWS, d))
    x = x.at[0].set(-jnp.inf).at[1, 3].set(jnp.inf).at[2, d - 1].set(jnp.nan)
    x = x.at[3, : d // 2 + 7].set(-jnp.inf).at[3, -7:].set(-jnp.inf)
    x = x.astype(jnp.bfloat16)
    for scale in (0.7, -0.7):
        y = softmax_fwd(x, None, scale=scale, interpret=True)
        check(y, softmax_reference(x, None, scale=scale))
    dy = jax.random.normal(keys[1], (ROWS, d)).astype(jnp.bfloat16)
    dx = softmax_bwd(y, dy, scale=0.7, interpret=True)
    check(dx, softmax_bwd_reference(y, dy, scale=0.7))

    labels = jax.random.randint(keys[2], (ROWS,), 0, d)
    labels = labels.at[4].set(-100).at[5].set(d)
    weight = jax.random.uniform(keys[3], (ROWS,))
    options = dict(label_smoothing=0.0, z_loss=1e-2, softcap=None, ignore_index=-100)
    check(
        weighted_cross_entropy_fwd(x, labels, weight, **options, interpret=True),
        weighted_cross_entropy_fwd_reference(x, labels, weight, **options),
    )


if __name__ == "__main__":
    take_numpy()
    main(*map(int, sys.argv[1:]))
