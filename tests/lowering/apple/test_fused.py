"""The fused calls of jax-mps: their text, their meaning against MLX, their refusals.

jax-mps does not run here. What its kernels mean is held against MLX on the CPU by
tests/golden/mlx_fused.npz, what a row makes of them against the op's reference.
"""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern as jk
from jaxkern.lowering.apple import assume_jax_mps, check, fused
from jaxkern.lowering.apple.rows import KERNELS
from jaxkern.lowering.kernel_table import row_of
from jaxkern.primitives.attention.operands import AttentionOperands
from jaxkern.primitives.kernel_primitive import REGISTRY
from jaxkern.testing import checks
from tests.cases import cases_of
from tests.lowering.apple import mlx_kernels
from tests.lowering.apple.fused_calls import sent

with np.load(Path(__file__).parents[2] / "golden/mlx_fused.npz") as file:
    GOLDEN = dict(file)


def golden(*names):
    return [jnp.asarray(GOLDEN[name]) for name in names]


ROPE = dict(base=500.0, rope_scale=1.0)


@pytest.mark.parametrize(
    "name, operands, options",
    [
        ("rms_norm", ("x", "weight"), dict(eps=1e-3)),
        ("layer_norm", ("x", "weight", "bias"), dict(eps=1e-3)),
        ("gelu", ("x",), {}),
        ("softmax", ("x",), dict(axis=2)),
        ("sdpa", ("heads", "key", "value", "mask"), dict(scale=0.3)),
    ],
)
def test_kernels_against_mlx(name, operands, options):
    actual = getattr(mlx_kernels, name)(*golden(*operands), **options)
    np.testing.assert_allclose(actual, GOLDEN[f"{name}_y"], atol=2e-6)


def test_causal_and_rope_against_mlx():
    q, k, v = golden("heads", "key", "value")
    actual = mlx_kernels.sdpa_causal(q, k[..., :6, :], v[..., :6, :], scale=0.3)
    np.testing.assert_allclose(actual, GOLDEN["sdpa_causal_y"], atol=2e-6)
    for name, dims, traditional in (
        ("rope", 16, False),
        ("rope_part", 8, False),
        ("rope_traditional", 16, True),
    ):
        actual = mlx_kernels.rope(q, 7, dims=dims, traditional=traditional, **ROPE)
        np.testing.assert_allclose(actual, GOLDEN[f"{name}_y"], atol=3e-6)


# Rows against references.


def row_cases():
    for line in KERNELS:
        p = REGISTRY[line.op]
        row = row_of(p, line, "primal")
        for k, case in enumerate(cases_of(p)):
            marks = [pytest.mark.full] if k or case.full else []
            yield pytest.param(
                p,
                row.kernel,
                row.unsupported,
                case,
                id=f"{p.name}-{case.name}",
                marks=marks,
            )


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("p, kernel, unsupported, case", list(row_cases()))
def test_rows_equal_references(p, kernel, unsupported, case):
    operands, options = checks.operands_of(p, case), checks.options_of(p, case)
    if p.name == "rope_from":
        operands[1] = jnp.int32(5)
    named = dict(zip([a.name for a in p.operands], operands, strict=True))
    with assume_jax_mps():
        reason = unsupported(**named, **options)
    if reason is not None:
        assert len(reason.split()) > 2
        return
    actual, expected = (
        checks.as_tuple(jax.jit(functools.partial(f, **options))(*operands))
        for f in (kernel, p.reference)
    )
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        # a kernel may round bfloat16 once more, inside
        checks.assert_near(a, e, 16, what=p.name)


@pytest.mark.usefixtures("played")
def test_a_query_without_keys_gives_zeros():
    """MLX takes 1e9 from a hidden score: alone, it would show every key."""
    q, k = jnp.ones((2, 3, 2, 8)), jnp.ones((2, 4, 2, 8)).at[:, 2:].set(jnp.nan)
    options = dict(scale=1.0, causal=False, window=None, softcap=None)
    attention = functools.partial(fused.attention, **options)
    absent = dict.fromkeys(AttentionOperands._fields)

    def out_of(q, k, v):
        given = absent | dict(query=q, key=k, value=v, kv_lengths=jnp.array([0, 2]))
        return attention(*AttentionOperands(**given))[0]

    out = jax.jit(out_of)(q, k, k)
    np.testing.assert_array_equal(out[0], 0)
    np.testing.assert_allclose(out[1], 1, rtol=1e-6)


# What is sent to jax-mps.

X, W = jnp.ones((3, 8)), jnp.ones(8)
Q, K = jnp.ones((1, 4, 4, 16)), jnp.ones((1, 4, 2, 16))
SENT = {
    "rms_norm": (lambda: jk.rms_norm(X, W, eps=np.float32(0.5)), {"eps": 0.5}),
    "layer_norm": (lambda: jk.layer_norm(X, W), {"eps": 1e-5}),
    "gelu": (lambda: jk.gelu(X), None),
    "softmax": (lambda: jk.softmax(X), {"axis": 1}),
    "sdpa": (lambda: jk.attention(Q, K, K, scale=0.25), {"scale": 0.25}),
    "sdpa_causal": (lambda: jk.attention(Q, K, K, causal=True), {"scale": 0.25}),
    "rope": (
        lambda: jk.rope_from(Q, 3, rotary_dim=6, pairing="interleaved"),
        {"dims": 6, "traditional": True, "base": 1e4, "rope_scale": 1.0},
    ),
}


def test_only_the_tanh_form_of_gelu_is_sent():
    """Names and operands are those of a form that it has: no check of them sees it."""
    with assume_jax_mps():
        assert not list(sent(lambda: jk.gelu(X, approximate="none")))


@pytest.mark.parametrize("name", SENT)
def test_what_is_sent(name):
    f, config = SENT[name]
    with assume_jax_mps():
        ((target, written, types),) = sent(f)
        assert check(f).hard == ()
    assert target == f"mps.{name}"
    assert (json.loads(written) if written else None) == config
    floats = {t.split("x")[-1] for t in types if t.endswith("f32>")}
    assert floats == {"f32>"}
    assert not list(sent(f)), "used without jax-mps"


def test_a_wide_weight_widens_the_operand():
    """MLX promotes: the call would return float32 where bfloat16 is declared."""
    with assume_jax_mps():
        ((_, _, types),) = sent(lambda: jk.rms_norm(X.astype(jnp.bfloat16), W))
    assert all(t.endswith("xf32>") for t in types)


def test_a_vmap_stays_right():
    with assume_jax_mps():
        f = jax.vmap(lambda q: jk.attention(q, K, K))
        assert [t for t, _, _ in sent(lambda: f(jnp.stack([Q, Q])))] == ["mps.sdpa"]


def test_training_runs_the_references():
    with assume_jax_mps():
        assert check(jax.grad(lambda x: jk.rms_norm(x, W).sum()), X).fused == 0


@pytest.mark.parametrize("version", ["0.10.11", "0.11.2", "0.11.2.dev874", "1.0"])
def test_other_versions_are_refused(version):
    with assume_jax_mps(version):
        assert not list(sent(lambda: jk.rms_norm(X, W)))
        assert version in str(jk.explain(jk.rms_norm, X, W, platform="mps"))


def test_rivals_of_jax_mps_are_refused(monkeypatch):
    """jax-metallib registers the same platform and has none of these targets."""
    versions = {"jax-mps": "0.11.1", "jax-metallib": "0.10.1.0"}
    monkeypatch.setattr(fused, "installed_version", versions.get)
    assert "jax-metallib" in (fused.jax_mps_refusal() or "")
    del versions["jax-metallib"]
    assert fused.jax_mps_refusal() is None


def test_what_json_cannot_say_is_refused():
    with assume_jax_mps():
        assert "finite" in (
            fused.unsupported_rms_norm(X, W, None, eps=np.inf, offset=0.0)
        )
        assert fused.unsupported_rms_norm(X[:0], W, None, eps=1e-6, offset=0.0)
        half = jax.ShapeDtypeStruct((3, 8), np.float64)
        assert "float64" in fused.unsupported_rms_norm(
            half, W, None, eps=1e-6, offset=0.0
        )
