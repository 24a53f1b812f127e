"""Rows, refusals, strict backends, explain; opaque kernels on meshes."""

import importlib.util
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

import jaxkern
from jaxkern import attention, backend, explain, rms_norm, softcap
from jaxkern.lowering import cpu, cuda, kernel_table
from jaxkern.lowering.apple import rows as apple
from jaxkern.lowering.lower import (
    BACKENDS,
    Row,
    add_row_later,
    lower,
    never_refuses,
    rows_on,
)
from jaxkern.lowering.sharded_call import Factors, partitioned
from jaxkern.primitives.attention.attention import attention_p
from jaxkern.primitives.call import Call
from jaxkern.primitives.delta_rule.unit_lower_inverse import unit_lower_inverse_p
from jaxkern.primitives.kernel_primitive import REGISTRY, kernel_primitive
from jaxkern.primitives.leafwise_primitive import LEAFWISE
from jaxkern.primitives.norm.rms_norm import (
    rms_norm_bwd_reference,
    rms_norm_p,
)
from jaxkern.testing import checks, sharding_checks

pytestmark = pytest.mark.smoke

X = jnp.linspace(-1.0, 2.0, 8 * 4 * 32).reshape(8, 4, 32)
WEIGHT = jnp.linspace(0.5, 1.5, 32)


def rms_norm_pallas_kernel(x_ref, weight_ref, y_ref, rstd_ref, *, eps):
    x = x_ref[...]
    rstd = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps)
    y_ref[...] = x * rstd * weight_ref[...]
    rstd_ref[...] = rstd


def rms_norm_pallas(x, weight, bias, *, eps, offset):
    """A Pallas kernel in interpret mode: its blocks show what one device gets."""
    assert bias is None and offset == 0.0
    rows = x.reshape(-1, x.shape[-1])
    y, rstd = pl.pallas_call(
        lambda *refs: rms_norm_pallas_kernel(*refs, eps=eps),
        out_shape=[
            jax.ShapeDtypeStruct(rows.shape, x.dtype),
            jax.ShapeDtypeStruct((rows.shape[0], 1), jnp.float32),
        ],
        interpret=True,
    )(rows, weight)
    return y.reshape(x.shape), rstd.reshape(*x.shape[:-1], 1)


def unsupported(x, bias=None, offset=0.0, **_):
    if bias is not None or offset:
        return "bias and offset are not written"
    if x.shape[-1] % 16:
        return f"last dim {x.shape[-1]} is not a multiple of 16"
    return None


@pytest.fixture
def pallas_row():
    with checks.own_rows(rms_norm_p):
        lower(
            rms_norm_p,
            "cpu",
            "cpp",
            fwd=rms_norm_pallas,
            bwd=rms_norm_bwd_reference,
            unsupported=unsupported,
        )
        yield
    jax.clear_caches()


def loss(x, weight):
    return jnp.sum(jnp.sin(rms_norm(x, weight)))


def reference_of(f, *args):
    with backend("xla"):
        return f(*args)


def test_explain_names_the_kernel_and_every_refusal(pallas_row):
    [row] = explain(rms_norm, X, WEIGHT).rows
    assert (row.op, row.sites, row.refused) == ("rms_norm", 1, ())
    assert row.runs == "cpp: tests.lowering.test_lower.rms_norm_pallas"
    refused = explain(rms_norm, X[..., :20], WEIGHT[:20])
    assert "rms_norm on cpu runs xla: rms_norm_reference" in str(refused)
    assert "last dim 20 is not a multiple of 16" in str(refused)
    with backend("xla"):
        assert "backend is xla" in str(explain(rms_norm, X, WEIGHT))
    assert "runs xla" in str(explain(rms_norm, X, WEIGHT, platform="cuda"))


def test_explain_looks_into_jit_scan_and_gradients(pallas_row):
    def model(x, weight):
        def step(x, _):
            return jax.jit(rms_norm)(x, weight), None

        return jax.lax.scan(step, x, None, length=3)[0].sum()

    rows = explain(jax.jit(jax.grad(model)), X, WEIGHT).rows
    assert [r.op for r in rows] == ["rms_norm_fwd", "rms_norm_bwd"]
    tangents = explain(lambda x: jax.jvp(rms_norm, (x,), (x,)), X)
    assert "rms_norm_tangent on cpu runs xla: jvp of" in str(tangents)
    assert str(explain(jnp.sin, X)) == "no jaxkern op on cpu"


def test_explain_takes_options_as_the_function_does():
    q = jax.ShapeDtypeStruct((1, 4, 2, 8), jnp.float32)
    [row] = explain(attention, q, q, q, causal=True, window=2).rows
    assert row.op == "attention"
    assert explain(softcap, X, 2.0).rows[0].op == "softcap"


def test_strict_raises_instead_of_falling_back(pallas_row):
    with backend("cpp", strict=True):
        np.testing.assert_allclose(rms_norm(X, WEIGHT), rms_norm(X, WEIGHT))
        with pytest.raises(ValueError, match="last dim 20 is not a multiple of 16"):
            rms_norm(X[..., :20], WEIGHT[:20])
    with backend("triton", strict=True):
        with pytest.raises(ValueError, match=r"rms_norm.*no triton kernel on cpu"):
            rms_norm(X, WEIGHT)
        with pytest.raises(ValueError, match=r"add_rms_norm.*no triton kernel"):
            jaxkern.add_rms_norm(X, X)
    with backend("auto", strict=True):
        jaxkern.add_rms_norm(X, X)  # no row: the reference is the choice


def test_unknown_backends_are_refused():
    with pytest.raises(ValueError, match="backend: `name` must be one of"):
        backend("cuda")
    with pytest.raises(ValueError, match="lower: `backend` must be one of"):
        lower(rms_norm_p, "cpu", "xla", fwd=rms_norm_pallas)
    assert BACKENDS[:2] == ("auto", "xla")
    for name in BACKENDS[2:]:
        with checks.own_rows(rms_norm_p):
            lower(rms_norm_p, "cpu", name, fwd=rms_norm_pallas)
            [row] = rows_on(rms_norm_p, "cpu")
        assert row.backend == name


def test_kernel_and_reference_agree_in_every_mode(pallas_row):
    def modes(x, weight):
        grads = jax.grad(loss, (0, 1))(x, weight)
        per_row = jax.vmap(jax.grad(loss, 1), (0, None))(x, weight)
        hessian = jax.jvp(lambda w: jax.grad(loss, 1)(x, w), (weight,), (weight,))
        weights = jnp.stack([weight] * 8)
        return loss(x, weight), grads, per_row, hessian, jax.vmap(rms_norm)(x, weights)

    actual, expected = modes(X, WEIGHT), reference_of(modes, X, WEIGHT)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "x_spec, weight_spec, forward, backward",
    [
        (P("data"), P(), set(), {"all-reduce"}),
        (P("data", "model"), P(), set(), {"all-reduce"}),
        (P(None, None, "data"), P("data"), {"all-gather"}, {"all-gather"}),
    ],
)
def test_plain_jit_partitions_a_kernel(
    pallas_row, x_spec, weight_spec, forward, backward
):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    x = jax.device_put(X, NamedSharding(mesh, x_spec))
    weight = jax.device_put(WEIGHT, NamedSharding(mesh, weight_spec))
    grad = jax.grad(loss, (0, 1))
    for f, expected in ((rms_norm, forward), (grad, backward)):
        compiled = jax.jit(f).lower(x, weight).compile()
        assert (
            set(re.findall(sharding_checks.COLLECTIVES, compiled.as_text())) == expected
        )
        outputs = jax.tree.leaves(compiled(x, weight))
        truth = jax.tree.leaves(reference_of(f, X, WEIGHT))
        for a, e in zip(outputs, truth, strict=True):
            np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-5)


def test_each_device_sees_only_its_rows(pallas_row):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    text = jax.jit(rms_norm).lower(x, WEIGHT).compile().as_text()
    assert "f32[4,32]" in text and "f32[32,32]" not in text  # 1 of 8 batches, 4 rows


def test_a_kernel_may_hold_a_table():
    """A closed-over array goes to every device whole; rows stay where they are."""
    table = np.linspace(1.0, 2.0, 32, dtype=np.float32)

    def with_table(x, weight, bias, *, eps, offset):
        del bias, eps, offset
        return x * jnp.asarray(table) * weight, x[..., :1]

    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    with checks.own_rows(rms_norm_p):
        lower(rms_norm_p, "cpu", "cpp", fwd=with_table)
        compiled = jax.jit(rms_norm).lower(x, WEIGHT).compile()
    np.testing.assert_allclose(compiled(x, WEIGHT), X * table * WEIGHT, rtol=1e-6)
    assert "f32[1,4,32]" in compiled.as_text()
    assert not re.findall(sharding_checks.COLLECTIVES, compiled.as_text())
    jax.clear_caches()


def test_explicit_meshes_run_the_kernel_or_say_why_not(pallas_row):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    expected = reference_of(jax.grad(loss, (0, 1)), X, WEIGHT)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, P("data", None, None))
        assert explain(rms_norm, x, WEIGHT).rows[0].runs.startswith("cpp")
        assert jax.typeof(rms_norm(x, WEIGHT)).sharding.spec == P("data", None, None)
        for a, e in zip(
            jax.jit(jax.grad(loss, (0, 1)))(x, WEIGHT), expected, strict=True
        ):
            np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-5)
        cut = jax.device_put(X, P(None, None, "model"))
        weight = jax.device_put(WEIGHT, P("model"))
        assert "`x` is cut as" in str(explain(rms_norm, cut, weight))
        np.testing.assert_allclose(
            rms_norm(cut, weight), reference_of(rms_norm, X, WEIGHT), rtol=2e-5
        )


def test_uneven_cuts_are_gathered(pallas_row):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.device_put(X, NamedSharding(mesh, P("data")))

    @jax.jit
    def f(x):
        return rms_norm(x[1:], WEIGHT)  # 7 rows on 8 devices

    np.testing.assert_allclose(f(x), reference_of(rms_norm, X[1:], WEIGHT), rtol=2e-5)


def test_a_product_is_one_factor_where_more_devices_than_its_major_part():
    """Results alone do not show it: Shardy then cuts g, and the kernel gathers it."""
    q, k = (jax.ShapeDtypeStruct((2, 4, n, 8), jnp.float32) for n in (4, 2))
    call = Call(absent=tuple(range(3, 10)))
    out = q, jax.ShapeDtypeStruct((2, 4, 4), jnp.float32)
    factors = Factors.of(attention_p, call, [q, k, k], out)
    assert factors.rule(2).startswith("b t (k g) h, b s k h")
    assert factors.rule(4).startswith("b t k_g h, b s k h")


def test_the_rule_of_a_kernel_knows_how_many_devices_there_are(pallas_row, monkeypatch):
    """A wrong number changes which dims Shardy may cut, and no result."""
    counted = []

    def recorded(*args):
        counted.append(args[-1])
        return partitioned(*args)

    monkeypatch.setattr("jaxkern.lowering.lower.partitioned", recorded)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    specs = dict(in_specs=(P("data"), P()), out_specs=P("data"))
    inside = jax.shard_map(rms_norm, mesh=mesh, check_vma=False, **specs)
    cut = jax.device_put(X, NamedSharding(mesh, P("data")))
    for f, x in ((rms_norm, cut), (lambda *a: rms_norm(*a), X), (inside, cut)):
        jax.jit(f).lower(x, WEIGHT)
    assert counted == [8, 1, 1]


def test_a_square_operand_has_each_factor_once():
    a = jax.typeof(jnp.ones((8, 4, 4)))
    factors = Factors.of(unit_lower_inverse_p, Call(), [a], [a])
    assert factors.rule() == "l0 c whole0 -> l0 c whole1"
    assert factors.cuts([[None, None, "m"]], {"m": 2}) == {}


def test_a_slower_kernel_runs_only_where_its_backend_is_named():
    def few_rows(*, x, **_):
        return "there are few rows" if x.shape[0] < 9 else None

    with checks.own_rows(rms_norm_p):
        lower(rms_norm_p, "cpu", "cpp", fwd=rms_norm_pallas, slower=few_rows)
        text = str(explain(rms_norm, X, WEIGHT))
        assert "runs xla" in text and "XLA is faster, there are few rows" in text
        many = jnp.tile(X, (3, 1, 1))
        assert explain(rms_norm, many, WEIGHT).rows[0].runs.startswith("cpp")
        with backend("cpp", strict=True):
            assert explain(rms_norm, X, WEIGHT).rows[0].runs.startswith("cpp")
        with backend("auto", strict=True):
            rms_norm(X, WEIGHT)
    jax.clear_caches()


def test_a_profile_names_the_op_of_each_instruction():
    compiled = jax.jit(jax.grad(lambda x: rms_norm(x, WEIGHT).sum())).lower(X).compile()
    names = re.findall(r'op_name="([^"]*)"', compiled.as_text() or "")
    assert any("rms_norm_bwd/mul" in name for name in names), names


TABLES = {"cpu": cpu.KERNELS, "cuda": cuda.KERNELS, "mps": apple.KERNELS}


@pytest.mark.parametrize("platform", TABLES)
def test_every_line_of_a_table_is_a_row(platform):
    for kernel in TABLES[platform]:
        p = REGISTRY.get(kernel.op) or LEAFWISE[kernel.op]
        family = {"primal": p, "fwd": p.fwd, "bwd": p.bwd}
        for name in kernel.passes.split():
            row = kernel_table.row_of(p, kernel, name)
            titles = [other.title for other in rows_on(family[name], platform)]
            assert row.title in titles, kernel


def tripled_reference(x: Float[Array, "... d"]) -> Float[Array, "... d"]:
    return x * 3


tripled_p = kernel_primitive(tripled_reference)


def test_a_row_of_a_table_is_lowered():
    """Other ops have a lowering from before; `explain` asks the rows without one."""
    assert not tripled_p.rows
    add_row_later(tripled_p, "cpu", lambda: Row("cpp", lambda x: x * 4, never_refuses))
    np.testing.assert_array_equal(tripled_p(X), X * 4)
    with backend("xla"):
        np.testing.assert_array_equal(tripled_p(X), X * 3)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (("rms_nrom", "cpp", "cpu.norm.norm", "fwd"), "no op is called 'rms_nrom'"),
        (("rms_norm", "xla", "cpu.norm.norm", "fwd"), "has an unknown backend"),
        (("rms_norm", "cpp", "cpu.norm.norm", "back"), "rms_norm has no back pass"),
        (("argmax", "cpp", "cpu.index.argmax", "bwd"), "argmax has no bwd pass"),
    ],
)
def test_a_line_that_names_nothing_is_refused(line, message):
    """The tables of the library have no such line."""
    with pytest.raises(ValueError, match=f"kernels of cpu: .*{message}"):
        kernel_table.add_table("cpu", [kernel_table.Kernel(*line)])


def test_a_jax_outside_the_range_is_named(monkeypatch):
    monkeypatch.delattr("jax._src.dispatch.prim_requires_devices_during_lowering")
    spec = importlib.util.find_spec("jaxkern.lowering.lower")
    assert spec is not None and spec.loader is not None
    with pytest.raises(ImportError, match=r"jaxkern\.lowering: jax .* Use jax >="):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_a_kernel_is_imported_when_its_op_is_first_asked_for():
    code = (
        "import sys, jaxkern\n"
        "assert not any(m.startswith(('jaxkern.triton', 'jaxkern.pallas', 'triton'))"
        " for m in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
