"""Gradients where one key takes nearly all weight, as the first of a text often does.

dS = P (dP - delta) is then a small difference of large numbers. Random scores, of which
all other checks are, have no such row: their dP differ as much as they are large.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import attention, backend

SINKS = 8.0, 10.0, 12.0  # of one key above the others
# relative errors; float16 has few bits of the weights of 1e-5 that the others have
LIMIT = {"bfloat16": 4e-3, "float16": 2e-3}


def truth(q, k, v, dout, **options):
    """(dq, dk, dv) in float64."""
    with jax.enable_x64(True), backend("xla"):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in (q, k, v, dout)]
        options = {
            n: jnp.asarray(np.asarray(x, np.float64)) if n == "bias" else x
            for n, x in options.items()
        }
        pull = jax.vjp(lambda *x: attention(*x, **options), *wide[:3])[1]
        return [np.asarray(x) for x in pull(wide[3])]


def errors(found, expected) -> list[float]:
    both = [
        (np.asarray(y, np.float64), e) for y, e in zip(found, expected, strict=True)
    ]
    return [float(np.linalg.norm(y - e) / np.linalg.norm(e)) for y, e in both]


def draw(h: int, dtype: str, t: int = 128) -> list[jax.Array]:
    """q, k, v and dout of two query heads on one key head."""
    rng = np.random.default_rng(h)
    shapes = [(1, t, n, h) for n in (2, 1, 1, 2)]
    return [jnp.asarray(rng.standard_normal(x), dtype) for x in shapes]


def first_wins(q, k, by: float):
    """Keys of which the first one's scores are more by `by` for every query."""
    h = q.shape[3]
    q = q.at[..., 0].set(4.0)
    return q, k.at[..., 0].set(0.0).at[:, 0].set(0.0).at[:, 0, :, 0].set(
        by * h**0.5 / 4.0
    )


def slopes_of(q, k, v, bias, dout):
    """(dq, dk, dv); without a bias queries are causal."""
    pull = jax.vjp(lambda *x: attention(*x, bias=bias, causal=bias is None), q, k, v)[1]
    return pull(dout)


def check_sink(attend: Callable, h: int, dtype: str, sinks=SINKS) -> None:
    """`attend(q, k, v, bias, dout)` gives dq, dk and dv."""
    q, k, v, dout = draw(h, dtype)
    for sink in sinks:
        bias = jnp.zeros((1, 1, 1, k.shape[1]), jnp.float32).at[..., 5].set(sink)
        found = errors(attend(q, k, v, bias, dout), truth(q, k, v, dout, bias=bias))
        assert max(found) < LIMIT[dtype], (sink, found)


def check_first_key(attend: Callable, h: int, dtype: str, sinks=SINKS) -> None:
    q, k, v, dout = draw(h, dtype)
    for sink in sinks:
        given = *first_wins(q, k, sink), v
        found = errors(attend(*given, None, dout), truth(*given, dout, causal=True))
        assert max(found) < LIMIT[dtype], (sink, found)


# At 12 the other keys' share of `out` stands in the last bits of a float32, and sums of
# tensor cores lose more of these than those of the interpreters.
ON_A_CARD = [
    (check_sink, "bfloat16", SINKS),
    (check_sink, "float16", SINKS),
    (check_first_key, "bfloat16", SINKS[:2]),
    (check_first_key, "float16", SINKS),
    pytest.param(
        *(check_first_key, "bfloat16", SINKS[2:]),
        marks=pytest.mark.xfail(
            strict=True, reason="0.9 % where the interpreters have 0.4"
        ),
    ),
]
