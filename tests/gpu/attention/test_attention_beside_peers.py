"""Errors of attention beside those of cuDNN and FA3 on the same inputs.

Against float64: out, dq, dk and dv may have 1.2 times the error of the peer.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import backend
from tests.gpu.attention.test_attention import as_jax, attend, draw, operands
from tests.gpu.truth import on_a_gpu

pytestmark = [
    *on_a_gpu,
    pytest.mark.parametrize("kind", ["auto", "triton"]),
]
T = 1024
LENGTHS = np.array([1000, 333])
RNG = np.random.default_rng(1)
BITS = RNG.random((2, 1, T, T)) < 0.6


def values_and_gradients(f, operand, cotangent):
    y, pull = jax.vjp(f, *operand)
    return y, *pull(cotangent.astype(y.dtype))


def by_jax(f, operand, cotangent):
    return jax.jit(functools.partial(values_and_gradients, f))(operand, cotangent)


def check(kind, operand, theirs, **options):
    """`theirs` gives (out, dq, dk, dv) of operands and a cotangent."""
    b, t, n, _ = operand[0].shape
    cotangent = draw(b, t, n, operand[2].shape[3])

    def ours(*x):
        return attend(*x, **options)

    with backend(kind, strict=True):
        found = by_jax(ours, operand, cotangent)
    peer = theirs(operand, cotangent)
    with jax.enable_x64(True), backend("xla"):
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), (operand, cotangent))
        truth = by_jax(ours, *wide)
    for name, *results in zip(
        ("out", "dq", "dk", "dv"), found, peer, truth, strict=True
    ):
        y, other, e = (np.asarray(x, np.float64) for x in results)
        error, its = np.linalg.norm(y - e), np.linalg.norm(other - e)
        assert error <= 1.2 * its, (name, error / its)


def cudnn(operand, cotangent, **options):
    def f(*x):
        return jax.nn.dot_product_attention(*x, implementation="cudnn", **options)

    return by_jax(f, operand, cotangent)


BIAS = draw(1, 6, T, T)
CASES: dict[str, tuple[dict, dict]] = {
    "all": ({}, {}),
    "causal": (dict(causal=True), dict(is_causal=True)),
    "window": (
        dict(causal=True, window=200),
        dict(is_causal=True, local_window_size=(199, 0)),
    ),
    "bias": (dict(bias=BIAS), dict(bias=BIAS)),
    "bias, causal": (dict(bias=BIAS, causal=True), dict(bias=BIAS, is_causal=True)),
    "mask": (dict(mask=BITS), dict(mask=BITS)),
    "lengths": (
        dict(kv_lengths=LENGTHS),
        dict(key_value_seq_lengths=LENGTHS, query_seq_lengths=np.full(2, T)),
    ),
    "lengths, causal": (
        dict(kv_lengths=LENGTHS, q_offset=np.zeros(2, np.int32), causal=True),
        dict(
            key_value_seq_lengths=LENGTHS,
            query_seq_lengths=np.full(2, T),
            is_causal=True,
        ),
    ),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("h", [64, 96, 128, 256])
@pytest.mark.parametrize("heads", [(4, 1), (2, 3)])
def test_head_dims(kind, h, heads, dtype):
    theirs = functools.partial(cudnn, is_causal=True)
    check(kind, operands(1, T, T, *heads, h, dtype=dtype), theirs, causal=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("h", [64, 128])
@pytest.mark.parametrize("name", CASES)
def test_every_option(kind, name, h, dtype):
    ours, theirs = (as_jax(x) for x in CASES[name])
    for options in (ours, theirs):
        if "bias" in options:  # which is of the dtype of the operands there
            options["bias"] = options["bias"].astype(dtype)
    theirs = functools.partial(cudnn, **theirs)
    check(kind, operands(2, T, T, 2, 3, h, dtype=dtype), theirs, **ours)


def in_torch(x) -> Any:
    torch = pytest.importorskip("torch")
    whole = torch.tensor(np.asarray(x, np.float32), device="cuda")
    return whole.to(getattr(torch, x.dtype.name)).transpose(1, 2)


def torch_cudnn(operand, cotangent, **options):
    torch = pytest.importorskip("torch")
    attention = pytest.importorskip("torch.nn.attention")
    leaves = [in_torch(x).detach().requires_grad_() for x in operand]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    with attention.sdpa_kernel(attention.SDPBackend.CUDNN_ATTENTION):
        y = sdpa(*leaves, enable_gqa=True, **options)
        y.backward(in_torch(cotangent.astype(operand[0].dtype)))
    results = y, *(x.grad for x in leaves)
    return [x.detach().transpose(1, 2).double().cpu().numpy() for x in results]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("h, hv", [(192, 128), (128, 128)])
def test_values_of_fewer_dims_beside_torch(kind, h, hv, causal, dtype):
    theirs = functools.partial(torch_cudnn, is_causal=causal)
    check(kind, operands(1, T, T, 4, 2, h, hv, dtype), theirs, causal=causal)


@pytest.mark.parametrize("options", [{}, dict(causal=True)], ids=["all", "causal"])
@pytest.mark.parametrize("h", [64, 128])
def test_beside_fa3(kind, h, options):
    peer = pytest.importorskip("dew_flash_attn")

    def theirs(operand, cotangent):
        f = functools.partial(peer.flash_mha, is_causal=bool(options))
        return by_jax(f, operand, cotangent)

    check(kind, operands(2, T, T, 2, 4, h), theirs, **options)
