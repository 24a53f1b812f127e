"""What a process with enough threads runs: python -m tests.pallas.interpreted_sampling

Rows of clusters of one, two and eight, odd and special ones, against float64.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxkern.pallas.sampling.sample import plan as plans
from jaxkern.pallas.sampling.sample.fwd import sample
from tests.pallas.quick_callbacks import take_numpy
from tests.sampled import check_tokens, special_rows


def check(logits, u, **options):
    def per_row(name) -> Any:
        x = options.get(name)
        return None if x is None else jnp.full(u.shape, jnp.asarray(x), jnp.float32)

    tokens = sample(
        logits,
        jnp.asarray(u),
        per_row("temperature"),
        None,
        per_row("top_p"),
        per_row("min_p"),
        interpret=True,
    )
    check_tokens(logits, u, np.asarray(tokens), **options)


def main() -> None:
    rng = np.random.default_rng(0)
    plans.num_sms = lambda: 16  # four rows are few
    x = np.concatenate([special_rows(1280), 3 * rng.standard_normal((2, 1280))])
    u = rng.random(10).astype(np.float32)
    temperature = np.resize([0.8, 1.3, 0.0], 10)
    check(jnp.asarray(x, jnp.float32), u, temperature=temperature, top_p=0.9)
    check(jnp.asarray(x, jnp.bfloat16), u, temperature=1.0, top_p=0.6, min_p=0.02)
    flat = 1e-9 * rng.standard_normal((2, 9600))
    flat[1] += 4
    check(jnp.asarray(flat, jnp.float32), u[:2], temperature=1.0, top_p=0.5)
    plans.RESIDENT = 20_000
    # in two pieces, the last of them not full
    long = jnp.asarray(2 * rng.standard_normal((5, 8128)), jnp.float32)
    check(long, u[:5], temperature=1.0, top_p=np.array([0.9, 0, 1, 0.5, 0.99]))


if __name__ == "__main__":
    take_numpy()
    main()
