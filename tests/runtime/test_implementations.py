"""implementations: every op, every row, and refusals in words."""

import jax
import jax.numpy as jnp
import pytest

import jaxkern
from jaxkern import explain, rms_norm
from jaxkern.lowering.lower import rows_on
from jaxkern.primitives.kernel_primitive import REGISTRY
from jaxkern.runtime import implementations

X = jax.ShapeDtypeStruct((4, 256), jnp.float32)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "METAL"])
def test_every_op_ends_with_its_reference(platform):
    for name, p in REGISTRY.items():
        rows = implementations(name, platform)
        members = [m for m in (p, p.fwd, p.bwd) if m is not None]
        for member in members:
            own = [row for row in rows if row.op == member.name]
            declared = rows_on(member, platform)
            assert [row.kernel for row in own[:-1]] == [r.title for r in declared]
            assert (own[-1].backend, own[-1].refusal) == ("xla", None)
            assert own[-1].kernel.endswith(f".{member.reference.__name__}")
        assert {row.op for row in rows} == {m.name for m in members}
        assert all(row.platform == platform for row in rows)


def test_refusals_are_those_of_explain():
    wide = jax.ShapeDtypeStruct((4, 256), jnp.float64)
    with jax.enable_x64(True):
        kernel, plain = implementations("rms_norm", "cuda", wide)
        chosen = explain(rms_norm, wide, platform="cuda").rows[0]
    assert kernel.backend == "triton" and kernel.refusal
    assert chosen.refused == (f"{kernel.kernel}: {kernel.refusal}",)
    assert (plain.backend, plain.refusal) == ("xla", None)
    assert kernel.refusal in str(kernel) and "rms_norm on cuda by triton" in str(kernel)
    kernel, _ = implementations(rms_norm, "cuda", X, eps=1e-5)
    assert kernel.refusal is None
    with jaxkern.backend("xla"):
        kernel, _ = implementations("rms_norm", "cuda", X)
    assert kernel.refusal == "backend is xla"


def test_a_kernel_that_is_slower_says_so():
    [row, _] = implementations("argmax", "cuda", jnp.zeros((1, 100_000)))
    assert row.refusal is not None and "XLA is faster" in row.refusal
    with jaxkern.backend("triton"):
        [row, _] = implementations("argmax", "cuda", jnp.zeros((1, 100_000)))
    assert row.refusal is None


def test_a_public_function_stands_for_its_primitive():
    """The tests above give a function only with operands, which are traced."""
    assert implementations(rms_norm, "cuda") == implementations("rms_norm", "cuda")
