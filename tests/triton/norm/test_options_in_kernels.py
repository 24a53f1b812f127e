"""Options that kernels took over from references, in Triton's interpreter.

The tests of the compiler ask whether a kernel compiles, not what it gives: a rotation
of the wrong dims would pass them.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.gpu import triton_call as bridge
from jaxkern.primitives.norm.layer_norm import (
    layer_norm_bwd_reference,
    layer_norm_fwd_reference,
)
from jaxkern.primitives.norm.rms_norm_add import rms_norm_add_fwd_reference
from jaxkern.primitives.rope.rope import apply_rope_reference
from jaxkern.testing.interpreter import evaluated
from jaxkern.triton.norm import layer_norm, rms_norm_add
from jaxkern.triton.rope import rope as apply_rope
from tests.triton.interpreted import (
    alone,
    call,
    check_in_its_own_process,
    interpreted,
    starts_it,
)

pytestmark = pytest.mark.skipif(bridge.triton is None, reason="triton is not installed")
HEADS = [
    ("interleaved", 2, 2, 12),
    ("interleaved", 4, 4, 8),
    ("neox", 2, 3, 11),
    ("neox", 2, 2, 4),
]


def normal(*shape):
    values = np.random.default_rng(list(shape)).standard_normal(shape)
    return jnp.asarray(values, jnp.float32)


@alone
@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("pairing, pairs, pair_offset, h", HEADS)
def test_rotation_of_either_end_of_a_head(
    pairing, pairs, pair_offset, h, at_end, monkeypatch
):
    options = dict(pairing=pairing, pair_offset=pair_offset, at_end=at_end)
    operands = normal(5, 2, h), normal(5, pairs), normal(5, pairs + 1)[:, 1:]
    in_place = functools.partial(call, in_place=True)
    monkeypatch.setattr(apply_rope, "triton_call", in_place)
    with interpreted():
        y = apply_rope.apply_rope_fwd(*operands, **options)
    np.testing.assert_allclose(y, apply_rope_reference(*operands, **options), atol=1e-6)


@alone
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_layer_norm_with_an_offset_of_its_weight(offset):
    x, dy, weight, bias = normal(4, 16), normal(16, 4).T, normal(16), normal(17)[1:]
    options = dict(eps=1e-5, offset=offset)
    with interpreted():
        y, *saved = layer_norm.layer_norm_fwd(x, weight, bias, **options)
        operands = (x, weight, bias, *saved, dy)
        grads = layer_norm.layer_norm_bwd(*operands, wanted=(True,) * 3, **options)
    expected = evaluated(
        functools.partial(layer_norm_fwd_reference, **options), x, weight, bias
    )
    np.testing.assert_allclose(y, expected[0], atol=1e-5)
    operands = (x, weight, bias, *expected[1:], dy)
    for g, e in zip(grads, layer_norm_bwd_reference(*operands, **options), strict=True):
        np.testing.assert_allclose(g, e, atol=1e-5)


@alone
@pytest.mark.parametrize("scale", [None, 1, 13])
def test_a_sum_of_few_rows(scale):
    """A program a row; more rows have another kernel."""
    x, residual, weight = normal(3, 13), normal(13, 3).T, normal(13)
    operands = x, residual, weight, None if scale is None else normal(scale)
    options = dict(eps=0.1, offset=1.0)
    with interpreted():
        found = rms_norm_add.rms_norm_add_fwd(*operands, **options)
        bare = rms_norm_add.rms_norm_add_fwd(x, residual, None, None, **options)
    expected = evaluated(
        functools.partial(rms_norm_add_fwd_reference, **options), *operands
    )
    bare_expected = evaluated(
        functools.partial(rms_norm_add_fwd_reference, **options),
        x,
        residual,
        None,
        None,
    )
    for y, e in zip((*found, *bare), (*expected, *bare_expected), strict=True):
        np.testing.assert_allclose(y, e, atol=1e-5)


@starts_it
def test_the_interpreter_agrees():
    check_in_its_own_process(__file__, 2 * len(HEADS) + 5)
