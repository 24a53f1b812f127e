"""The Hopper gradients of attention on a machine without a GPU."""

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import attention, backend
from jaxkern.gpu.device import compiling_for
from jaxkern.lowering.exported_kernels import CHECKS
from jaxkern.pallas.attention.attention import bwd as hopper
from jaxkern.pallas.attention.attention import fwd as forward
from jaxkern.pallas.attention.attention import gradient_memory, joint_bwd
from jaxkern.primitives.attention.attend import tail_of
from jaxkern.primitives.attention.attention import attention_p
from tests.pallas.attention.test_attention import ABSENT, operands
from tests.primitives.attention.one_key import check_first_key, check_sink

RNG = np.random.default_rng(1)
BIAS = 2 * RNG.standard_normal((2, 2, 70, 150)).astype("float32")
BITS = RNG.random((2, 2, 70, 150)) < 0.6
BITS[0, :, 20:50] = False  # rows that see nothing
STATIC: dict[str, Any] = dict(causal=False, window=None, softcap=None, scale=0.1)
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": dict(causal=True),
    "all": {},
    "everything": dict(
        causal=True,
        window=70,
        kv_lengths=jnp.array([150, 0]),
        q_offset=jnp.array([20, 60]),
        softcap=3.0,
        sinks=jnp.array([0.5, -2.0]),
    ),
    "window": dict(causal=True, window=70),
    "mask": dict(mask=jnp.asarray(BITS)),
    "bias": dict(bias=jnp.asarray(np.where(BITS, BIAS, -np.inf)), causal=True),
    "bias_of_keys": dict(bias=jnp.asarray(BIAS[:1, :, :1]), softcap=2.0),
    "bias_of_queries": dict(bias=jnp.asarray(BIAS[..., :1])),
    "bias_and_mask": dict(
        bias=jnp.asarray(BIAS[:, :1]),
        mask=jnp.asarray(BITS),
        kv_lengths=jnp.array([0, 130]),
    ),
    "mask_of_keys": dict(mask=jnp.asarray(BITS[:, :1, :1]), causal=True),
    "mask_of_queries": dict(mask=jnp.asarray(BITS[:1, :, :, 70:71])),
    "mask_that_shows_all": dict(mask=jnp.ones((1, 1, 70, 150), bool)),
    "segments": dict(
        q_segment_ids=jnp.asarray(np.sort(RNG.integers(0, 3, (2, 70)), 1), jnp.int32),
        kv_segment_ids=jnp.asarray(np.sort(RNG.integers(0, 4, (2, 150)), 1), jnp.int32),
    ),
}


def test_gradients_of_one_block():
    check(joint_bwd.attention_bwd, "causal", 128, 128, sizes=(1, 40, 64, 1, 1))


@pytest.mark.full
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("h, hv", [(64, 64), (128, 96), (192, 128), (256, 256)])
def test_gradients(name, h, hv):
    check(hopper.attention_bwd, name, h, hv)


@pytest.mark.full
def test_programs_of_many_tiles_and_of_half_as_many_keys(monkeypatch):
    for module in (hopper, gradient_memory):
        monkeypatch.setattr(module, "num_sms", lambda: 5)
    check(hopper.attention_bwd, "window", 128, 128, sizes=(1, 280, 330, 2, 2))


@pytest.mark.full
@pytest.mark.parametrize("name", ["causal", "all", "everything", "segments"])
def test_gradients_of_one_kernel(name):
    check(joint_bwd.attention_bwd, name, 128, 128, softcap=None)


@pytest.mark.full
def test_one_kernel_of_heads_from_their_last_queries():
    check(joint_bwd.attention_bwd, "causal", 128, 128, sizes=(1, 330, 330, 1, 3))


@pytest.mark.parametrize(
    "s, causal, window, ids, chosen",
    [
        (16384, True, None, None, True),
        (4096, False, None, None, True),
        (4096, True, None, None, True),
        (2048, True, None, None, False),
        (16384, True, 2048, None, False),
        (16384, True, 3072, None, True),
        (4096, True, 3072, None, True),
        (16384, True, None, jnp.zeros((1, 16384), jnp.int32), False),
    ],
)
def test_one_kernel_where_queries_see_many_keys(s, causal, window, ids, chosen):
    x = jax.ShapeDtypeStruct((1, s, 8, 128), jnp.bfloat16)
    options: Any = dict(value=x, bias=None, causal=causal, window=window)
    options["q_segment_ids"] = ids
    assert (joint_bwd.slower(query=x, key=x, **options) is None) == chosen


@pytest.mark.full
def test_a_bound_that_is_no_number_stays_visible():
    """Rows of dq are counted in units, which must not hide what is not finite."""
    q, k, v = operands(1, 64, 128, 1, 1, 128)
    absent: Any = [None] * 7
    out, lse = attention_p.reference(q, k, v, *absent, **STATIC)
    operand: Any = q, k.at[0, 3, 0, 5].set(jnp.nan), v, *absent
    rest: Any = out, lse, None, jnp.ones_like(out), jnp.zeros_like(lse)
    wanted = (True, True, True, False, False)
    dq, *_ = joint_bwd.attention_bwd(
        *operand, *rest, **STATIC, wanted=wanted, interpret=True
    )
    assert np.isnan(np.asarray(dq, np.float32)).all()


def check(gradients, name, h, hv, sizes=(2, 70, 150, 1, 2), **forced):
    """In the interpreter, against those of the reference in float32."""
    given = STATIC | OPTIONS[name] | forced
    arrays: Any = [given.pop(n, None) for n in ABSENT]
    operand: Any = [*operands(*sizes, h, hv), *arrays]

    def wide(xs) -> Any:
        return [
            x.astype(jnp.float32) if x is not None and x.dtype == jnp.bfloat16 else x
            for x in xs
        ]

    options: Any = given
    out, lse = attention_p.reference(*wide(operand), **options)
    dout = jnp.asarray(RNG.standard_normal(out.shape), jnp.bfloat16)
    dlse = jnp.asarray(RNG.standard_normal(lse.shape), jnp.float32)
    rounded = out.astype(jnp.bfloat16)
    rest: Any = rounded, lse, tail_of(out, rounded), dout, dlse
    wanted = (True, True, True, "bias" in OPTIONS[name], "sinks" in OPTIONS[name])
    found = gradients(*operand, *rest, **options, wanted=wanted, interpret=True)
    expected = attention_p.bwd.reference(*wide(operand), *wide(rest), **options)
    for i in np.flatnonzero(wanted):
        y, e = found[i], expected[i]
        y, e = np.asarray(y, np.float32), np.asarray(e)
        assert y.shape == e.shape
        assert np.linalg.norm(y - e) < 4e-3 * np.linalg.norm(e)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("h, name", [(64, "two"), (128, "joint"), (256, "two")])
def test_one_key_with_nearly_all_weight(h, name, dtype):
    """The test of the references, of these kernels; forward and backward."""
    gradients = dict(two=hopper, joint=joint_bwd)[name].attention_bwd

    def attend(q, k, v, bias, dout):
        operand = q, k, v, bias, *[None] * 6
        options: Any = STATIC | dict(scale=h**-0.5)
        if name == "joint":  # which takes no bias
            operand, options = (q, k, v, *[None] * 7), options | dict(causal=True)
        with jax.default_matmul_precision("highest"):
            saved = forward.attention_fwd(*operand, **options, interpret=True)
        wanted = True, True, True, False, False
        rest = *saved, dout, jnp.zeros_like(saved[1])
        return gradients(*operand, *rest, **options, wanted=wanted, interpret=True)[:3]

    if name == "joint":
        check_first_key(attend, h, dtype)
    else:
        check_sink(attend, h, dtype)


@pytest.mark.parametrize("gradients", [hopper.attention_bwd, joint_bwd.attention_bwd])
def test_partitioned_calls_may_have_no_effects(gradients):
    """custom_partitioning lowers no jaxpr with a ref that lives on its own in it."""
    q, k, v = operands(1, 300, 300, 2, 2, 128)
    options: Any = STATIC | dict(wanted=(True, True, True, False, False))
    rest: Any = q, jnp.zeros(q.shape[:3]), None, q, jnp.zeros(q.shape[:3])

    def dq(q, k, v):
        return gradients(q, k, v, *[None] * 7, *rest, **options)[0]

    with compiling_for(90):
        assert not jax.make_jaxpr(dq)(q, k, v).effects


def gradients_of(**options):
    def loss(q, k, v):
        out: Any = attention(q, k, v, causal=True, **options)
        return out.astype(jnp.float32).sum()

    return jax.jit(jax.grad(loss, (0, 1, 2)))


def test_lowers_for_cuda_without_a_gpu():
    q, k, v = operands(1, 300, 300, 2, 2, 128)
    mask, bias = jnp.ones((1, 1, 300, 300), bool), jnp.ones((1, 4, 300, 300))
    with compiling_for(90), backend("mosaic_gpu", strict=True):
        traced = gradients_of(mask=mask, bias=bias).trace(q, k, v)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 3


DIMS = [(64, 64), (96, 96), (192, 128), (256, 256), (320, 320), (512, 512)]


@pytest.mark.parametrize(
    "h, hv",
    [(128, 128), *(pytest.param(*dims, marks=pytest.mark.full) for dims in DIMS)],
)
def test_a_mask_alone_over_whole_blocks_lowers(h, hv):
    """Of keys that end with a block nothing but the mask says which are seen."""
    q, k, v = operands(1, 256, 384, 2, 2, h, hv)

    def loss(q, k, v):
        out: Any = attention(q, k, v, mask=jnp.ones((1, 4, 256, 384), bool))
        return out.astype(jnp.float32).sum()

    forward_alone = h > 256
    f = jax.jit(loss if forward_alone else jax.grad(loss, (0, 1, 2)))
    with compiling_for(90), backend("mosaic_gpu", strict=True):
        text = f.trace(q, k, v).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == (1 if forward_alone else 3)


@pytest.mark.full
def test_is_exported_without_a_gpu():
    pytest.importorskip("flatbuffers")  # jax.export needs it to serialise
    q, k, v = operands(1, 300, 300, 2, 2, 128)
    # jax promises nothing for the kernels of Triton beside them
    with compiling_for(90), backend("mosaic_gpu", strict=True):
        exported = jax.export.export(
            gradients_of(), platforms=("cuda",), disabled_checks=list(CHECKS)
        )(q, k, v)
    again = jax.export.deserialize(exported.serialize())
    assert again.mlir_module().count("@mosaic_gpu_v2") == 2
