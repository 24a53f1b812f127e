"""Draws of operators that choose among many: sorts, maxima, tokens, experts."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkern
from benchmarks._drawn.draw import Draw, Source, in_words, normals, with_options
from jaxkern.primitives.sampling.sample import sample_p
from tests.sampled import check_tokens

VOCABULARIES = (32000, 50257, 128256, 151936, 262144, 10**6)
TEMPERATURE = 0.8


def first_of(f: Callable, low: int) -> Callable:
    """Draws of an operator on rows of floats without options."""

    def draw(source: Source) -> Draw:
        shape, dtype = source.matrix(low, 2**20, VOCABULARIES), source.dtype()
        return Draw(f"{in_words(*shape)} {dtype}", normals(dtype, shape), f)

    return draw


def top_k(source: Source) -> Draw:
    rows, v = source.matrix(8, 2**20, (128, 256, 512, *VOCABULARIES))
    k = source.size(1, min(1024, v), (6, 8, 64))
    dtype = source.dtype()
    return Draw(
        f"{in_words(rows, v, k=k)} {dtype}",
        normals(dtype, (rows, v)),
        functools.partial(jaxkern.top_k, k=k),
    )


def sorted_draw(logits, uniform, *, top_k, top_p, min_p):
    """As programs without the operator sample: the cuts by a sort of all tokens."""
    p = jax.nn.softmax(logits.astype(jnp.float32) / TEMPERATURE)
    ordered = jnp.sort(p, descending=True)
    if top_k is not None and top_k < p.shape[-1]:
        p = jnp.where(p >= ordered[:, top_k - 1 : top_k], p, 0)
        ordered = ordered.at[:, top_k:].set(0)
    upto = jnp.cumsum(ordered, -1)
    last = jnp.sum(upto < top_p * upto[:, -1:], -1, keepdims=True)
    least = jnp.take_along_axis(ordered, last, -1)
    p = jnp.where(p >= jnp.maximum(least, (min_p or 0) * ordered[:, :1]), p, 0)
    cdf = jnp.cumsum(p, -1)
    return jnp.sum(cdf <= uniform[:, None] * cdf[:, -1:], -1)


def sample(source: Source) -> Draw:
    rows, v = source.size(1, 256), source.size(64, 2**18, VOCABULARIES)
    rows = min(rows, max(1, source.elements // v))
    cuts: dict[str, Any] = dict(
        top_k=source.one_of((None, 1, 40, 64, 1000)),
        top_p=source.one_of((None, None, 0.5, 0.9, 0.99)),
        min_p=source.one_of((None, None, 0.05)),
    )
    scale, dtype = source.one_of((1.0, 4.0)), source.dtype()

    def arrays(key):
        logits = scale * jax.random.normal(key, (rows, v))
        return logits.astype(dtype), jax.random.uniform(key, (rows,))

    def f(logits, uniform):
        def per_row(x, dtype):
            return None if x is None else jnp.full(uniform.shape, x, dtype)

        return sample_p(
            logits,
            uniform,
            per_row(TEMPERATURE, jnp.float32),
            per_row(cuts["top_k"], jnp.int32),
            per_row(cuts["top_p"], jnp.float32),
            per_row(cuts["min_p"], jnp.float32),
        )

    def check(operands, tokens):
        """Sixteen rows: each is a sort in float64."""
        logits, uniform, ids = (np.asarray(x[:16]) for x in (*operands, tokens))
        check_tokens(logits, uniform, ids, temperature=TEMPERATURE, **cuts)

    title = f"{in_words(rows, v, scale=scale, **cuts)} {dtype}"
    if cuts["top_p"] is None:
        return Draw(title, arrays, f, check=check)
    peers = {"XLA, by a sort": functools.partial(sorted_draw, **cuts)}
    return Draw(title, arrays, f, peers=peers, reference=False, check=check)


def route(source: Source) -> Draw:
    tokens = source.size(1, min(65536, source.elements // 64), (4096, 8192, 16384))
    e = source.one_of((8, 16, 32, 60, 64, 128, 160, 256, 384, 512))
    k = source.one_of([k for k in (1, 2, 4, 6, 8, 10) if k <= e])
    options: dict[str, Any] = dict(score=source.one_of(("softmax", "sigmoid")))
    options["normalize"] = source.chance(0.7)
    if e % 8 == 0 and e >= 64 and source.chance(0.3):
        options |= dict(num_groups=8, top_groups=4)
    dtype = source.one_of(("float32", "float32", "bfloat16"))
    return Draw(
        f"{in_words(tokens, e, k=k, **options)} {dtype}",
        normals(dtype, (tokens, e)),
        with_options(functools.partial(jaxkern.route, k=k), **options),
        differing=1e-4,
    )


GENERATORS = {
    "top_k": top_k,
    "argmax": first_of(jaxkern.argmax, 2),
    "argsort": first_of(jaxkern.argsort, 8),
    "sample": sample,
    "route": route,
}
