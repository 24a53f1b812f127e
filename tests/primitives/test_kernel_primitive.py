"""The helper's own rules, on small ops declared here."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.interpreters import partial_eval
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

import jaxkern
from jaxkern import rms_norm
from jaxkern.lowering.explain import equations
from jaxkern.primitives.call import Backend, Call
from jaxkern.primitives.declared_dims import annotations, without_residuals
from jaxkern.primitives.kernel_primitive import REGISTRY, kernel_primitive
from jaxkern.primitives.norm.rms_norm import rms_norm_p
from jaxkern.primitives.rules import result_avals
from jaxkern.testing.sharding_checks import mesh_of

pytestmark = pytest.mark.smoke


def undeclare(p):
    REGISTRY.pop(p.name)
    return p


def scaled_rows_reference(
    x: Float[Array, "... d"], scale: Float[Array, "..."] | None, *, power: int
) -> Float[Array, "... d"]:
    return x if scale is None else x * scale[..., None] ** power


def spin_reference(
    x: Float[Array, "... d"], angle: Float[Array, ""]
) -> Float[Array, "... d"]:
    return jnp.cos(angle) * x + jnp.sin(angle) * x[..., ::-1]


def spin_bwd_reference(
    angle: Float[Array, ""], dy: Float[Array, "... d"]
) -> Float[Array, "... d"]:
    return jnp.cos(angle) * dy + jnp.sin(angle) * dy[..., ::-1]


def largest_reference(
    x: Float[Array, "... d"],
) -> tuple[Float[Array, "..."], Int[Array, "..."]]:
    return x.max(-1), x.argmax(-1).astype(jnp.int32)


def largest_bwd_reference(
    x: Float[Array, "... d"],
    largest: Float[Array, "..."],
    index: Int[Array, "..."],
    dlargest: Float[Array, "..."],
) -> Float[Array, "... d"]:
    del largest
    return jax.nn.one_hot(index, x.shape[-1], dtype=x.dtype) * dlargest[..., None]


def with_mean_reference(
    x: Float[Array, "n d"], offset: Float[Array, " d"]
) -> Float[Array, "d 2"]:
    return jnp.stack([x.mean(0), offset], -1)


with_mean_p = undeclare(kernel_primitive(with_mean_reference))
scaled_rows_p = undeclare(kernel_primitive(scaled_rows_reference))
spin_p = undeclare(
    kernel_primitive(spin_reference, bwd=spin_bwd_reference, linear=("x",))
)
largest_p = undeclare(kernel_primitive(largest_reference, bwd=largest_bwd_reference))

X = jnp.linspace(-1.0, 2.0, 12).reshape(3, 4)


def names(f, *args):
    """The primitives of the jaxpr of f, in order."""
    return [e.primitive.name for e in jax.make_jaxpr(f)(*args).jaxpr.eqns]


@pytest.mark.parametrize("num_results", [1, 2])
def test_a_reference_out_of_fwd_declares_what_it_keeps(num_results):
    """Written by hand a reference could differ from its `fwd` in a dim or a default."""

    def moments_fwd_reference(
        x: Float[Array, "... d"], *, power: int
    ) -> tuple[Float[Array, "..."], Float[Array, "... d"], Int[Array, "..."]]:
        return x.mean(-1), x**power, x.argmax(-1).astype(jnp.int32)

    reference = without_residuals(moments_fwd_reference, num_results)
    assert reference.__name__ == "moments_reference"
    operands, results = annotations(reference)
    operands_of_fwd, results_of_fwd = annotations(moments_fwd_reference)
    assert operands == operands_of_fwd and results == results_of_fwd[:num_results]
    p = undeclare(kernel_primitive(reference))
    x = jnp.arange(6.0).reshape(2, 3)
    found = p(x, power=2)
    expected = moments_fwd_reference(x, power=2)[:num_results]
    chex.assert_trees_all_equal(found if num_results > 1 else (found,), expected)
    with pytest.raises(TypeError, match="moments"):
        p(jnp.arange(6), power=2)


def test_inference_gradient_and_forward_mode_bind_their_own_primitives():
    def loss(x):
        return jnp.sum(rms_norm(x) ** 2)

    assert names(rms_norm, X) == ["rms_norm"]
    backward = names(jax.grad(loss), X)
    assert backward.count("rms_norm_fwd") == backward.count("rms_norm_bwd") == 1
    assert "rms_norm" not in backward
    forward = names(lambda x: jax.jvp(rms_norm, (x,), (x,)), X)
    assert forward == ["rms_norm_fwd", "rms_norm_tangent"]


def test_unused_residuals_and_gradients_are_dropped():
    weight = jnp.ones(4)

    def dead_code_eliminated(f, *args):
        jaxpr = jax.make_jaxpr(f)(*args).jaxpr
        live, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
        return live.eqns

    def value_of_vjp(x):
        return jax.vjp(rms_norm, x, weight)[0]

    def first_gradient(x):
        return jax.vjp(rms_norm, x, weight)[1](x)[0]

    (eqn,) = dead_code_eliminated(value_of_vjp, X)
    assert eqn.primitive.name == "rms_norm" and len(eqn.outvars) == 1
    _, bwd = dead_code_eliminated(first_gradient, X)
    assert bwd.params["call"].wanted == (True, False, False)


def test_linear_op_is_its_own_tangent_and_keeps_nothing():
    angle = jnp.float32(0.3)
    assert names(lambda x: jax.jvp(lambda x: spin_p(x, angle), (x,), (x,)), X) == [
        "spin",
        "spin",
    ]
    gradient = jax.grad(lambda x: jnp.vdot(spin_p(x, angle), X))(X)
    np.testing.assert_allclose(gradient, spin_reference(X, angle), rtol=1e-6)

    def loss(f, x, angle):
        return jnp.sum(jnp.sin(f(x, angle)))

    for mode in (jax.grad, jax.jacfwd):
        actual = mode(functools.partial(loss, spin_p), (0, 1))(X, angle)
        expected = mode(functools.partial(loss, spin_reference), (0, 1))(X, angle)
        chex.assert_trees_all_close(actual, expected, rtol=1e-5)


def test_integer_results_have_no_tangent():
    value, gradient = jax.value_and_grad(lambda x: largest_p(x)[0].sum())(X)
    np.testing.assert_allclose(value, X.max(-1).sum())
    np.testing.assert_array_equal(gradient, X == X.max(-1, keepdims=True))
    _, (dots, index_dots) = jax.jvp(largest_p, (X,), (X,))
    np.testing.assert_allclose(dots, X.max(-1))
    assert index_dots.dtype == jax.dtypes.float0


def test_vmap_folds_into_leading_dims_and_else_is_recorded():
    def vmapped(x, scale):
        return jax.vmap(functools.partial(scaled_rows_p, power=2))(x, scale)

    (eqn,) = jax.make_jaxpr(vmapped)(X, X[:, 0]).jaxpr.eqns
    assert eqn.params["call"].vmaps == ()  # both operands have leading dims
    weights = jnp.ones((3, 4))
    jaxpr = jax.make_jaxpr(jax.vmap(rms_norm))(X, weights).jaxpr
    assert jaxpr.eqns[0].params["call"].vmaps == ((0, 0),)
    per_example = jax.vmap(jax.grad(lambda w, x: rms_norm(x, w).sum()))(weights, X)
    np.testing.assert_allclose(per_example, rms_norm(X), rtol=1e-5)


def test_recorded_vmap_leaves_the_cuts_of_other_dims():
    """Meshes of one axis, as in the test below, cannot show that others are kept."""
    axes = (AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("m", "n"), axis_types=axes, devices=jax.devices()[:4])
    x, offset = jnp.arange(32.0).reshape(4, 2, 4), jnp.arange(4.0)
    expected = jax.vmap(with_mean_p, (0, None))(x, offset)
    with jax.set_mesh(mesh):
        x, offset = jax.device_put(x, P("m", None, "n")), jax.device_put(offset, P("n"))
        y = jax.jit(jax.vmap(with_mean_p, (0, None)))(x, offset)
    assert y.sharding.spec[:2] == ("m", "n")
    np.testing.assert_allclose(y, expected, rtol=1e-6)


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_recorded_vmap_over_an_axis_that_an_explicit_mesh_cuts(jit):
    """JAX's own rule for stack refuses it where an operand is not mapped."""
    mesh = mesh_of(4, AxisType.Explicit)
    x, offset = jnp.arange(32.0).reshape(4, 2, 4), jnp.arange(4.0)

    def op(x):
        return with_mean_p(x, offset)

    def grads(x):
        return jax.grad(lambda x: jnp.sin(jax.vmap(op)(x)).sum())(x)

    expected = jax.vmap(op)(x), grads(x)
    with jax.set_mesh(mesh):
        cut = jax.device_put(x, P("m", None, None))
        y, dx = jit(jax.vmap(op))(cut), jit(grads)(cut)
    assert y.sharding.spec[0] == dx.sharding.spec[0] == "m"
    np.testing.assert_allclose(y, expected[0], rtol=1e-6)
    np.testing.assert_allclose(dx, expected[1], rtol=1e-6)


def test_folded_vmap_of_gradient_gives_one_summed_weight_gradient():
    def loss(weight):
        return jax.vmap(lambda x: rms_norm(x, weight))(X).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss))(jnp.ones(4)).jaxpr
    (bwd,) = [e for e in jaxpr.eqns if e.primitive.name == "rms_norm_bwd"]
    assert [v.aval.shape for v in bwd.outvars] == [(4,)]


def test_abstract_eval_is_cached_and_no_call_retraces():
    result_avals.cache_clear()
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def model(x):
        for _ in range(20):
            x = rms_norm(x)
        return x

    x = jnp.ones((5, 7))
    model(x), model(x + 1)
    assert result_avals.cache_info().misses == 1


def test_abstract_eval_follows_x64_mode():
    with jax.enable_x64(True):
        assert rms_norm(jnp.ones((2, 4), jnp.float64)).dtype == jnp.float64
    assert rms_norm(jnp.ones((2, 4))).dtype == jnp.float32


def test_backend_is_carried_into_the_backward_pass():
    with jaxkern.backend("xla"):
        _, pull = jax.vjp(rms_norm, X)
    jaxpr = jax.make_jaxpr(pull)(X).jaxpr
    backends = {e.params["call"].backend.name for e in equations(jaxpr)}
    assert backends == {"xla"}


def test_matmul_precision_is_carried_into_the_backward_pass():
    x, w = jnp.ones((4, 16)), jnp.ones((8, 16))
    f = jax.jit(lambda x, w: jaxkern.linear(x, w))  # not the cache of other tests

    def lowered_backward(precision):
        with jax.default_matmul_precision(precision):
            f(x, w)
            _, pull = jax.vjp(jax.checkpoint(jax.vmap(f, (0, None))), x[None], w)
        return jax.jit(pull).lower(jnp.ones((1, 4, 8))).as_text()

    assert "HIGHEST" in lowered_backward("highest")
    assert "HIGH" not in lowered_backward("default")
    assert f._cache_size() == 2


def test_primitives_print_as_their_dims():
    assert repr(rms_norm_p) == "rms_norm: ... d, d, d -> ... d"
    assert (
        repr(rms_norm_p.bwd) == "rms_norm_bwd: ... d, d, d, ... 1, ... d -> ... d, d, d"
    )


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: rms_norm(X, X[0, :3]), "dim `d` is 4 in `x` but 3 in `weight`"),
        (lambda: rms_norm(X, X), r"`weight` must have dims \[d\], got shape \(3, 4\)"),
        (lambda: rms_norm(jnp.arange(3)), "`x` must have a dtype of kind Float"),
        (lambda: rms_norm([1.0]), "`x` must be an array, got list"),
        (lambda: rms_norm(None), "`x` is required, got None"),
        (lambda: rms_norm(X, eps=X[0]), r"`eps` must be float, got an array of shape"),
        (
            lambda: scaled_rows_p(X, X[:, 0], power=X[0]),
            "option `power` must be a static, hashable",
        ),
        (
            lambda: scaled_rows_p(X, X, power=1),
            r"leading dims are \(3,\) in `x` but \(3, 4\) in `scale`",
        ),
    ],
)
def test_misuse_says_what_is_wrong(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_declaration_errors_name_the_function():
    def unannotated_reference(x, y: Float[Array, " d"]) -> Float[Array, " d"]:
        return x + y

    with pytest.raises(TypeError, match="unannotated_reference: annotate x"):
        annotations(unannotated_reference)

    def twice_reference(x: Float[Array, " d"]) -> Float[Array, " d"]:
        return 2 * x

    def twice_bwd_reference(
        x: Float[Array, " d"], what: Float[Array, " d"], dy: Float[Array, " d"]
    ) -> tuple[Float[Array, " d"], Float[Array, " d"]]:
        return dy, dy

    with pytest.raises(TypeError, match="twice_bwd: must return gradients for"):
        kernel_primitive(twice_reference, bwd=twice_bwd_reference)
    with pytest.raises(ValueError, match="rms_norm is declared already"):
        kernel_primitive(rms_norm_p.reference)


def test_decode_loop_holds_the_primitive_once():
    def loop(x):
        return lax.fori_loop(0, 5, lambda _, x: rms_norm(x), x)

    text = jax.jit(loop).lower(X).as_text()
    assert text.count("stablehlo.rsqrt") == 1
    np.testing.assert_allclose(loop(X), rms_norm(X), rtol=1e-4)


def test_a_gradient_of_zeros_varies_as_its_operand_inside_shard_map():
    mesh = mesh_of(2, jax.sharding.AxisType.Auto)

    def loss(x, w):
        y = jaxkern.grouped_matmul(x[0], w, jnp.zeros(1, jnp.int32))
        return lax.psum(y.sum() + w.sum(), "m")

    specs = (P("m"), P())
    sharded = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P())
    dx, dw = jax.jit(jax.grad(sharded, (0, 1)))(
        jnp.ones((2, 0, 4)), jnp.ones((1, 3, 4))
    )
    assert dx.shape == (2, 0, 4)
    np.testing.assert_array_equal(dw, np.full((1, 3, 4), 2.0))


def test_strict_raises_for_an_op_that_has_no_kernel_on_any_platform():
    # tests/lowering/test_lower.py asks ops with rows: those without lower elsewhere
    def loss(x):
        return largest_p(x)[0].sum()

    expected = jax.grad(loss)(X)
    for f in (largest_p, jax.jit(largest_p), jax.jit(jax.grad(loss))):
        with jaxkern.backend("triton", strict=True):
            with pytest.raises(
                ValueError, match=r"largest\w*: has no triton kernel on any platform"
            ):
                f(X)
    with jaxkern.backend("triton"):  # falls back, and explain says so
        np.testing.assert_array_equal(jax.grad(loss)(X), expected)
    for name in ("auto", "xla"):  # where the reference is no fallback
        with jaxkern.backend(name, strict=True):
            np.testing.assert_array_equal(jax.grad(loss)(X), expected)


def test_an_equation_shows_what_it_records_and_nothing_else():
    """Printed jaxprs show it; no other test reads them."""
    assert repr(Call(precision=None)) == "auto"
    backend = Backend("triton", strict=True)
    call = Call(backend, absent=(1,), vmaps=((0, None),), precision="highest")
    shown = "triton strict absent=(1,) vmaps=((0, None),) precision=highest"
    assert repr(call) == shown
