"""Every Triton kernel compiles to machine code for sm_80 and sm_90, and fits there."""

import functools
import importlib
import pkgutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern.triton
from jaxkern import (
    Float8Codec,
    IntCodec,
    InterleavedTensor,
    QuantizedVectors,
    TurboQuantCodec,
    adamw_update,
    argsort,
    attention,
    backend,
    dequantize_vectors,
    embedding,
    explain,
    fwht,
    gated_delta_rule,
    gated_rms_norm,
    group_norm,
    kimi_delta_attention,
    moe_rms_norm_add,
    quantize_vectors,
    quantized_cache_attention,
    quantized_matmul,
    quantized_matmul_add,
    quantized_rms_norm_matmul,
    quantized_swiglu,
    rms_norm,
    rms_norm_add,
    sandwich_rms_norm,
    softmax,
    state_space_dual,
)
from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.attention import gradient_rows
from jaxkern.gpu.device import compiling_for
from jaxkern.gpu.launch import compiled
from jaxkern.lowering.explain import every_equation
from jaxkern.lowering.lower import rows_on
from jaxkern.primitives.kernel_primitive import REGISTRY
from jaxkern.primitives.moe.expert_slots import expert_hidden, expert_sum
from jaxkern.primitives.norm.rms_norm import rms_norm_p
from jaxkern.primitives.quant.tile_formats import TILE_FORMATS
from jaxkern.testing import checks
from jaxkern.triton.quant import packed_products
from tests.cases import cases_of

pytestmark = pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)


def triton_rows():
    """(primitive, its case) for every op that has Triton kernels.

    To compile all of them takes minutes: `make test` takes the first.
    """
    if bridge.missing() is not None:
        return
    for p in REGISTRY.values():
        members = [q for q in (p, p.fwd, p.bwd) if q is not None]
        if any(row.backend == "triton" for q in members for row in rows_on(q, "cuda")):
            for k, case in enumerate(cases_of(p)):
                first = p is rms_norm_p and k == 0
                marks = pytest.mark.smoke if first else pytest.mark.full
                yield pytest.param(p, case, id=f"{p.name}-{case.name}", marks=marks)


ROWS = list(triton_rows())


def asked_for(f):
    def with_triton(*operands):
        with backend("triton"):
            return f(*operands)

    return with_triton


def functions_of(p, case):
    """The op and its gradients; a kernel that "auto" never takes is asked for."""
    operands = [abstract(case.arguments.get(a.name)) for a in p.operands]
    f = checks.bound(p, case)
    if all(isinstance(row.slower, str) for row in rows_on(p, "cuda")):
        f = asked_for(f)
    yield f, operands
    if checks.differentiable(p, operands):
        yield checks.gradients(f, operands), operands


def abstract(operand):
    """What is drawn for a case, of which a kernel needs shape and dtype alone."""
    if not isinstance(operand, checks.Spec):
        return None if operand is None else operand(np.random.default_rng(0))
    return spec(*operand.shape, dtype=operand.dtype)


def spec(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def slopes(f, *operands):
    """Of all float operands."""
    return checks.gradients(f, operands), operands


def attend(h, hv, dtype):
    """With every operand and option."""
    ids = jnp.zeros((1, 300), jnp.int32)

    def f(q, k, v, bias, sinks):
        return attention(
            q,
            k,
            v,
            bias=bias,
            sinks=sinks,
            mask=jnp.ones((1, 1, 300, 300), bool),
            segment_ids=(ids, ids),
            kv_lengths=jnp.ones(1, jnp.int32),
            q_offset=jnp.zeros(1, jnp.int32),
            causal=True,
            window=100,
            softcap=3.0,
        )

    q, k = (spec(1, 300, n, h, dtype=dtype) for n in (4, 2))
    v = spec(1, 300, 2, hv, dtype=dtype)
    return slopes(f, q, k, v, spec(1, 4, 300, 300), spec(4))


def capped_softmax(x):
    return softmax(x, jnp.ones(x.shape, bool), softcap=3.0)


def decode(codec):
    cache = QuantizedVectors.zeros((2, 5000, 2, 128), codec)
    f = functools.partial(quantized_cache_attention, causal=True, window=77)
    return f, (spec(2, 8, 8, 128), cache, cache)


def long_rows(d, dtype):
    """The fused norms: operators with their shapes, a name each."""
    x, v = spec(37, d, dtype=dtype), spec(d, dtype=dtype)
    experts = spec(37, 3, d, dtype=dtype), spec(37, 3, dtype=dtype)

    def mixed(*operands):
        return moe_rms_norm_add(*operands, normalize_residual=True)

    return {
        f"gated_rms_norm {d} {dtype}": slopes(gated_rms_norm, x, x, v),
        f"rms_norm_add {d} {dtype}": slopes(rms_norm_add, x, x, v, v),
        f"sandwich_rms_norm {d} {dtype}": slopes(sandwich_rms_norm, x, x, v, v),
        f"sandwich of three {d} {dtype}": slopes(sandwich_rms_norm, x, x, *[v] * 4),
        f"moe_rms_norm_add {d} {dtype}": slopes(mixed, *experts, x, v, v),
    }


def large_groups(dtype):
    image, channel = spec(1, 64, 300, 301, dtype=dtype), spec(64, dtype=dtype)
    f = functools.partial(group_norm, groups=2)
    return slopes(f, image, channel, channel)


def quantize(codec, d):
    return functools.partial(quantize_vectors, codec=codec), (spec(300, d),)


def dequantize(codec):
    return dequantize_vectors, (QuantizedVectors.zeros((300, 128), codec),)


def delta_rule(h, n=2):
    key, value, gates = spec(1, 100, 1, h), spec(1, 100, n, h), spec(1, 100, n)
    state = spec(1, n, h, h, dtype="float32")
    return slopes(gated_delta_rule, key, key, value, gates, gates, state)


def kimi_delta_rule(h):
    """Gradients, for which "auto" takes no kernel, asked for."""
    key, value, beta = spec(1, 100, 1, h), spec(1, 100, 2, h), spec(1, 100, 2)
    call = slopes(asked_for(kimi_delta_attention), key, key, value, value, beta)
    return asked_for(call[0]), call[1]


def state_space(size):
    x, read = spec(1, 100, 2, 64), spec(1, 100, 1, size)
    call = state_space_dual, x, spec(1, 100, 2), spec(2), read, read
    return slopes(*call) if size <= 128 else (call[0], call[1:])


def embed(dtype):
    ids = jnp.zeros((4, 2048), jnp.int32)
    return slopes(lambda table: embedding(ids, table), spec(32768, 1024, dtype=dtype))


def update(dtype):
    given, moments = [spec(40000, dtype=dtype)], [spec(40000, dtype="float32")]
    f = functools.partial(adamw_update, step=3, learning_rate=0.1)
    return f, (given, given, moments, moments)


def update_with_copies():
    wide, narrow = (
        [spec(n, dtype=t) for n in (40000, 3)] for t in ("float32", "bfloat16")
    )

    def f(params, grads, m, v, copy):
        return adamw_update(params, grads, m, v, 3, learning_rate=0.1, copy=copy)

    return f, (wide, narrow, wide, wide, narrow)


def rows_of_gradients(t=300, s=500):
    """What the gradients of attention on Hopper take beside their products."""

    def f(key, value, out, lse, dout, dlse):
        plain = gradient_rows.gradient_rows(out, lse, dout, dlse, 384)
        rows = gradient_rows.counted_rows(key, value, out, lse, dout, dlse, 384, 0.1)
        return plain, gradient_rows.counted(rows[4], rows[3], t, jnp.bfloat16)

    key, out = spec(1, s, 2, 128), spec(1, t, 4, 128)
    lse = spec(1, t, 4, dtype="float32")
    return f, (key, key, out, lse, out, lse)


def packed(qtype, f, d, *leading):
    form = TILE_FORMATS[qtype]
    tile = 16 * d // form.elements * form.bytes
    tiles: Any = spec(*leading, f // 16, tile, dtype="uint8")
    return InterleavedTensor(tiles, qtype)


def experts_of_a_prompt():
    gate, down = packed("Q4_K", 512, 256, 4), packed("Q4_K", 256, 512, 4)
    ids, weights = (spec(40, 2, dtype=t) for t in ("int32", "float32"))

    def f(x, ids, weights, gate, down):
        options = dict(alpha=1.0, limit=None, up_offset=0.0)
        hidden = expert_hidden(x, ids, gate, gate, None, None, **options)
        return expert_sum(hidden, ids, weights, down, None)

    return f, (spec(40, 256), ids, weights, gate, down)


def products(w, rows, dtype="bfloat16"):
    """A product with each thing that may stand around it."""
    d = w.shape[-1]
    x, norm = spec(rows, d, dtype=dtype), spec(d, dtype="float32")

    def all_of(x, norm, w):
        y = quantized_rms_norm_matmul(x, norm, w)
        y = quantized_matmul_add(x, w, y)
        plain = quantized_matmul(x, w) if isinstance(w, InterleavedTensor) else y
        return plain, quantized_swiglu(x, w, norm)

    return all_of, (x, norm, w)


DTYPES = ["bfloat16", "float32"]
HEAD_DIMS = [
    (64, 64),
    (96, 96),
    (128, 128),
    (192, 128),
    (256, 256),
    (512, 512),
    (64, 384),
    (272, 48),
    (5, 3),
]
CODECS = [
    IntCodec(8),
    IntCodec(4),
    Float8Codec(),
    *(TurboQuantCodec(bits) for bits in (1, 2.25, 3, 4, 5, 6, 7, 8)),
]


def decoded_int4():
    def f(w):
        return jaxkern.dequantize(jaxkern.quantize_int(w, bits=4, group_size=128))

    return f, (spec(96, 512),)


CALLS = {  # which the cases of the ops leave out
    "decoded int4": decoded_int4(),
    "rows of gradients": rows_of_gradients(),
    "experts of a prompt": experts_of_a_prompt(),
    **{
        f"{rows} rows by {q}": products(packed(q, 96, 2048), rows)
        for q in packed_products.BYTES
        for rows in (1, 9, 100)
    },
    "256 rows by Q4_K": products(packed("Q4_K", 16384, 256), 256),
    "float32 by Q5_1": products(packed("Q5_1", 64, 14432), 2, "float32"),
    **{f"{t} by bfloat16": products(spec(98, 1536), 2, t) for t in DTYPES},
    **{f"decode {c}": decode(c) for c in CODECS},
    **{f"quantize {c}": quantize(c, 128) for c in CODECS},
    "quantize 80 dims": quantize(IntCodec(5), 80),
    **{f"dequantize {c}": dequantize(c) for c in CODECS},
    **{f"gated_delta_rule {h}": delta_rule(h) for h in (64, 128, 256)},
    "gated_delta_rule in one": delta_rule(64, 4),  # on compute capability 9.0
    **{f"kimi_delta_attention {h}": kimi_delta_rule(h) for h in (64, 128)},
    **{f"state_space_dual {size}": state_space(size) for size in (128, 256)},
    **{f"embedding {t}": embed(t) for t in DTYPES},
    **{f"adamw {t}": update(t) for t in DTYPES},
    "adamw with copies": update_with_copies(),
    **{f"large groups {t}": large_groups(t) for t in DTYPES},
    **{
        name: call
        for d in (10007, 16384, 131072)
        for t in DTYPES
        for name, call in long_rows(d, t).items()
    },
    **{
        f"argsort {rows} {v} {t}": (argsort, (spec(rows, v, dtype=t),))
        for rows, v in ((3, 1), (3, 8192), (500, 16_384), (3, 128_256), (1, 2**20))
        for t in DTYPES
    },
    **{f"fwht {t}": (fwht, (spec(4096, 8192, dtype=t),)) for t in DTYPES},
    **{
        f"{f.__name__} {d} {t}": slopes(f, spec(37, d, dtype=t))
        for f in (softmax, capped_softmax, rms_norm)
        for d in (5000, 16384, 32768, 131071)
        for t in DTYPES
    },
    **{
        f"rms_norm {d} for inference": (rms_norm, (spec(37, d), spec(d)))
        for d in (64, 128, 256)
    },
    **{
        f"attention {h} {hv} {t}": attend(h, hv, t)
        for h, hv in HEAD_DIMS
        for t in DTYPES
    },
}


def launches_of(f, operands) -> list[Any]:
    f = jax.jit(f)  # traced once
    launches = [
        launch
        for row in explain(f, *operands, platform="cuda").rows
        for launch in row.launches
    ]
    traced = jax.make_jaxpr(f)(*operands).jaxpr
    equations = every_equation(traced)
    direct = [e for e in equations if e.primitive is bridge.triton_call_p]
    return launches + [e.params["launch"] for e in direct]


def check_launches(functions, capability):
    with compiling_for(capability):
        for f, operands in functions:
            for launch in launches_of(f, operands):
                binary = compiled(launch, capability)
                assert binary.asm["ptx"] and binary.asm["cubin"]
                room = bridge.max_shared_bytes()
                assert launch.shared_bytes <= room, launch.describe()


every_capability = pytest.mark.parametrize(
    "capability", [pytest.param(80, marks=pytest.mark.full), 90]
)


@every_capability
@pytest.mark.parametrize("p, case", ROWS)
def test_cases_compile_and_fit(p, case, capability):
    check_launches(functions_of(p, case), capability)


@pytest.mark.full
@every_capability
@pytest.mark.parametrize("name", CALLS)
def test_calls_compile_and_fit(name, capability):
    check_launches([CALLS[name]], capability)


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_on_a_gpu_of_little_shared_memory(dtype):
    check_launches([attend(128, 128, dtype)], 86)
    wide, operands = attend(192, 128, dtype)
    with compiling_for(86):
        text = str(explain(wide, *operands, platform="cuda"))
    assert "head dims 192 and 128 need more than the GPU's shared memory" in text


FROM_HOPPER_ON = {
    "encode_fp8_kernel",
    "fixed_point_kernel",
    "grouped_hidden_kernel",
    "grouped_result_kernel",
    "hopper_both_ways_kernel",
    "hopper_forward_in_one_kernel",
    "hopper_forward_kernel",
    "hopper_gradients_kernel",
    "lane_order_kernel",
    "many_activations_kernel",
    "slot_order_kernel",
    "staged_activations_kernel",
    "warp_chunk_matrices_kernel",
    "wide_activations_kernel",
}


@pytest.mark.full
@pytest.mark.parametrize("capability", [80, 90])
def test_no_kernel_is_left_out(capability):
    folder = pkgutil.walk_packages(jaxkern.triton.__path__, "jaxkern.triton.")
    modules = [importlib.import_module(module.name) for module in folder]
    kernels = {
        name
        for module in modules
        for name, f in vars(module).items()
        if name.endswith("_kernel") and hasattr(f, "arg_names")
    }
    functions = list(CALLS.values())
    for row in ROWS:
        functions += functions_of(*row.values)
    with compiling_for(capability):
        found = {x.name for call in functions for x in launches_of(*call)}
    left = kernels - found
    assert left == (FROM_HOPPER_ON if capability < 90 else set())
