"""Ops that are wrong in one way each: the check of that way turns red, and only then.

Each pair below differs in nothing but the fault, so the right one shows that the check
is red for it.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jaxtyping import Array, Float

import jaxkern  # noqa: F401  (adds the rows)
from jaxkern.lowering.lower import lower
from jaxkern.primitives.attention.attention import attention_p
from jaxkern.primitives.kernel_primitive import (
    REGISTRY,
    at_least_f32,
    kernel_primitive,
)
from jaxkern.primitives.norm.rms_norm import rms_norm_p
from jaxkern.testing import (
    checks,
    edge_checks,
    mesh_checks,
    sharding_checks,
    transform_checks,
)
from jaxkern.testing.checks import Spec, case, f32
from tests.cases import cases_of

ROWS = case("rows", x=f32(4, 8))
SCALED = case("scaled", x=f32(4, 8), scale=f32(8))


def declared(reference, **rules):
    """The op, but not among those of the library."""
    p = kernel_primitive(reference, **rules)
    del REGISTRY[p.name]
    return p


# A result depends on all of d otherwise than by a sum.


def centered_reference(x: Float[Array, "... d"]) -> Float[Array, "... d"]:
    return x - x.mean(-1, keepdims=True)


whole_p = declared(centered_reference, replicated=("d",))
cut_p = declared(centered_reference)


# Gradients: of one operand, of a gradient, from what is saved.


def times_reference(
    x: Float[Array, "... d"], scale: Float[Array, " d"]
) -> Float[Array, "... d"]:
    return x * scale


def times_bwd_reference(
    x: Float[Array, "... d"], scale: Float[Array, " d"], dy: Float[Array, "... d"]
) -> tuple[Float[Array, "... d"], Float[Array, " d"]]:
    dscale = (x * dy).sum(tuple(range(x.ndim - 1)))
    return dy * scale, dscale.astype(scale.dtype)


def half_dscale_bwd_reference(
    x: Float[Array, "... d"], scale: Float[Array, " d"], dy: Float[Array, "... d"]
) -> tuple[Float[Array, "... d"], Float[Array, " d"]]:
    dx, dscale = times_bwd_reference(x, scale, dy)
    return dx, dscale / 2


def constant_bwd_reference(
    x: Float[Array, "... d"], scale: Float[Array, " d"], dy: Float[Array, "... d"]
) -> tuple[Float[Array, "... d"], Float[Array, " d"]]:
    dx, dscale = times_bwd_reference(x, scale, dy)
    return lax.stop_gradient(dx), lax.stop_gradient(dscale)


def wide_bwd_reference(
    x: Float[Array, "... d"], scale: Float[Array, " d"], dy: Float[Array, "... d"]
) -> tuple[Float[Array, "... d"], Float[Array, " d"]]:
    return tuple(g.astype(jnp.float32) for g in times_bwd_reference(x, scale, dy))


times_p = declared(times_reference, bwd=times_bwd_reference)
half_dscale_p = declared(times_reference, bwd=half_dscale_bwd_reference)
constant_bwd_p = declared(times_reference, bwd=constant_bwd_reference)
wide_bwd_p = declared(times_reference, bwd=wide_bwd_reference)


def sine_reference(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.sin(x)


def sine_fwd_reference(
    x: Float[Array, "..."],
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    return jnp.sin(x), jnp.cos(x)


def rounded_fwd_reference(
    x: Float[Array, "..."],
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    return jnp.sin(x), jnp.cos(x).astype(jnp.float16)


def other_fwd_reference(
    x: Float[Array, "..."],
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    return jnp.sin(x) + 0.1, jnp.cos(x)


def sine_bwd_reference(
    cosine: Float[Array, "..."], dy: Float[Array, "..."]
) -> Float[Array, "..."]:
    return cosine.astype(dy.dtype) * dy


sine_p = declared(sine_reference, fwd=sine_fwd_reference, bwd=sine_bwd_reference)
rounded_p = declared(sine_reference, fwd=rounded_fwd_reference, bwd=sine_bwd_reference)
other_p = declared(sine_reference, fwd=other_fwd_reference, bwd=sine_bwd_reference)


# An operand that is declared linear.


def turned_reference(
    x: Float[Array, "... d"], scale: Float[Array, " d"]
) -> Float[Array, "... d"]:
    return x[..., ::-1] * jnp.cos(scale)


def bent_reference(
    x: Float[Array, "... d"], scale: Float[Array, " d"]
) -> Float[Array, "... d"]:
    return jnp.tanh(x[..., ::-1]) * jnp.cos(scale)


def turned_bwd_reference(
    scale: Float[Array, " d"], dy: Float[Array, "... d"]
) -> Float[Array, "... d"]:
    return (dy * jnp.cos(scale))[..., ::-1]


turned_p = declared(turned_reference, bwd=turned_bwd_reference, linear=("x",))
bent_p = declared(bent_reference, bwd=turned_bwd_reference, linear=("x",))


# An optional operand that is not read.


def perhaps_times_reference(
    x: Float[Array, "... d"], scale: Float[Array, " d"] | None
) -> Float[Array, "... d"]:
    return x if scale is None else x * scale


def never_times_reference(
    x: Float[Array, "... d"], scale: Float[Array, " d"] | None
) -> Float[Array, "... d"]:
    del scale
    return x + 0


perhaps_times_p = declared(perhaps_times_reference)
never_times_p = declared(never_times_reference)


# Leading dims that are no batch.


def sums_of_batch_reference(x: Float[Array, "n d"]) -> Float[Array, "n d"]:
    return jnp.cumsum(x, 0)


def sums_of_leading_reference(x: Float[Array, "... d"]) -> Float[Array, "... d"]:
    return jnp.cumsum(x, 0)


sums_p = declared(sums_of_batch_reference, replicated=("n",))
sums_of_leading_p = declared(sums_of_leading_reference)


# Sums in the operands' own precision, a largest element of nothing.


def total_reference(x: Float[Array, "n d"]) -> Float[Array, " n"]:
    return at_least_f32(x).sum(-1).astype(x.dtype)


def rough_total_reference(x: Float[Array, "n d"]) -> Float[Array, " n"]:
    return lax.fori_loop(0, x.shape[1], lambda k, y: y + x[:, k], 0 * x[:, 0])


def largest_reference(x: Float[Array, "n d"]) -> Float[Array, " n"]:
    return x.max(-1, initial=-jnp.inf)


def largest_of_some_reference(x: Float[Array, "n d"]) -> Float[Array, " n"]:
    return x.max(-1)


total_p, rough_total_p = declared(total_reference), declared(rough_total_reference)
largest_p = declared(largest_reference)
largest_of_some_p = declared(largest_of_some_reference)


# Sums that start from zeros, which vary over no mesh axis; convolutions of groups.


def last_sum_reference(x: Float[Array, "n d"]) -> Float[Array, " d"]:
    return lax.scan(lambda y, row: (y + row, None), 0 * x[0], x)[0]


def sum_from_zeros_reference(x: Float[Array, "n d"]) -> Float[Array, " d"]:
    zeros = jnp.zeros(x.shape[1], x.dtype)
    return lax.scan(lambda y, row: (y + row, None), zeros, x)[0]


last_sum_p = declared(last_sum_reference)
sum_from_zeros_p = declared(sum_from_zeros_reference)


def of_groups_reference(
    x: Float[Array, "n c w"], weight: Float[Array, "c 1 k"]
) -> Float[Array, "n c w"]:
    windows = jnp.stack([x, jnp.roll(x, 1, -1)], -1)
    return jnp.einsum("ncwk,cik->ncw", windows, weight)


def by_lax_reference(
    x: Float[Array, "n c w"], weight: Float[Array, "c 1 k"]
) -> Float[Array, "n c v"]:
    return lax.conv_general_dilated(x, weight, (1,), "SAME", feature_group_count=4)


of_groups_p, by_lax_p = declared(of_groups_reference), declared(by_lax_reference)
GROUPS = case("groups", x=f32(4, 4, 3), weight=f32(4, 1, 2))

FAULTS = {
    "a missing replicated": (
        sharding_checks.check_every_dim,
        ROWS,
        whole_p,
        cut_p,
    ),
    "a wrong gradient of one operand": (
        transform_checks.check_gradients,
        SCALED,
        times_p,
        half_dscale_p,
    ),
    "a gradient without a gradient": (
        transform_checks.check_gradients,
        SCALED,
        times_p,
        constant_bwd_p,
    ),
    "a wrong gradient, by differences": (
        transform_checks.check_numerical_gradients,
        SCALED,
        times_p,
        half_dscale_p,
    ),
    "a gradient of another dtype": (
        checks.check_dtypes,
        SCALED,
        times_p,
        wide_bwd_p,
    ),
    "a residual of another dtype": (
        transform_checks.check_gradients,
        ROWS,
        sine_p,
        rounded_p,
    ),
    "a fwd that is not the op": (
        transform_checks.check_gradients,
        ROWS,
        sine_p,
        other_p,
    ),
    "a fwd that is not the op, under checkpoint and scan": (
        transform_checks.check_transforms,
        ROWS,
        sine_p,
        other_p,
    ),
    "a linear operand that is not": (
        transform_checks.check_gradients,
        SCALED,
        turned_p,
        bent_p,
    ),
    "an optional operand that is ignored": (
        edge_checks.check_optional_operands,
        SCALED,
        perhaps_times_p,
        never_times_p,
    ),
    "leading dims that are no batch": (
        transform_checks.check_vmap,
        ROWS,
        sums_p,
        sums_of_leading_p,
    ),
    "leading dims that are no batch, on a mesh": (
        sharding_checks.check_every_dim,
        ROWS,
        sums_p,
        sums_of_leading_p,
    ),
    "a sum in bfloat16": (
        checks.check_values,
        case("long", x=Spec((2, 600), jnp.bfloat16, lambda rng, s: rng.random(s))),
        total_p,
        rough_total_p,
    ),
    "no answer for an empty dim": (
        edge_checks.check_degenerate_dims,
        ROWS,
        largest_p,
        largest_of_some_p,
    ),
    "zeros that lack the manual axes": (
        mesh_checks.check_manual_types,
        ROWS,
        last_sum_p,
        sum_from_zeros_p,
    ),
    "a wrong gradient inside shard_map": (
        mesh_checks.check_manual_axes,
        SCALED,
        times_p,
        half_dscale_p,
    ),
    "a gradient that XLA partitions wrongly": (
        mesh_checks.check_two_axes,
        GROUPS,
        of_groups_p,
        by_lax_p,
    ),
}


def is_red(check, p, case) -> bool:
    try:
        check(p, case)
    except Exception:
        return True
    return False


@pytest.mark.parametrize("name", FAULTS)
def test_fault(name):
    check, given, right, wrong = FAULTS[name]
    check(right, given)
    assert is_red(check, wrong, given)


# Faults of kernels: the op stays, a row is wrong.


def without_lengths(*operands, **options):
    at = next(i for i, a in enumerate(attention_p.operands) if a.name == "kv_lengths")
    given = [None if i == at else x for i, x in enumerate(operands)]
    return attention_p.reference(*given, **options)


def widened(*operands, **options):
    return rms_norm_p.reference(*operands, **options).astype(jnp.float32)


KERNELS = {
    "a kernel that ignores kv_lengths": (
        checks.check_values,
        attention_p,
        "some_rows_see_nothing",
        without_lengths,
    ),
    "a kernel that returns another dtype": (
        checks.check_dtypes,
        rms_norm_p,
        "plain",
        widened,
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_fault_of_a_kernel(name):
    check, p, case_name, wrong = KERNELS[name]
    given = next(c for c in cases_of(p) if c.name == case_name)
    for kernel in (p.reference, wrong):
        jax.clear_caches()
        with checks.own_rows(p):
            lower(p, "cpu", "cpp", fwd=None, primal=kernel)
            assert is_red(check, p, given) == (kernel is wrong)
    jax.clear_caches()
