"""Operators serialise with jax.export: several platforms, symbolic sizes, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern as jk
from jaxkern.testing import checks
from jaxkern.testing.check_op import is_small
from tests.cases import cases_of
from tests.test_every_op import OPS

pytest.importorskip("flatbuffers")  # jax.export needs it to serialise
pytestmark = pytest.mark.smoke


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.mark.parametrize(
    "f, specs",
    [
        (jk.rms_norm, lambda b: [f32(b, 16), f32(16)]),
        (
            lambda q, k: jk.attention(q, k, k, causal=True),
            lambda b: [f32(b, 8, 4, 16), f32(b, 8, 2, 16)],
        ),
        (lambda x: jk.swiglu(x, x), lambda b: [f32(b, 16)]),
        (lambda x: jk.top_k(x, 3)[0], lambda b: [f32(b, 16)]),
        pytest.param(
            lambda x, w: jk.linear_cross_entropy(
                x, w, jnp.zeros_like(x[:, 0], jnp.int32), reduction="none"
            ),
            lambda b: [f32(b, 16), f32(9, 16)],
            marks=pytest.mark.full,
        ),
    ],
    ids=["rms_norm", "attention", "swiglu", "top_k", "linear_cross_entropy"],
)
def test_export_with_a_symbolic_batch(f, specs):
    (b,) = jax.export.symbolic_shape("b")
    exported = jax.export.export(jax.jit(f), platforms=("cpu", "cuda", "METAL"))(
        *specs(b)
    )
    loaded = jax.export.deserialize(exported.serialize(vjp_order=1))
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.normal(size=s.shape), jnp.float32) for s in specs(3)]
    np.testing.assert_allclose(loaded.call(*args), f(*args), rtol=1e-5, atol=1e-6)
    expected, pull = jax.vjp(f, *args)
    actual = loaded.vjp().call(*args, expected)
    for a, e in zip(actual, pull(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5)


def is_batch(label, size):
    return label == "b" or label.startswith("lead") or (label == "#b" and size > 1)


def with_leading_dims(p):
    """Operands, options and symbolic types of the first small case that has any."""
    for case in filter(lambda c: is_small(p, c), cases_of(p)):
        operands = checks.operands_of(p, case)
        sizes, specs = {}, []
        for a, x in zip(p.operands, operands, strict=True):
            if x is not None:
                lead = range(x.ndim - len(a.labels))
                labels = [f"lead{d}" for d in lead] + list(a.labels)
                dims = [
                    label.removeprefix("#") if is_batch(label, n) else n
                    for label, n in zip(labels, x.shape, strict=True)
                ]
                sizes |= zip(dims, x.shape, strict=True)
                specs.append(dims)
        if any(isinstance(n, str) for n in sizes) and all(sizes.values()):
            return case, operands, specs
    raise AssertionError(f"{p.name}: no small case has leading dims.")


BATCHED = [p for p in OPS if any("..." in a.dims or "b" in a.dims for a in p.operands)]
OFTEN = ("dequantize", "quantize_gguf", "int_matmul_id")


@pytest.mark.parametrize(
    "p",
    [
        pytest.param(p, id=p.name, marks=[pytest.mark.full] * (p.name not in OFTEN))
        for p in BATCHED
    ],
)
def test_export_with_symbolic_leading_dims(p):
    case, operands, shapes = with_leading_dims(p)
    scope = jax.export.SymbolicScope()
    present = [x for x in operands if x is not None]

    def f(*arrays):
        rest = iter(arrays)
        full = [None if x is None else next(rest) for x in operands]
        return checks.bound(p, case)(*full)

    specs = [
        jax.ShapeDtypeStruct(
            jax.export.symbolic_shape(",".join(map(str, dims)), scope=scope), x.dtype
        )
        for dims, x in zip(shapes, present, strict=True)
    ]
    exported = jax.export.export(jax.jit(f), platforms=("cpu",))(*specs)
    expected = jax.jit(f)(*present)
    checks.same(exported.call(*present), expected, what=p.name)


def test_bytes_and_numbers_of_a_symbolic_number_of_rows():
    def f(w):
        blocks = jk.quantize_gguf(w, "Q8_K")
        return blocks.blocks, jk.dequantize(blocks)

    (b,) = jax.export.symbolic_shape("b")
    exported = jax.export.export(jax.jit(f), platforms=("cpu",))(f32(b, 256))
    w = jnp.asarray(np.random.default_rng(0).normal(size=(2, 256)), jnp.float32)
    for y, e in zip(exported.call(w), f(w), strict=True):
        np.testing.assert_array_equal(y, e)
