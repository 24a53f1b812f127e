"""A mixture slot by slot: the same as its ops in turn, and one chain of launches."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    explain,
    interleave,
    quantize_fp8,
    quantize_gguf,
    quantize_microscaled,
)
from jaxkern.gpu.device import compiling_for
from jaxkern.models.branch import Branch
from jaxkern.models.decoder import (
    DecoderConfig,
    DecoderWeights,
    LayerWeights,
    decode,
    empty_cache,
    prefill,
)
from jaxkern.models.expert_slots import MOST_ROWS, by_groups
from jaxkern.models.feed_forward import Dense, DenseWeights, Mixture, MixtureWeights
from jaxkern.models.mixers.full_attention import AttentionWeights, FullAttention
from jaxkern.models.mixers.mixing import Rotation
from jaxkern.models.sampling import LIKELIEST
from tests.lowering.test_chained import equations, levels, named, spec

D, F, E, K = 512, 256, 8, 2
GPT_OSS = Mixture(
    *(E, F, K), router_bias=True, bias=True, alpha=1.702, limit=7.0, up_offset=1.0
)
QWEN3_5 = Mixture(E, F, K, shared=Dense(F, "_shexp"), shared_gate=True)
DEEPSEEK = replace(QWEN3_5, shared_gate=False, score="sigmoid", scaling_factor=2.5)


def pack(kind, w):
    if kind == "bf16":
        return w.astype(jnp.bfloat16)
    if kind == "fp8":
        return quantize_fp8(w, block=(1, 0))
    if kind in ("mxfp4", "MXFP4"):
        packed = quantize_microscaled(w, format="mxfp4")
        return packed if kind == "mxfp4" else interleave(packed)
    return interleave(quantize_gguf(w, kind))


def drawn(mixture, kind, other) -> MixtureWeights:
    """Experts of one kind, the shared one of another."""
    numbers = iter(jax.random.split(jax.random.key(0), 20))

    def draw(*shape):
        return jax.random.normal(next(numbers), shape) * shape[-1] ** -0.5

    gate, up, down = (pack(kind, draw(E, *s)) for s in [(F, D)] * 2 + [(D, F)])
    shared = None
    if mixture.shared is not None:
        both, back = (pack(other, draw(*s)) for s in [(2 * F, D), (D, F)])
        shared = DenseWeights((both,), (back,))
    return MixtureWeights(
        router=4 * draw(E, D),
        gate=gate,
        up=up,
        down=down,
        router_bias=draw(E) if mixture.router_bias else None,
        correction=draw(E) if mixture.score == "sigmoid" else None,
        gate_bias=draw(E, F) if mixture.bias else None,
        up_bias=draw(E, F) if mixture.bias else None,
        down_bias=draw(E, D) if mixture.bias else None,
        shared=shared,
        shared_gate=draw(1, D) if mixture.shared_gate else None,
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "mixture, kind, other, scale",
    [
        (QWEN3_5, "bf16", "bf16", 1.0),
        (GPT_OSS, "mxfp4", "bf16", 1.0),
        (QWEN3_5, "Q8_0", "Q8_0", 0.5),
        (DEEPSEEK, "Q8_0", "bf16", 1.0),
        (DEEPSEEK, "bf16", "bf16", 1.0),
        (QWEN3_5, "fp8", "fp8", 1.0),
        (DEEPSEEK, "fp8", "bf16", 1.0),
    ],
)
def test_a_layer_is_the_same(mixture, kind, other, scale):
    """Also where the shared expert is kept in another way, and is no slot then."""
    weights = drawn(mixture, kind, other)
    x = jax.random.normal(jax.random.key(1), (2, 1, D), jnp.bfloat16)
    norm = jax.random.uniform(jax.random.key(2), (D,), minval=0.5, maxval=2.0)

    def layer(fused):
        config: Any = SimpleNamespace(
            eps=1e-5, product_dtype=None, expert_dtype=None, fused=fused
        )
        return jax.jit(
            lambda x, norm, weights: mixture(
                config, weights, Branch(x, norm, x, scale)
            ).astype(jnp.float32)
        )

    text = str(jax.make_jaxpr(layer(True))(x, norm, weights))
    assert "_expert_sum" in text and "moe_weighted_reduce" not in text
    assert "norm_route" not in str(jax.make_jaxpr(layer(False))(x, norm, weights))
    y, truth = (np.asarray(layer(fused)(x, norm, weights)) for fused in (True, False))
    error = np.linalg.norm(y - truth) / np.linalg.norm(truth - np.asarray(x, "f4"))
    assert error < 2e-2  # of some roundings to bfloat16 in turn


def two_layers(kind):
    """A config of two layers, its weights drawn, its cache of 64 slots."""
    mixture = GPT_OSS if kind in ("mxfp4", "MXFP4") else QWEN3_5
    attention = FullAttention(8, 2, 64, Rotation(64, 1e4), bias=True)
    config = DecoderConfig(
        *("any", 64, D, 1024, 1e-5),
        mixers=(attention,) * 2,
        feed_forwards=(mixture,) * 2,
        dtype="bfloat16",
        fused=True,
    )
    numbers = iter(jax.random.split(jax.random.key(1), 6))

    def draw(*shape, dtype: Any = jnp.bfloat16):
        w = jax.random.normal(next(numbers), shape) * shape[-1] ** -0.5
        return w.astype(dtype)

    norm = jnp.ones(D)
    layer = LayerWeights(
        mixer_norm=norm,
        mixer=AttentionWeights(
            *((draw(768, D),), (draw(D, 512),)),
            qkv_bias=draw(768, dtype=jnp.float32),
            output_bias=draw(D, dtype=jnp.float32),
        ),
        feed_forward_norm=norm,
        feed_forward=drawn(mixture, kind, kind),
    )
    table = draw(1024, D)
    weights = DecoderWeights(table, (layer,) * 2, norm, (table,))
    return config, weights, empty_cache(config, 1, 64, jnp.bfloat16)


def shapes_of_two_layers(kind):
    """The same config, and the shapes of what is with it."""
    configs = []

    def arrays():
        config, *others = two_layers(kind)
        configs.append(config)
        return others

    shapes = jax.eval_shape(arrays)
    return configs[0], *shapes


@pytest.mark.parametrize(
    "kind",
    ["bf16", "fp8", pytest.param("mxfp4", marks=pytest.mark.full), "MXFP4", "Q8_0"],
)
def test_a_decode_step_is_one_chain(kind, monkeypatch):
    """Seven launches a layer, biases of attention among them."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    config, weights, cache = shapes_of_two_layers(kind)

    def step(weights, token, cache):
        logits, cache = decode(config, weights, token, cache)
        return LIKELIEST.likeliest(logits), cache

    eqns = equations(step, weights, spec(1, dtype="int32"), cache)
    [chain] = named(eqns, "launch_chain")
    names = [step.launch.name for step in chain.params["steps"]]
    product = "few_products_kernel"
    experts = {
        "bf16": ["hidden_kernel", "result_kernel"],
        "fp8": ["hidden_kernel", "result_kernel"],
        "mxfp4": ["row_hidden_kernel", "row_sum_kernel"],
    }
    by_whole_numbers = ["fixed_point_hidden_kernel", "fixed_point_sum_kernel"]
    one = [product, "qk_norm_rope_cache_attention_kernel", product]
    one += [product, "choice_kernel", *experts.get(kind, by_whole_numbers)]
    last = ["row_norm_fwd_kernel", "lane_products_kernel", "argmax_kernel"]
    assert names == [*one * 2, *last]
    sums = "fixed_point_sum_kernel", "result_kernel"
    early = [3 if name in sums else 2 for name in names]
    assert levels(chain) == early and not named(eqns, "triton_call")


@pytest.mark.full
@pytest.mark.parametrize("kind", ["mxfp4", "Q8_0"])
def test_many_tokens_are_the_same(kind):
    """Sorted by expert, which Hopper multiplies packed; here the references of both."""
    mixture = GPT_OSS if kind == "mxfp4" else QWEN3_5
    weights = drawn(mixture, kind, kind)
    x = jax.random.normal(jax.random.key(1), (1, 12, D), jnp.bfloat16)
    norm = jax.random.uniform(jax.random.key(2), (D,), minval=0.5, maxval=2.0)

    def layer(capability):
        config: Any = SimpleNamespace(
            eps=1e-5, product_dtype=None, expert_dtype=None, fused=True
        )
        with compiling_for(capability):
            return jax.jit(
                lambda x, norm, weights: mixture(config, weights, Branch(x, norm, x))
            ).trace(x, norm, weights)

    older, hopper = layer(80), layer(90)
    assert "expert_sum" in str(hopper.jaxpr) and "moe_weighted" in str(older.jaxpr)
    y, truth = (
        np.asarray(f.lower().compile()(x, norm, weights), "f4") for f in (hopper, older)
    )
    error = np.linalg.norm(y - truth) / np.linalg.norm(truth - np.asarray(x, "f4"))
    assert error < 2e-2  # of some roundings to bfloat16 in turn


def test_prompts_of_many_rows_an_expert_decode_its_weights():
    weights = jax.eval_shape(lambda: drawn(GPT_OSS, "mxfp4", "mxfp4"))
    config = SimpleNamespace(fused=True)
    most = MOST_ROWS * E // K

    def are_grouped(tokens):
        x = spec(1, tokens, D, dtype="bfloat16")
        return by_groups(config, GPT_OSS, weights, Branch(x, spec(D), x))

    with compiling_for(90):
        assert [are_grouped(n) for n in (8, 9, most, most + 1)] == [0, 1, 1, 0]
    with compiling_for(80):
        assert not are_grouped(most)


@pytest.mark.parametrize(
    "kind",
    ["MXFP4", *(pytest.param(k, marks=pytest.mark.full) for k in ["mxfp4", "Q8_0"])],
)
def test_a_prompt_is_multiplied_packed(kind, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    config, weights, cache = shapes_of_two_layers(kind)

    def read(weights, tokens, lengths, cache):
        return prefill(config, weights, tokens, lengths, cache)

    given = weights, spec(1, 48, dtype="int32"), spec(1, dtype="int32"), cache
    with compiling_for(90):
        text = str(explain(read, *given, platform="cuda"))
    assert "grouped_hidden_kernel" in text and "grouped_result_kernel" in text
    assert "grouped_matmul on" not in text and "dequantize" not in text
