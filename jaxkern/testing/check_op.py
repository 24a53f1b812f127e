"""All generic checks of one op, as this library runs them for its own."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from jaxkern.primitives.family import KernelPrimitive
from jaxkern.testing import (
    checks,
    edge_checks,
    mesh_checks,
    sharding_checks,
    transform_checks,
)
from jaxkern.testing.checks import Case, Spec, num_elements

DEVICES = 8  # that the checks cut operands over
# Of every case; dtypes of the smallest.
EACH_CASE = (checks.check_values, checks.check_dtypes)
# Of the smallest case.
EACH_SMALL_CASE = (
    checks.check_eager,
    checks.check_kernel_is_used,
    edge_checks.check_errors,
    edge_checks.check_degenerate_dims,
    transform_checks.check_gradients,
    transform_checks.check_vmap,
    transform_checks.check_transforms,
    mesh_checks.check_manual_types,
)
# Of the case with the most dims to cut.
ON_MESHES = (
    sharding_checks.check_every_dim,
    sharding_checks.check_sharding,
    mesh_checks.check_every_cut,
)
# What follows from the shared rules or from other checks.
EACH_FAMILY = (
    transform_checks.check_numerical_gradients,
    sharding_checks.check_kernel_sharding,
    sharding_checks.check_explicit_sharding,
    sharding_checks.check_shard_map,
    mesh_checks.check_manual_axes,
    mesh_checks.check_two_axes,
)


class Check(NamedTuple):
    """One check of one case; called, it raises AssertionError where that fails."""

    name: str
    run: Callable[[], None]

    def __call__(self) -> None:
        self.run()

    def __str__(self) -> str:
        return self.name


def checks_of(p: KernelPrimitive, cases: Sequence[Case]) -> list[Check]:
    """The checks of an op: values of each case, everything else of small ones.

    Args:
      p: what `kernel_primitive` returned.
      cases: of `jaxkern.testing.case`, at least one of which has at most 6000 numbers
        and none that is empty. Each optional operand is in one and missing in another.

    Returns:
      every: for `pytest.mark.parametrize("check", checks_of(p, CASES), ids=str)`.

    Raises:
      ValueError: no case is small.
      RuntimeError: JAX has fewer than 8 devices to cut operands over.

    Example:
      >>> from jaxkern.primitives.activation.softcap import softcap_p
      >>> from jaxkern.testing import case, checks_of, f32
      >>> cases = [case("rows", x=f32(4, 8), cap=30.0)]
      >>> [str(check) for check in checks_of(softcap_p, cases)][:3]
      ['softcap-rows-values', 'softcap-rows-dtypes', 'softcap-rows-eager']
    """
    if not any(is_small(p, case) and is_filled(case) for case in cases):
        raise ValueError(
            f"check_op: {p.name} needs a case of at most {checks.SMALL} numbers, none "
            "of its operands empty."
        )
    if len(jax.devices()) < DEVICES:
        raise RuntimeError(
            f"check_op: {DEVICES} devices are needed, JAX has {len(jax.devices())}. "
            "Set XLA_FLAGS=--xla_force_host_platform_device_count=8 and "
            "JAX_PLATFORMS=cpu before jax is imported."
        )
    smallest, cut = smallest_case(p, cases), mesh_checks.mesh_case(p, cases)
    plan = [(checks.check_values, case) for case in cases]
    plan += [(checks.check_dtypes, smallest)]
    plan += [(check, smallest) for check in EACH_SMALL_CASE]
    plan += [(check, cut) for check in (*ON_MESHES, *EACH_FAMILY)]
    every = [
        Check(
            f"{p.name}-{case.name}-{check.__name__.removeprefix('check_')}",
            functools.partial(check, p, case),
        )
        for check, case in plan
    ]
    if any(a.optional for a in p.operands):
        small = [case for case in cases if is_small(p, case)]
        check = functools.partial(edge_checks.check_optional_operands, p, *small)
        every.append(Check(f"{p.name}-optional_operands", check))
    return every


def check_op(p: KernelPrimitive, cases: Sequence[Case]) -> int:
    """Runs every generic check of an op and says which ones fail.

    Values against float64, result dims and dtypes, with and without `jit`, empty dims
    and dims of 1, errors in words, gradients to order 2 in both modes, vmap of each
    operand and nested, checkpoint, scan, every dim of every operand cut over devices by
    XLA, around an opaque kernel, on explicit meshes, over two axes and inside
    `shard_map` with checked axes, and that optional operands are not ignored.

    Args:
      p, cases: see `checks_of`, which gives the checks one by one, for pytest.

    Returns:
      How many checks ran.

    Raises:
      ExceptionGroup: of the errors of all checks that failed, each with its name.

    Example:
      >>> from jaxkern.primitives.activation.softcap import softcap_p
      >>> from jaxkern.testing import case, check_op, f32
      >>> check_op(softcap_p, [case("rows", x=f32(4, 8), cap=30.0)])
      19
    """
    failed: list[Exception] = []
    every = checks_of(p, cases)
    for check in every:
        try:
            check()
        except Exception as error:
            error.add_note(f"in the check {check.name}")
            failed.append(error)
    if failed:
        raise ExceptionGroup(
            f"check_op: {len(failed)} of {len(every)} checks of {p.name} fail", failed
        )
    return len(every)


def is_small(p: KernelPrimitive, case: Case) -> bool:
    return num_elements(p, case) <= checks.SMALL


def is_filled(case: Case) -> bool:
    """No operand is empty."""
    shapes = (s.shape for s in case.arguments.values() if isinstance(s, Spec))
    return all(math.prod(shape) for shape in shapes)


def smallest_case(p: KernelPrimitive, cases: Sequence[Case]) -> Case:
    """The smallest case in which no operand is empty."""
    return min(filter(is_filled, cases), key=lambda case: num_elements(p, case))
