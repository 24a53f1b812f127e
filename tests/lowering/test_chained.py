"""Launches in chains: which kernels join, what each may read early, what ends a chain.

What a chain of kernels computes is compared in tests/triton/test_launch_chain.py, on a
GPU in tests/gpu/test_launch_chain.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.drawn_models import drawn_model
from jaxkern import (
    linear,
    moe_ffn,
    quantized_matmul_add,
    quantized_rms_norm_matmul,
    rms_norm,
    rms_norm_add,
    sandwich_rms_norm,
)
from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.chain_library import TARGET
from jaxkern.gpu.dependent_launch import READ, READ_EARLIER
from jaxkern.gpu.device import compiling_for
from jaxkern.lowering.chained import chained, in_chains
from jaxkern.models import decoder
from jaxkern.models.cached_steps import decode
from jaxkern.models.llama import Layer, LlamaConfig, LlamaWeights, empty_cache
from jaxkern.models.sampling import LIKELIEST
from tests.triton.test_every_kernel import spec as shaped

pytestmark = pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)


def spec(*shape, **dtype) -> Any:
    """Shape and dtype where an array is asked for."""
    return shaped(*shape, **dtype)


def equations(f, *operands):
    """Of f as it lowers on a Hopper GPU, its launches in chains."""
    with compiling_for(90):
        closed = jax.make_jaxpr(f)(*operands)
        leaves = jax.tree.leaves(operands)
        return jax.make_jaxpr(lambda *x: in_chains(*x, jaxpr=closed))(*leaves).eqns


def named(eqns, name):
    return [eqn for eqn in eqns if eqn.primitive.name == name]


def levels(eqn):
    from jaxkern.gpu import launch_chain

    return launch_chain.levels(eqn.params["steps"], len(eqn.invars))


def test_launches_of_one_op_are_a_chain_of_its_own():
    """The sum of experts reads their weights before hidden is there."""
    experts, back = spec(16, 512, 2048), spec(16, 2048, 512)
    operands = spec(1, 2048), spec(1, 8, dtype="int32"), spec(1, 8), experts, experts
    for f in (moe_ffn, chained(moe_ffn)):
        [chain] = named(equations(f, *operands, back), "launch_chain")
        assert levels(chain) == [READ, READ_EARLIER]
    with compiling_for(90):
        lowered = (
            jax.jit(moe_ffn).trace(*operands, back).lower(lowering_platforms=("cuda",))
        )
    assert lowered.as_text().count(f"@{TARGET}") == 1


def norm_product(x, w):
    return quantized_rms_norm_matmul(x, jnp.ones(x.shape[-1]), w)


def llama(layers=2, d=512, slots=64):
    config = LlamaConfig(
        *("llama", slots, layers, d, 8, 2, 64, 1024, 1e-5, 64, 5e5, "interleaved"),
        dtype="bfloat16",
        fused=True,
    )
    layer = Layer(
        attention_norm=spec(d, dtype="float32"),
        qkv=(spec(512, d), spec(256, d)),
        qkv_bias=None,
        q_norm=None,
        k_norm=None,
        attention_output=(spec(d, 512),),
        ffn_norm=spec(d, dtype="float32"),
        gate_up=(spec(2048, d),),
        down=(spec(d, 1024),),
    )
    table, norm = spec(1024, d), spec(d, dtype="float32")
    weights = LlamaWeights(table, (layer,) * layers, norm, (table,), None)
    cache = jax.eval_shape(lambda: empty_cache(config, 1, slots, jnp.bfloat16))
    return config, weights, cache


@pytest.mark.parametrize("slots", [64, 640, 9000])  # a block, a cluster, two launches
def test_all_layers_of_a_decode_step_are_one_call(slots, monkeypatch):
    """Also where q, k and v come of two products: what lies between is addresses."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    config, weights, cache = llama(slots=slots)
    token = spec(1, dtype="int32")

    def step(weights, token, cache):
        logits, cache = decode(config, weights, token, cache)
        return LIKELIEST.likeliest(logits), cache

    eqns = equations(step, weights, token, cache)
    [chain] = named(eqns, "launch_chain")
    names = [step.launch.name for step in chain.params["steps"]]
    product, by_lanes = "few_products_kernel", "lane_products_kernel"
    attends = ["qk_norm_rope_cache_attention_kernel"]
    if slots == 9000:
        attends = [
            "qk_norm_rope_cache_shares_kernel",
            "merge_kernel",
        ]
    one = [*attends, by_lanes, product, by_lanes]
    last = ["row_norm_fwd_kernel", by_lanes, "argmax_kernel"]
    assert names == [product, product, *one] * 2 + last
    # each product reads its weights early, attention the keys that are there
    assert levels(chain) == [2] * len(names)
    assert len(chain.params["aliases"]) == 4  # the caches stay in place
    assert not named(eqns, "triton_call")


@pytest.mark.parametrize("kind", ["Q4_K", pytest.param("bf16", marks=pytest.mark.full)])
def test_layers_with_experts_and_output_gates_are_one_call(kind, monkeypatch):
    """Three gated delta nets and an attention of Qwen3.6; packed logits are a call."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    configs = []

    def arrays():
        config, weights = drawn_model("Qwen3.6-35B-A3B", kind, 4)
        configs.append(config)
        return weights, decoder.empty_cache(config, 1, 640, jnp.bfloat16)

    weights, cache = jax.eval_shape(arrays)

    def step(weights, token, cache):
        logits, cache = decode(configs[0], weights, token, cache)
        return LIKELIEST.likeliest(logits), cache

    eqns = equations(step, weights, spec(1, dtype="int32"), cache)
    chains = named(eqns, "launch_chain")
    names = [s.launch.name for chain in chains for s in chain.params["steps"]]
    experts = "fixed_point_hidden_kernel", "fixed_point_sum_kernel"
    product, last = "fixed_point_kernel", 1
    if kind == "bf16":
        experts, product, last = ("hidden_kernel", "result_kernel"), names[0], 0
    rest = [product, "few_products_kernel", "choice_kernel", *experts]
    net = [product, "gated_delta_net_step_kernel", *rest]
    attention = [product, "qk_norm_rope_cache_attention_kernel", *rest]
    assert names[:29] == [*net * 3, *attention, "split_row_norm_fwd_kernel"]
    assert len(chains) == 1 + last and not named(eqns, "triton_call")
    clusters = {s.launch.name: s.launch.cluster for s in chains[0].params["steps"]}
    assert clusters["gated_delta_net_step_kernel"] == 4
    early = levels(chains[0])
    assert set(early) <= {2, 3} and early[1] == 2  # the state before the wait


def test_a_long_row_of_logits_is_two_launches_of_the_chain():
    def f(x, w):
        return LIKELIEST.likeliest(linear(x, w, preferred_element_type=jnp.float32))

    [chain] = named(equations(f, spec(1, 512), spec(8192, 512)), "launch_chain")
    names = [step.launch.name for step in chain.params["steps"]]
    assert names == ["lane_products_kernel", "argmax_kernel", "best_part_kernel"]


@pytest.mark.parametrize("d", [2048, 5376])  # a program has the row, a cluster has it
def test_norms_of_a_row_are_in_the_chain(d):
    def block(x, residual, weight, w):
        y = linear(x, w)
        normal, total = sandwich_rms_norm(y, residual, weight, weight)
        return rms_norm_add(normal, total, weight), rms_norm(total, weight)

    row, weight = spec(1, d, dtype="bfloat16"), spec(d, dtype="float32")
    eqns = equations(block, row, row, weight, spec(d, d, dtype="bfloat16"))
    [chain] = named(eqns, "launch_chain")
    assert len(chain.params["steps"]) == 4


def test_weights_that_the_chain_makes_are_not_read_early():
    def f(x, w, v):
        made = norm_product(x, w).reshape(16, 512)
        return quantized_matmul_add(norm_product(x, v), made, x[:, :16])

    [chain] = named(
        equations(f, spec(1, 512), spec(8192, 512), spec(512, 512)), "launch_chain"
    )
    assert levels(chain) == [2, 2, 1]


def test_what_computes_ends_a_chain():
    def f(x, w):
        y = norm_product(norm_product(x, w), w)
        y = jnp.sin(y)
        return norm_product(norm_product(y, w), w)

    eqns = equations(f, spec(1, 512), spec(512, 512))
    assert [len(e.params["steps"]) for e in named(eqns, "launch_chain")] == [2, 2]
    order = [e.primitive.name for e in eqns]
    assert order.index("launch_chain") < order.index("sin")


@pytest.mark.parametrize("first, chains", [(8, [2]), (4, [])])
def test_kernels_read_at_whole_16_bytes_only(first, chains):
    def f(x, w, v):
        y = norm_product(x, w)
        return norm_product(y[:, first : first + 512], v)

    eqns = equations(f, spec(1, 512), spec(528, 512), spec(32, 512))
    assert [len(e.params["steps"]) for e in named(eqns, "launch_chain")] == chains
    if chains:
        [chain] = named(eqns, "launch_chain")
        _, last = chain.params["steps"]
        n = len(chain.invars)
        assert last.sources[0] == (n, 2 * first)


def test_an_array_that_is_overwritten_is_read_by_no_later_launch():
    """XLA then sees both uses, and copies."""
    config, weights, cache = llama(layers=1)

    def f(w, t, c):
        return decode(config, w, t, c)[0], decode(config, w, t + 1, c)

    eqns = equations(f, weights, spec(1, dtype="int32"), cache)
    chains = named(eqns, "launch_chain")
    for chain in chains:
        written = {operand for operand, _ in chain.params["aliases"]}
        seen = set()
        for step in chain.params["steps"]:
            buffers = {buffer for buffer, _ in step.sources}
            assert not seen & buffers
            seen |= written & buffers
    assert sum(len(chain.params["aliases"]) for chain in chains) == 4


def test_attributes_name_each_kernel_once():
    """The handler reads them; a step is seven numbers and two for each pointer."""
    from jaxkern.gpu.launch_chain import attributes

    def f(x, w, v):
        for _ in range(3):
            x = norm_product(x, w)
        return norm_product(x, v)

    eqns = equations(f, spec(1, 512), spec(512, 512), spec(64, 512))
    [chain] = named(eqns, "launch_chain")
    with compiling_for(90):
        found = attributes(chain.params["steps"], len(chain.invars))
        again = attributes(chain.params["steps"], len(chain.invars))
    assert found["key"] == again["key"]
    assert found["names"] == "few_products_kernel\n" * 2
    table = found["kernels"].reshape(-1, 4)
    for offset, size, threads, _ in table:
        assert found["binaries"][offset : offset + 4] == b"\x7fELF"
        assert offset % 8 == 0 and offset + size <= len(found["binaries"])
        assert threads % 32 == 0
    steps = found["program"].reshape(4, 7 + 2 * 4)
    np.testing.assert_array_equal(steps[:, 0], [0, 0, 0, 1])
    np.testing.assert_array_equal(steps[:, 4], [0, 1, 1, 1])  # begins early
    np.testing.assert_array_equal(steps[:, 5], 1)  # no clusters
    np.testing.assert_array_equal(steps[:, 6], 4)


def test_without_the_library_it_is_said_once(monkeypatch, caplog, tmp_path):
    from jaxkern.gpu import chain_library, launch_chain

    monkeypatch.setattr(chain_library.package, "__path__", [str(tmp_path)])
    monkeypatch.setattr(chain_library.sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(launch_chain, "driver_version", lambda: 0)
    chain_library.missing_library.cache_clear()
    try:
        with compiling_for(90):
            reasons = {launch_chain.missing(), launch_chain.missing()}
    finally:
        chain_library.missing_library.cache_clear()
    [reason] = reasons
    assert "libjaxkern_gpu.so was not built" in str(reason)
    assert caplog.text.count("Kernels are launched one by one") == 1
    with compiling_for(80):
        assert "below 90" in str(launch_chain.missing())


def test_a_library_for_a_newer_jaxlib_is_a_reason(monkeypatch):
    from jaxkern.gpu import chain_library

    def refuse(*_, **__):
        raise jax.errors.JaxRuntimeError("the handler's API version is incompatible")

    monkeypatch.setattr(chain_library.jax.ffi, "register_ffi_target", refuse)
    reason = str(chain_library.load_library())
    assert "not for this jaxlib" in reason and "API version" in reason


def test_elsewhere_a_function_stays_what_it_was():
    """No GPU, under vmap, and called as it is."""

    def f(x, w):
        return jnp.sin(norm_product(x, w)), {"sum": x.sum()}

    rng = np.random.default_rng(0)
    x, w = (
        jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((3, 32), (8, 32))
    )
    for g in (lambda f: f, jax.jit, lambda f: jax.vmap(f, (0, None))):
        jax.tree.map(np.testing.assert_array_equal, g(chained(f))(x, w), g(f)(x, w))


def test_a_kernel_waits_before_it_reads_what_others_write():
    """In the machine code: weights, the wait, then the activations and the norm."""

    def f(x, w):
        return norm_product(norm_product(x, w), w)

    [chain] = named(equations(f, spec(1, 2048), spec(2048, 2048)), "launch_chain")
    launch = chain.params["steps"][1].launch
    order = {}
    for level in (0, 1, 2):
        constants = tuple({**dict(launch.constants), "AHEAD": level}.items())
        with compiling_for(90):
            lines = launch._replace(constants=constants).sass.splitlines()
        marks = {"LDG": "read", "ACQBULK": "wait", "PREEXIT": "next"}
        order[level] = [m for x in lines for k, m in marks.items() if k in x]
    assert {*order[0]} == {"read"}
    assert order[1][:2] == ["next", "wait"] and {*order[1][2:]} == {"read"}
    reads = order[2].index("wait")
    assert order[2][0] == "next" and {*order[2][1:reads]} == {"read"}
    assert {*order[2][reads + 1 :]} == {"read"}
