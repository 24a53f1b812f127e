"""`check`: each finding has a function that brings it out; `portable` cures it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.interpreters import mlir

from jaxkern.lowering.apple import PLATFORMS, check, portable
from jaxkern.lowering.apple.findings import last_index_dim
from jaxkern.lowering.apple.wire import export
from jaxkern.models import command_line

X = jnp.asarray(np.random.default_rng(0).standard_normal((4, 8)), jnp.float32)
IDS = jnp.array([1, -3, 2, 9, 2])  # two of them outside
UPDATES = jnp.arange(40.0).reshape(5, 8)
BYTES = jnp.asarray(np.random.default_rng(0).integers(-128, 128, (3, 3000)), jnp.int8)


def scatter(x, ids, updates):
    return x.at[ids].set(updates, mode="drop", wrap_negative_indices=False)


def integer_product(x):
    return lax.dot(x, x.T, preferred_element_type=jnp.int32)


def wide_product(x):
    x = x.astype(jnp.bfloat16)
    return lax.dot(x, x.T, preferred_element_type=jnp.float32)


def two_keys(x):
    keys = jnp.round(x)
    return lax.sort((keys, x, -x), dimension=0, num_keys=2)


TRAPS = {  # function, arguments, platform, words of the finding
    "scatter": (scatter, (X, IDS, UPDATES), "mps", "soft: scatter with indices"),
    "integers": (integer_product, (BYTES,), "mps", "soft: integer product over 3000"),
    "wide": (wide_product, (X,), "mps", "hard: product of bf16 and bf16 in f32"),
    "keys": (two_keys, (X,), "mps", "hard: sort by several keys"),
    "dims": (
        lambda x: jnp.einsum("abc,dbc->ad", x, x),
        (X.reshape(4, 2, 4),),
        "METAL",
        "hard: product over 2 dims",
    ),
    "running": (lambda x: lax.cumsum(x, 1, reverse=True), (X,), "METAL", "maximum"),
}
REFUSED = {
    "float64": (lambda x: x, (np.float64(1),), "mps", "hard: dtype f64"),
    "float8": (lambda x: x.astype(jnp.float8_e5m2), (X,), "mps", "hard: dtype f8E5M2"),
    "kernel": (
        lambda x: jax.ffi.ffi_call("my_kernel", jax.typeof(x))(x),
        (X,),
        "mps",
        "hard: custom call my_kernel",
    ),
    "reduce": (
        lambda x: lax.reduce(x > 0, False, lax.bitwise_xor, (0,)),
        (X,),
        "mps",
        "hard: reduce by xor",
    ),
    "fft": (jnp.fft.fft, (X,), "METAL", "hard: stablehlo.fft"),
    "unknown": (jnp.fft.fft, (X,), "METAL", "not in the table of jax-metal 0.1.1"),
}


@pytest.mark.parametrize("name", TRAPS)
def test_traps_are_found_and_cured(name):
    f, args, platform, words = TRAPS[name]
    assert words in str(check(f, *args, platform=platform))
    cured = portable(f, platform)
    report = check(cured, *args, platform=platform)
    assert report.findings == (), report
    actual = export(cured, *args, platform=platform).call(*args)
    for a, e in zip(*map(jax.tree.leaves, (actual, f(*args))), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_found(name):
    f, args, platform, words = REFUSED[name]
    with jax.enable_x64(name == "float64"):
        report = check(f, *args, platform=platform)
    assert report.hard and words in str(report)
    assert "test_findings.py" in str(report) or name in ("float64", "unknown", "fft")


GATHER = """
func.func @main(%x: tensor<4x8xf32>, %at: tensor<{shape}xi32>) -> tensor<5x8xf32> {{
  %y = "stablehlo.gather"(%x, %at) <{{
    dimension_numbers = #stablehlo.gather<offset_dims = [1],
      collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = {dim}>,
    slice_sizes = array<i64: 1, 8>}}>
    : (tensor<4x8xf32>, tensor<{shape}xi32>) -> tensor<5x8xf32>
  return %y : tensor<5x8xf32>
}}
"""


@pytest.mark.parametrize(("shape", "dim", "found"), [("1x5", 0, 1), ("5x1", 1, 0)])
def test_the_dim_of_a_gathers_indices(shape, dim, found):
    """JAX writes the last one: no function brings the finding out."""
    with mlir.make_ir_context():
        module = mlir.ir.Module.parse(GATHER.format(shape=shape, dim=dim))
        gather = module.body.operations[0].regions[0].blocks[0].operations[0]
        assert len(list(last_index_dim(gather, None))) == found


def test_a_product_over_no_dim_is_one():
    product = functools.partial(lax.dot_general, dimension_numbers=(((), ()), ((), ())))
    for platform in PLATFORMS:
        assert not check(product, X[0], X[1], platform=platform).hard


def test_in_loops_branches_and_checkpoints():
    """The rewrites reach every body."""

    def f(x):
        def body(carry, row):
            branches = (lambda a: two_keys(a)[1], lambda a: a)
            y = lax.switch(row.astype(jnp.int32) % 2, branches, carry)
            return jax.checkpoint(lambda a: two_keys(a)[1])(y), row

        x = lax.scan(body, x, jnp.arange(3.0))[0]
        return lax.while_loop(lambda a: a[0, 0] < -9, lambda a: two_keys(a)[1], x)

    assert [n for _, n in check(f, X).hard[0].places] == [1, 1, 1]
    report = check(portable(f, "mps"), X)
    assert report.findings == (), report
    np.testing.assert_allclose(portable(f, "mps")(X), f(X))


def test_every_scatter_drops_what_is_outside():
    for kind in ("add", "mul", "min", "max"):

        def f(x, ids, updates, kind=kind):
            at = x.at[ids, 2:]
            options = {"mode": "drop", "wrap_negative_indices": False}
            return getattr(at, kind)(updates[:, 2:], **options)

        assert check(portable(f, "mps"), X, IDS, UPDATES).findings == ()
        args = (X, IDS, UPDATES)
        np.testing.assert_allclose(portable(f, "mps")(*args), f(*args), rtol=1e-6)


def test_a_scatter_into_another_dim_than_the_first():
    """The ops of the library index the first one."""

    def f(x, ids, updates):
        options = {"mode": "drop", "wrap_negative_indices": False}
        return x.at[:, ids].add(updates, **options)

    args = X.T, IDS, UPDATES.T
    assert check(portable(f, "mps"), *args).findings == ()
    np.testing.assert_allclose(portable(f, "mps")(*args), f(*args), rtol=1e-6)


def test_clean_functions_stay_as_they_are():
    """Calls and own derivatives too, which no count of operations shows."""
    f = jax.jit(jax.nn.relu)
    whole = str(jax.make_jaxpr(f)(X))
    for platform in PLATFORMS:
        assert str(jax.make_jaxpr(portable(f, platform))(X)) == whole
        before, after = (
            check(f, X, platform=platform).operations
            for f in (jnp.sin, portable(jnp.sin, platform))
        )
        assert before == after


def test_counts_and_words():
    report = check(lambda x: lax.fori_loop(0, 3, lambda _, a: jnp.sin(a), x), X)
    assert report.operations["stablehlo.sine"] == 1
    assert "nothing found" in str(report) and report.fused == 0
    assert (
        "lowered and op-checked; numerics verified on CPU; not executed on Apple "
        "hardware" in str(report)
    )


def test_callbacks_are_refused_by_jax():
    with pytest.raises(ValueError, match="not supported on mps"):
        check(lambda x: jax.pure_callback(lambda a: a, X, x), X)


def test_unknown_platform():
    with pytest.raises(ValueError, match="'metal'"):
        check(jnp.sin, X, platform="Metal")


def test_modules_for_several_platforms():
    """Each platform its own body, and no kernel that only one of them has."""
    from jaxkern import gelu

    platforms = ("cpu", "mps", "METAL")
    exported = jax.export.export(jax.jit(gelu), platforms=platforms)(X)
    np.testing.assert_allclose(exported.call(X), jax.nn.gelu(X), rtol=1e-5)


def test_command_line(capsys):
    assert command_line.main(["apple", "check", "rms_norm", "--fused"]) == 0
    said = capsys.readouterr().out
    assert "rms_norm: mps (jax-mps 0.11.1)" in said and "1 fused calls" in said
    assert command_line.main(["apple", "check", "fft", "--platform", "METAL"]) == 1
    assert "stablehlo.fft" in capsys.readouterr().out
    assert command_line.main(["apple", "check", "no_such_op"]) == 2
    assert "no op" in capsys.readouterr().err
