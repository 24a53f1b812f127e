"""A few tokens through packed experts on a GPU, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    backend,
    dequantize,
    interleave,
    moe_ffn,
    quantize_gguf,
    quantize_int,
    quantize_microscaled,
)
from tests.gpu.quant.row_checks import normal, on_the_cpu, rounded
from tests.gpu.truth import on_a_gpu, poison, relative_error

pytestmark = on_a_gpu

E, D, F = 6, 512, 256
FORMS = {
    "Q4_K": lambda w: interleave(quantize_gguf(w, "Q4_K")),
    "Q8_0": lambda w: interleave(quantize_gguf(w, "Q8_0")),
    "int4": functools.partial(quantize_int, bits=4, group_size=32),
    "mxfp4": functools.partial(quantize_microscaled, format="mxfp4"),
}
GPT_OSS = dict(alpha=1.702, limit=7.0, up_offset=1.0)


def by_slots(x, ids, weights, experts, biases, options):
    """One slot after the other, in the arrays' dtype."""
    (gate, up, down), alpha = experts, options.get("alpha", 1.0)
    limit, offset = options.get("limit", np.inf), options.get("up_offset", 0.0)
    y = np.zeros((len(x), down.shape[1]))
    for t, j in np.ndindex(ids.shape):
        if not 0 <= (e := ids[t, j]) < len(gate):
            continue
        z, u = (w[e] @ x[t] + b[e] for w, b in zip((gate, up), biases, strict=False))
        z, u = np.minimum(z, limit), np.clip(u, -limit, limit)
        hidden = z / (1 + np.exp(-alpha * z)) * (u + offset)
        y[t] += weights[t, j] * (down[e] @ hidden + biases[2][e])
    return y


@pytest.mark.parametrize("tokens, k", [(1, 4), (5, 2), (8, 8)])
@pytest.mark.parametrize("form", FORMS)
def test_a_few_tokens(form, tokens, k):
    packed, values = zip(
        *(
            on_the_cpu(FORMS[form], normal(shape, seed) / shape[-1] ** 0.5)
            for seed, shape in enumerate([(E, F, D), (E, F, D), (E, D, F)])
        ),
        strict=True,
    )
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(rng.standard_normal((tokens, D)), jnp.bfloat16)
    ids = rng.integers(-1, E + 1, (tokens, k)).astype(np.int32)
    weights = jnp.asarray(rng.uniform(0, 1, (tokens, k)), jnp.bfloat16)
    biases = [rng.standard_normal(s).astype(np.float32) for s in ((E, F),) * 2]
    biases.append(rng.standard_normal((E, D)).astype(np.float32))
    for bias, options in ((biases, GPT_OSS), ([np.zeros((E, 1))] * 3, {})):
        poison(jnp.zeros((tokens * k, F), x.dtype))
        given = bias if options else []
        with backend("triton"):
            f = functools.partial(moe_ffn, **options)
            y = jax.jit(f)(x, ids, weights, *packed, *given)
            assert (
                "sort"
                not in jax.jit(f).lower(x, ids, weights, *packed, *given).as_text()
            )
        x64, w64 = (np.asarray(a, np.float64) for a in (x, weights))
        truth = by_slots(x64, ids, w64, values, bias, options)
        near = [rounded(v) for v in values]
        allowed = relative_error(by_slots(x64, ids, w64, near, bias, options), truth)
        assert relative_error(y, truth) < 1.5 * (allowed + 4e-3), form


def test_gradients_in_x_and_the_weights_of_experts():
    packed = [
        on_the_cpu(FORMS["mxfp4"], normal(shape, seed) / 16)[0]
        for seed, shape in enumerate([(E, F, D), (E, F, D), (E, D, F)])
    ]
    plain = [dequantize(w) for w in packed]
    x, weights = jnp.asarray(normal((3, D), 7)), jnp.asarray(normal((3, 2), 8))
    ids = np.asarray([[0, 3], [5, 5], [2, 9]], np.int32)

    def gradient(experts):
        def f(x, weights):
            return jnp.sin(moe_ffn(x, ids, weights, *experts)).sum()

        return jax.jit(jax.grad(f, (0, 1)))(x, weights)

    with jax.default_matmul_precision("highest"):
        for found, expected in zip(gradient(packed), gradient(plain), strict=True):
            assert relative_error(found, np.asarray(expected, np.float64)) < 1e-4
