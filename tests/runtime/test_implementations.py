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


@pytest.mark.parametrize("ask", [explain, implementations])
def test_a_platform_that_nobody_has_is_refused(ask):
    """It had no row for any op, so that every op ran its reference there."""
    args = (rms_norm, X) if ask is explain else (rms_norm,)
    options = {"platform" if ask is explain else "device": "cdua"}
    message = rf"^{ask.__name__}: `platform` must be one of .*cpu, cuda, .*got 'cdua'"
    with pytest.raises(ValueError, match=message):
        ask(*args, **options)
    if ask is explain:
        with pytest.raises(ValueError, match='An NVIDIA GPU is "cuda"'):
            explain(rms_norm, X, platform="gpu")


def test_a_gpu_that_is_assumed_is_said():
    """Other tests read the lines of the ops, none what they were compiled for."""
    pytest.importorskip("triton")
    from jaxkern.triton.launch import compiling_for, device_capability

    def text(platform):
        return str(explain(rms_norm, X, platform=platform))

    if device_capability() is None:
        assert "capability 8.0: there is no CUDA GPU here" in text("cuda")
    with compiling_for(90):
        assert text("cuda").endswith("compute capability 9.0: as asked")
    assert "capability" not in text("cpu")


@pytest.mark.parametrize("name", ["pallas", "cutlass"])
def test_an_unknown_backend_lists_the_names_that_exist(name):
    """The test that it is refused did not read what to say instead."""
    with pytest.raises(ValueError, match="'mosaic_gpu'") as error:
        jaxkern.backend(name)
    hint = 'The Pallas kernels are "mosaic_gpu".'
    assert str(error.value).endswith(hint) == (name == "pallas")
