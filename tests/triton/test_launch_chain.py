"""What the kernels of a chain compute, launched as its program says, interpreted.

Tests of ops see one kernel at a time: that a result is an operand of the next one, at
an offset or beside another, is seen here alone.
"""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal

import jaxkern
from jaxkern import linear, quantized_matmul_add, quantized_rms_norm_matmul
from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compiling_for
from jaxkern.lowering.chained import in_chains
from jaxkern.triton.quant import dense_products
from jaxkern.triton.quant.dense_products import launch
from tests.triton.interpreted import (
    Host,
    alone,
    check_in_its_own_process,
    interpreted,
    starts_it,
    unwritten,
)

pytestmark = pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)


def launched(params, operands):
    """The results of a chain: each kernel on slices of the buffers, in order."""
    buffers = [np.array(x) for x in operands]
    for shape, dtype in params["out"]:
        buffers.append(unwritten(shape, dtype))
    for operand, result in params["aliases"]:
        buffers[len(operands) + result] = buffers[operand]
    for step in params["steps"]:
        kernel, constants = step.launch.kernel, dict(step.launch.constants)
        names = [n for n in kernel.arg_names if n not in constants]
        pointers = [
            Host(buffers[at].reshape(-1)[offset // buffers[at].itemsize :])
            for at, offset in step.sources
        ]
        given = dict(zip(names, pointers, strict=True))
        kernel[step.launch.grid](**given, **constants)
    return buffers[len(operands) :]


def evaluated(jaxpr, *args):
    values = dict(zip(jaxpr.jaxpr.invars, args, strict=True))
    values.update(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
    chains = 0
    for eqn in jaxpr.eqns:
        operands = [v.val if isinstance(v, Literal) else values[v] for v in eqn.invars]
        if eqn.primitive.name == "launch_chain":
            out, chains = launched(eqn.params, operands), chains + 1
        else:
            out = eqn.primitive.bind(*map(jnp.asarray, operands), **eqn.params)
            out = out if eqn.primitive.multiple_results else [out]
        values.update(zip(eqn.outvars, out, strict=True))
    return [values[v] for v in jaxpr.jaxpr.outvars], chains


@alone
def test_a_chain_computes_what_its_function_does():
    rng = np.random.default_rng(0)

    def drawn(*shape):
        return jnp.asarray(rng.standard_normal(shape) / 16, jnp.bfloat16)

    def f(x, w, v, u):
        norm = jnp.linspace(0.5, 2.0, 512)
        y = quantized_rms_norm_matmul(x, norm, w, eps=1e-5)
        first, last = jnp.split(y, [512], axis=-1)
        z = quantized_matmul_add(first.reshape(1, 512), v, last)
        both = jnp.concatenate([last, z, last], axis=-1)
        return z, both[:, 16:32], linear(first, u).astype(jnp.float32)

    args = drawn(1, 512) * 16, drawn(528, 512), drawn(16, 512), drawn(8, 512)
    by_interpreter = mock.patch.object(dense_products, "BY_LANES", ())  # not Gluon
    with compiling_for(90), by_interpreter:
        closed = jax.make_jaxpr(f)(*args)
        jaxpr = jax.make_jaxpr(lambda *x: in_chains(*x, jaxpr=closed))(*args)
    out, chains = evaluated(jaxpr, *args)
    assert chains == 1
    with jaxkern.backend("xla"):
        want = f(*args)
    for got, y in zip(out, want, strict=True):
        got, y = (np.asarray(a, np.float64) for a in (got, y))
        # the interpreter cuts to bfloat16, where XLA rounds
        np.testing.assert_allclose(got, y, rtol=0.03, atol=0.03)


@alone
@pytest.mark.parametrize("up", [False, True])
def test_a_gate_of_gelu(up):
    """Of 256 columns, the other half a product of its own or an operand."""
    rng = np.random.default_rng(2)
    x, beside = (rng.standard_normal((2, n)).astype(np.float32) for n in (256, 6))
    w = jnp.asarray(rng.standard_normal((2 - up, 6, 256)) / 16, jnp.bfloat16)
    given = dict(up=jnp.asarray(beside)) if up else {}
    with interpreted():
        own = w[0] if up else w
        y = launch(jnp.asarray(x), own, activation="gelu_tanh", **given)
    gate, *other = np.einsum("md,gfd->gmf", x, np.asarray(w, np.float64))
    want = gate / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
    want *= beside if up else other[0]
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


@alone
@pytest.mark.parametrize("gated", [False, True])
def test_rows_of_several_reads(gated):
    """Columns that are read while the ones before are multiplied: first, next, last."""
    rng = np.random.default_rng(1)
    x, norm = (rng.standard_normal(s).astype(np.float32) for s in ((2, 1536), 1536))
    w = jnp.asarray(rng.standard_normal((1 + gated, 6, 1536)) / 16, jnp.bfloat16)
    with interpreted():
        own, activation = (w, "silu") if gated else (w[0], None)
        norm = jnp.asarray(norm)
        y = launch(jnp.asarray(x), own, norm=norm, activation=activation)
    wide = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True)) * norm
    gate, *up = np.einsum("md,gfd->gmf", wide, np.asarray(w, np.float64))
    want = gate / (1 + np.exp(-gate)) * up[0] if gated else gate
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


@starts_it
def test_a_chain_in_the_interpreter():
    check_in_its_own_process(__file__, 5)
