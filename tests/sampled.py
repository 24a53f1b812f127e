"""Tokens that kernels drew, against the rows in float64."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern import backend
from jaxkern.primitives.sampling.sample import sample_p

INF, NAN = np.inf, np.nan
ROUNDING = 2e-5  # of sums over a row in float32: where they decide, either is right


def special_rows(v):
    x = np.random.default_rng(3).standard_normal((8, v)).astype(np.float32)
    x[0] = -INF
    x[1] = NAN
    x[2, [5, v - 1]] = INF
    x[3] = 2.5  # all tie
    x[4, ::3] = NAN
    x[5] = -INF
    x[5, 77] = 0
    x[6] = np.round(x[6])
    x[7, ::2] = 3e38
    return x


def drawn(logits, u, kernels="triton", **options):
    """Tokens of `sample_p` by kernels; options are scalars or one per row."""
    full = dict(temperature=1.0, top_k=None, top_p=None, min_p=None) | options
    operands = [
        None
        if x is None
        else jnp.full(
            u.shape, jnp.asarray(x), jnp.int32 if name == "top_k" else jnp.float32
        )
        for name, x in full.items()
    ]
    with backend(kernels, strict=True):
        tokens = jax.jit(sample_p)(logits, jnp.float32(u), *operands)
    return np.asarray(tokens)


def check_token(row, u, token, temperature=1.0, top_k=None, top_p=None, min_p=None):
    """The token is kept, and u falls in its share of what is kept, in float64."""
    x = np.where(np.isnan(row), -INF, np.float64(row))
    best = x.max()
    if best == -INF or not temperature > 0:
        assert token == np.argmax(x)
        return
    with np.errstate(invalid="ignore"):  # inf - inf
        gap = np.where(x == best, 0, best - x)
    weight = np.where(gap < INF, np.exp(-gap / temperature), 0)
    if top_k is not None and 0 < top_k < len(x):
        weight[x < np.sort(x)[-top_k]] = 0
    surely = weight.copy()
    if top_p is not None and top_p < 1:
        order = np.argsort(-x, kind="stable")
        upto, total = np.cumsum(weight[order]), weight.sum()
        for kept, slack in ((surely, -ROUNDING), (weight, ROUNDING)):
            target = (top_p + slack) * total
            last = x[order[min(np.searchsorted(upto, target), len(x) - 1)]]
            kept[x < last] = 0
    if min_p is not None:
        weight[weight < min(min_p, 1) * (1 - ROUNDING)] = 0
        surely[surely < min(min_p, 1) * (1 + ROUNDING)] = 0
        surely[x == best] = 1
    assert weight[token] > 0, "a token that is cut was drawn"
    below, through = weight[:token].sum(), weight[: token + 1].sum()
    slack = weight.sum() - surely.sum() + ROUNDING * weight.sum()
    goal = u * weight.sum()
    assert below - slack <= goal <= through + slack


def check_rows(logits, u, kernels="triton", **options):
    tokens = drawn(logits, u, kernels, **options)
    check_tokens(logits, u, tokens, **options)


def check_tokens(logits, u, tokens, **options):
    rows = np.asarray(logits, np.float64)
    for i, (row, number, token) in enumerate(zip(rows, u, tokens, strict=True)):
        mine = {n: np.broadcast_to(x, u.shape)[i] for n, x in options.items()}
        check_token(row, float(np.float32(number)), token, **mine)
