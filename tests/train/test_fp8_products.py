"""Training with products of 8-bit floats, beside the same in bfloat16."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.models import load
from jaxkern.models.remat import KEPT
from jaxkern.train import AdamW, next_token_loss, train_step
from jaxkern.train.run_config import run_config
from tests.models.test_architectures import FOLDERS
from tests.train.tiny_llama import CONFIG, batches, weights_of

ONE = dataclasses.replace(CONFIG, layers=1)
FP8 = "float8_e4m3fn"
STEPS = 50
TOLERANCE = 0.015  # of a loss in fp8, relative to that of bfloat16


def losses(product_dtype):
    loss = next_token_loss(ONE, product_dtype=product_dtype)
    step = train_step(loss, AdamW(1e-3))
    state, found = step.init(weights_of(layers=1)), []
    for batch in batches(STEPS):
        state, metrics = step(state, batch)
        found.append(float(metrics.loss))
    assert int(state.skipped) == 0
    return np.array(found)


def test_fifty_steps_follow_those_of_bfloat16():
    rounded, plain = losses(FP8), losses(None)
    assert rounded[0] - rounded[-1] > 0.3, "it did not learn"
    np.testing.assert_allclose(rounded, plain, rtol=TOLERANCE)
    assert np.abs(rounded - plain).max() > 1e-4, "nothing was rounded"


def gradient(product_dtype, dtype, remat="none", layers=2):
    """Of weights as models begin with them, their deviation 0.02."""
    sizes = dict(layers=layers, d_model=64, heads=8, kv_heads=4)
    config = dataclasses.replace(CONFIG, **sizes)
    weights = jax.tree.map(
        lambda w: (w if w.ndim == 1 else 0.02 * w * w.shape[1] ** 0.5).astype(dtype),
        weights_of(layers=layers, d=64, ffn=96),
    )
    loss = next_token_loss(config, product_dtype=product_dtype, remat=remat)
    tokens = batches(1, rows=16, length=32)[0]
    grads = jax.jit(jax.grad(lambda w: loss(w, tokens)[0]))(weights)
    leaves = [np.asarray(g, np.float64).ravel() for g in jax.tree.leaves(grads)]
    return np.concatenate(leaves)


def test_the_gradient_points_where_the_exact_one_does():
    exact, found = gradient(None, jnp.float32), gradient(FP8, jnp.bfloat16)
    cosine = exact @ found / np.linalg.norm(exact) / np.linalg.norm(found)
    assert 0.99 < cosine < 0.9999, cosine
    np.testing.assert_allclose(np.linalg.norm(found), np.linalg.norm(exact), rtol=0.02)


@pytest.mark.parametrize("remat", list(KEPT))
def test_what_is_kept_changes_no_gradient(remat):
    """But where XLA fuses otherwise, a last bit may round to the next 8-bit float."""
    found, expected = (gradient(FP8, jnp.float32, r, 1) for r in (remat, "none"))
    cosine = expected @ found / np.linalg.norm(expected) / np.linalg.norm(found)
    assert cosine > 0.9999, cosine


def test_the_layers_have_8_bit_products_and_nothing_else_does():
    tokens, weights = batches(1)[0], weights_of(layers=1)
    loss = next_token_loss(ONE, product_dtype=FP8)
    jaxpr = jax.make_jaxpr(lambda w: loss(w, tokens)[0])(weights)
    names = [e.primitive.name for e in jaxpr.eqns]
    assert names.count("linear_fp8") == 4  # qkv, output, gate and up, down
    shapes = [
        tuple(v.aval.shape for v in e.invars[:2])
        for e in jaxpr.eqns
        if e.primitive.name in ("linear", "dot_general")
    ]
    assert shapes == [((8, 12, 16), (32, 16))]  # the output
    assert "linear_fp8" not in str(
        jax.make_jaxpr(next_token_loss(ONE))(weights, tokens)
    )


def test_other_pages_and_dtypes_are_refused():
    config, _ = load(FOLDERS["granitemoehybrid"], "train")
    with pytest.raises(ValueError, match=r"must be None for .*: models of the llama"):
        next_token_loss(config, product_dtype=FP8)
    with pytest.raises(ValueError, match="must be 'float8_e4m3fn' or None, got 'fp8'"):
        next_token_loss(ONE, product_dtype="fp8")  # pyright: ignore


def test_a_run_may_ask_for_it():
    tables = {"model": {"path": "m"}, "data": {"files": ["a"]}, "out": "o"}
    assert run_config(tables, "a.toml").product_dtype is None
    run = run_config({**tables, "product_dtype": FP8}, "a.toml")
    assert run.product_dtype == FP8
    with pytest.raises(ValueError, match="product_dtype must be one of float8_e4m3fn"):
        run_config({**tables, "product_dtype": "int8"}, "a.toml")
