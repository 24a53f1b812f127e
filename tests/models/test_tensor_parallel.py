"""TensorParallel: prefill and decode of a whole llama cut over devices."""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkern import IntCodec, quantize_int
from jaxkern.models.cached_steps import decode, prefill
from jaxkern.models.llama import Layer, LlamaConfig, LlamaWeights, empty_cache
from jaxkern.models.tensor_parallel import TensorParallel
from jaxkern.testing.sharding_checks import collectives

LAYERS, D, HEADS, KV_HEADS, H, F, V = 2, 40, 8, 4, 8, 48, 96
CONFIG = LlamaConfig(
    *("llama", 64, LAYERS, D, HEADS, KV_HEADS, H, V, 1e-5, H, 1e4, "neox"),
    dtype="bfloat16",
    fused=True,
)
TOKENS = np.arange(10, dtype=np.int32).reshape(2, 5) * 7 % V
LENGTHS = np.array([5, 3], np.int32)
FORMS = {
    "llama": {},
    "biases and norms of heads": {"biases": True, "head_norms": True},
    "post-norms, gelu": {"post_norms": True, "activation": "gelu_tanh"},
    "parts apart, not fused": {"apart": True, "fused": False},
}


def drawn(apart=False, biases=False, head_norms=False, post_norms=False):
    rng = np.random.default_rng(0)

    def matrix(f, d):
        return jnp.asarray(rng.standard_normal((f, d)) / d**0.5, jnp.bfloat16)

    def ones(n):
        return 1 + 0.1 * jnp.float32(rng.standard_normal(n))

    def vector(n, there=True):
        return ones(n) if there else None

    def parts(*rows):
        found = tuple(matrix(f, D) for f in rows)
        return found if apart else (jnp.concatenate(found),)

    def layer():
        q, k = HEADS * H, KV_HEADS * H
        return Layer(
            attention_norm=vector(D),
            qkv=parts(q, k, k),
            qkv_bias=vector(q + 2 * k, biases),
            q_norm=vector(H, head_norms),
            k_norm=vector(H, head_norms),
            attention_output=(matrix(D, q),),
            ffn_norm=vector(D),
            gate_up=parts(F, F),
            down=(matrix(D, F),),
            attention_output_bias=vector(D, biases),
            gate_up_bias=vector(2 * F, biases),
            down_bias=vector(D, biases),
            attention_post_norm=vector(D, post_norms),
            ffn_post_norm=vector(D, post_norms),
        )

    layers = tuple(layer() for _ in range(LAYERS))
    return LlamaWeights(matrix(V, D), layers, ones(D), (matrix(V, D),), None)


def form(name):
    given = dict(FORMS[name])
    names = "fused", "activation"
    options = {n: given.pop(n) for n in names if n in given}
    return replace(CONFIG, **options), drawn(**given)


def on(devices, config=CONFIG, kind=AxisType.Auto):
    mesh = jax.make_mesh((devices,), ("x",), (kind,), devices=jax.devices()[:devices])
    return TensorParallel(config, mesh, "x")


def answers(first, then, weights, cache):
    """Logits of the prompts and of two tokens more."""
    found, cache = jax.jit(first)(weights, TOKENS, LENGTHS, cache)
    every = [found]
    for token in ([3, 4], [90, 1]):
        found, cache = jax.jit(then)(weights, np.array(token, np.int32), cache)
        every.append(found)
    return np.float32(jnp.stack(every)), cache


def whole(config, weights):
    def first(*operands):
        return prefill(config, *operands)

    def then(*operands):
        return decode(config, *operands)

    cache = empty_cache(config, 2, 16, config.dtype)
    return answers(first, then, weights, cache)


@pytest.mark.parametrize("name", FORMS)
def test_it_is_the_model_on_one_device(name):
    """As near to float32 as one device is, whose sums are rounded once."""
    config, weights = form(name)
    exact = jax.tree.map(lambda w: w.astype(jnp.float32), weights)
    parts = on(4, config)
    found, cache = answers(
        parts.prefill,
        parts.decode,
        parts.cut(weights),
        parts.empty_cache(2, 16, "bfloat16"),
    )
    one, own = whole(config, weights)
    with jax.default_matmul_precision("highest"):
        truth, _ = whole(replace(config, dtype="float32", fused=False), exact)
    error, of_one = (np.linalg.norm(y - truth) for y in (found, one))
    assert error <= 1.5 * of_one <= 0.05 * np.linalg.norm(truth)
    np.testing.assert_array_equal(cache[0].lengths, own[0].lengths)
    keys = [np.float32(c[0].keys) for c in (cache, own)]
    np.testing.assert_allclose(*keys, atol=0.02)


def test_next_tokens_are_the_largest_of_all_parts():
    """Of two sequences, in turns with `decode`; of equal logits the first."""
    parts, weights = on(4), drawn()
    rows = jnp.asarray(weights.output[0])
    tied = rows.at[V // 2 :].set(rows[: V // 2])  # each row again on another device
    for output in (rows, tied):
        cut = parts.cut(weights._replace(output=(output,)))
        cache = parts.empty_cache(2, 16, "bfloat16")
        token, apart = np.array([3, 4], np.int32), cache
        logits, cache = jax.jit(parts.decode)(cut, token, cache)
        found, apart = jax.jit(parts.next_tokens)(cut, token, apart)
        np.testing.assert_array_equal(found, np.argmax(np.asarray(logits), axis=-1))
        np.testing.assert_array_equal(apart[0].keys, cache[0].keys)
    assert max(found) < V // 2


@pytest.mark.full
def test_a_cache_of_codes_is_cut_by_heads_too():
    parts, weights = on(4), drawn()
    cut = parts.cut(weights)
    one, found = (
        answers(parts.prefill, parts.decode, cut, parts.empty_cache(2, 16, form))
        for form in ("bfloat16", IntCodec(8))
    )
    scale = np.linalg.norm(one[0])
    assert 0 < np.linalg.norm(found[0] - one[0]) <= 0.05 * scale
    codes = found[1][0].keys.codes
    assert codes.sharding.shard_shape(codes.shape)[2] == KV_HEADS // 4


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_two_all_reduces_a_layer(kind):
    parts = on(2, kind=kind)
    weights, cache = parts.cut(drawn()), parts.empty_cache(2, 16, "bfloat16")
    token = np.array([3, 4], np.int32)
    step = jax.jit(parts.decode).lower(weights, token, cache).compile()
    assert Counter(collectives(step)) == {"all-reduce": 2 * LAYERS}
    logits, after = step(weights, token, cache)
    assert logits.sharding.shard_shape(logits.shape) == (2, V // 2)
    assert after[0].keys.sharding.shard_shape(after[0].keys.shape)[2] == KV_HEADS // 2
    down = jax.tree.leaves(weights.layers[0].down)[0]
    assert down.sharding.shard_shape(down.shape) == (D, F // 2)


def lowered_for_two(monkeypatch, peers, name="decode"):
    """A llama's config, and a step of decoding as two H200 have it."""
    pytest.importorskip("triton")
    from jaxkern.gpu.device import compiling_for
    from jaxkern.triton.quant import dense_products
    from tests.lowering.test_chained import llama, spec

    monkeypatch.setattr(dense_products, "LEAST", 256)  # columns of a half here
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(TensorParallel, "peers", lambda self: peers)
    config, weights, cache = llama()
    parts = on(2, config)

    def placed(x, cut):
        cut = NamedSharding(parts.mesh, cut)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=cut)

    weights = jax.eval_shape(parts.arranged, weights)
    weights = jax.tree.map(placed, weights, parts.specs(weights))
    cache = jax.tree.map(placed, cache, parts.cache_specs(cache))
    token = placed(spec(1, dtype="int32"), P())
    with compiling_for(90):
        step = jax.jit(getattr(parts, name), donate_argnums=2)
        traced = step.trace(weights, token, cache)
        return config, traced.lower(lowering_platforms=("cuda",)).as_text()


def test_on_gpus_a_step_is_kernels_and_sums(monkeypatch):
    """All products and attention of a layer by kernels."""
    config, text = lowered_for_two(monkeypatch, None)
    assert text.count("stablehlo.all_reduce") == 1
    assert text.count("call @sum_over_devices") == 2 * config.layers
    assert "stablehlo.dot_general" not in text
    # a layer: qkv with its norm, attention, its output, gate and up with theirs, down
    assert text.count("@triton_kernel_call_ffi") >= 5 * config.layers


def test_gpus_that_reach_each_other_sum_in_the_chain(monkeypatch):
    peer_sum = pytest.importorskip("jaxkern.gpu.peer_sum")
    chain_library = pytest.importorskip("jaxkern.gpu.chain_library")
    if chain_library.missing_library():
        pytest.skip("the library was not built")
    peers = peer_sum.Peers("x", ((0, 1),))
    for name, chains in (("decode", 1), ("next_tokens", 2)):
        _, text = lowered_for_two(monkeypatch, peers, name)
        assert text.count("@jaxkern_launch_chain") == chains
        assert "peer_sum_kernel" in text
        assert "stablehlo.all_reduce" not in text
        assert "stablehlo.all_gather" not in text
        assert "@triton_kernel_call_ffi" not in text


def wide_norm(weights):
    layer = weights.layers[0]._replace(q_norm=jnp.ones(HEADS * H))
    return weights._replace(layers=(layer,))


def quantised(weights):
    layer = weights.layers[0]
    return weights._replace(
        layers=(layer._replace(down=(quantize_int(layer.down[0]),)),)
    )


def odd(weights):
    layer = weights.layers[0]
    return weights._replace(layers=(layer._replace(gate_up=(layer.gate_up[0][:-2],)),))


@pytest.mark.parametrize(
    "change, error, message",
    [
        (wide_norm, ValueError, "q_norm of layer 0 is over 64 dims"),
        (quantised, TypeError, "down of layer 0 must be arrays .*, got IntTensor"),
        (odd, ValueError, "layer 0 has 47 hidden dims, which 2 devices"),
        (lambda w: w._replace(output=(jnp.ones((V, D)),)), TypeError, "got float32"),
    ],
)
def test_weights_that_cannot_be_cut(change, error, message):
    with pytest.raises(error, match=f"TensorParallel: .*{message}"):
        on(2).cut(change(drawn()))


def test_configs_that_cannot_be_cut():
    with pytest.raises(ValueError, match="`kv_heads` is 4, which 8 devices of 'x'"):
        on(8)
    with pytest.raises(ValueError, match="no mesh axis 'y', known are 'x'"):
        TensorParallel(CONFIG, on(2).mesh, "y")
    with pytest.raises(TypeError, match="must be a LlamaConfig, got dict"):
        TensorParallel({}, on(2).mesh, "x")  # pyright: ignore[reportArgumentType]
