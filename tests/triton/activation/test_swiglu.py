"""swiglu and its gradients in Triton's interpreter, against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import backend, explain, swiglu
from jaxkern.gpu import triton_call as bridge
from jaxkern.primitives.activation.swiglu import packed_swiglu_p, swiglu_p
from jaxkern.triton.activation import swiglu as kernel
from tests.triton.interpreted import (
    alone,
    check_in_its_own_process,
    interpreted,
    starts_it,
)

pytestmark = pytest.mark.skipif(bridge.triton is None, reason="triton is not installed")
SHAPES = [(), (3, 5, 13), (9, 512), (2, 3, 1024), (5, 2500), (1, 4096)]
OPTIONS = [
    dict(alpha=1.0, limit=None, up_offset=0.0),
    dict(alpha=1.702, limit=1.5, up_offset=1.0),
]


@starts_it
def test_in_a_process_of_its_own():
    check_in_its_own_process(__file__, 2 * len(SHAPES) * len(OPTIONS) - 2 + 3)


def drawn(*shapes, seed=0):
    draw = np.random.default_rng(seed).standard_normal
    return [jnp.float32(2 * draw(shape)) for shape in shapes]


def check(found, expected):
    for y, e in zip(found, expected, strict=True):
        assert y.shape == e.shape and y.dtype == e.dtype
        np.testing.assert_allclose(y, e, rtol=2e-6, atol=1e-6)


@alone
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gate_and_up_apart(shape, options):
    operands = drawn(shape, shape, shape)
    assert swiglu_p.bwd is not None
    expected = swiglu_p.bwd.reference(*operands, **options)
    with interpreted():
        found = kernel.swiglu_bwd(*operands, wanted=(True, True), **options)
    check(found, expected)


@alone
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_both_in_one_array(shape, options):
    *leading, f = shape
    operands = drawn((*leading, 2 * f), shape)
    assert packed_swiglu_p.bwd is not None
    expected = packed_swiglu_p.bwd.reference(*operands, **options)
    with interpreted():
        found = kernel.packed_swiglu_bwd(*operands, **options)
        y = kernel.packed_swiglu(operands[0], **options)
    check([found, y], [expected, packed_swiglu_p.reference(operands[0], **options)])


@alone
def test_what_is_not_wanted_is_not_computed():
    operands = drawn((9, 128), (9, 128), (9, 128))
    with interpreted():
        none, dup = kernel.swiglu_bwd(*operands, wanted=(False, True), **OPTIONS[0])
        dgate, nor = kernel.swiglu_bwd(*operands, wanted=(True, False), **OPTIONS[0])
        both = kernel.swiglu_bwd(*operands, wanted=(True, True), **OPTIONS[0])
    assert none is None and nor is None
    np.testing.assert_array_equal(dgate, both[0])
    np.testing.assert_array_equal(dup, both[1])


@alone
@pytest.mark.filterwarnings("ignore:overflow")  # of the exponential, whose 1 / inf is 0
def test_tails_and_nan():
    gate = jnp.float32([[-200, 200, jnp.nan, 0, -jnp.inf]])
    up = dy = jnp.ones_like(gate)
    assert swiglu_p.bwd is not None
    with interpreted(), np.errstate(invalid="ignore"):
        found = kernel.swiglu_bwd(gate, up, dy, wanted=(True, True), **OPTIONS[0])
    for y, e in zip(
        found, swiglu_p.bwd.reference(gate, up, dy, **OPTIONS[0]), strict=True
    ):
        np.testing.assert_allclose(y, e, rtol=1e-6)


def test_float64_is_refused_in_words():
    x = jax.ShapeDtypeStruct((2, 3), jnp.float64)
    assert kernel.unsupported(dy=x) in ("`dy` is float64", bridge.missing())


@starts_it
@pytest.mark.skipif(bridge.missing() is not None, reason="no CUDA plugin")
@pytest.mark.parametrize("packed", [False, True])
def test_large_gradients_are_one_launch_and_small_ones_those_of_xla(packed):
    def runs(rows):
        x = jax.ShapeDtypeStruct((rows, 2 * 5632 if packed else 5632), jnp.bfloat16)
        dy = jax.ShapeDtypeStruct((rows, 5632), jnp.bfloat16)

        def pulled(x, dy):
            _, pull = jax.vjp(swiglu, *([x] if packed else [x, 2 * x]))
            return pull(dy)

        with backend("auto"):
            rows_of = explain(pulled, x, dy, platform="cuda").rows
        [row] = [row for row in rows_of if row.op.endswith("bwd")]
        return row

    [launch] = runs(16384).launches
    assert launch.name == "swiglu_bwd_kernel"
    assert launch.registers <= 64 and launch.stack_bytes == 0
    assert runs(128).runs.startswith("xla: ")


@starts_it
@pytest.mark.skipif(bridge.missing() is not None, reason="no CUDA plugin")
def test_one_large_array_is_one_launch_and_two_are_left_to_xla():
    def runs(rows, *widths):
        operands = [jax.ShapeDtypeStruct((rows, n), jnp.bfloat16) for n in widths]
        with backend("auto"):
            [row] = explain(swiglu, *operands, platform="cuda").rows
        return row

    [launch] = runs(16384, 2 * 5632).launches
    assert launch.name == "packed_swiglu_kernel"
    assert launch.registers <= 64 and launch.stack_bytes == 0
    assert runs(128, 2 * 5632).runs.startswith("xla: ")
    assert runs(16384, 5632, 5632).runs.startswith("xla: ")
