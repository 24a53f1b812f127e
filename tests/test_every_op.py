"""Every declared op passes every check over its CASES."""

import functools

import pytest

import jaxkern  # noqa: F401  (declares the ops)
from jaxkern.primitives.kernel_primitive import REGISTRY
from jaxkern.testing import (
    checks,
    edge_checks,
    mesh_checks,
    sharding_checks,
    transform_checks,
)
from jaxkern.testing.check_op import (
    EACH_CASE,
    EACH_FAMILY,
    EACH_SMALL_CASE,
    ON_MESHES,
    is_small,
    smallest_case,
)
from tests.cases import cases_of

OPS = [p for p in REGISTRY.values() if p.reference.__module__.startswith("jaxkern.")]
MID = 2**20  # elements: larger cases only with `make test-full`
# `make test` leaves out large cases, looks at the dtypes of the smallest, takes of
# EACH_SMALL_CASE the smallest, ON_MESHES the case of each op with the most dims to cut,
# and EACH_FAMILY the first op of each; of meshes of two axes and gradients inside
# shard_map the op with the most dims, too. `make test-full` takes every small case.


def family(p):
    return p.reference.__module__.rpartition(".")[0]


RULES_BY = ("norm", "attention", "index", "quant", "optim")
FIRST_OF_FAMILY = {family(p): p for p in reversed(OPS)} | {  # or what it is named for
    family(p): p for p in OPS if family(p).endswith(f".{p.name}")
}
BOTH_OF_FAMILY = (mesh_checks.check_two_axes, mesh_checks.check_manual_axes)


def dims_to_cut(p):
    return len(sharding_checks.shardings_of(p, operands_on_meshes(p)))


def operands_on_meshes(p):
    return checks.operands_of(p, mesh_checks.mesh_case(p, cases_of(p)))


@functools.cache
def most_dims_of_family():
    """Of each family the op with the most dims to cut, but for its first."""
    rest = [p for p in OPS if FIRST_OF_FAMILY[family(p)] is not p]
    return {family(p): p for p in sorted(rest, key=dims_to_cut)}


def stands_for_family(check, p):
    if FIRST_OF_FAMILY[family(p)] is p:
        # differences agree with what agrees with JAX's gradients: few families for all
        differences = check is transform_checks.check_numerical_gradients
        return not differences or family(p).rpartition(".")[2] in RULES_BY
    return check in BOTH_OF_FAMILY and most_dims_of_family()[family(p)] is p


def of_every_case():
    for p in OPS:
        smallest = smallest_case(p, cases_of(p))
        for k, case in enumerate(cases_of(p)):
            large = case.full or checks.num_elements(p, case) > MID
            for check in EACH_CASE:
                of_dtypes = check is checks.check_dtypes
                full = case is not smallest if of_dtypes else large
                yield parameter(check, p, case, full, first=k == 0)


def of_small_cases():
    for p in OPS:
        cases = cases_of(p)
        smallest, cut = smallest_case(p, cases), mesh_checks.mesh_case(p, cases)
        for check in (*EACH_SMALL_CASE, *ON_MESHES, *EACH_FAMILY):
            chosen = smallest if check in EACH_SMALL_CASE else cut
            here = check not in EACH_FAMILY or stands_for_family(check, p)
            for case in filter(functools.partial(is_small, p), cases):
                full = case is not chosen or not here
                yield parameter(check, p, case, full, first=case is chosen)


def parameter(check, p, case, full, first):
    name = check.__name__.removeprefix("check_")
    marks = [pytest.mark.full] if full else smoke(p, check, first)
    return pytest.param(check, p, case, id=f"{p.name}-{case.name}-{name}", marks=marks)


def smoke(p, check, first_case):
    """What `make test` also runs on the oldest jax: each check that meets its API.

    The rules are those of one helper, so a few families stand for all.
    """
    shared = (
        transform_checks.check_gradients,
        transform_checks.check_vmap,
        sharding_checks.check_kernel_sharding,
        mesh_checks.check_two_axes,
    )
    of_rules = check in shared and family(p).rpartition(".")[2] in RULES_BY
    api = check is checks.check_values or of_rules
    first = FIRST_OF_FAMILY[family(p)] is p
    return [pytest.mark.smoke] if api and first and first_case else []


@pytest.mark.parametrize("check, p, case", list(of_every_case()))
def test_case(check, p, case):
    check(p, case)


@pytest.mark.parametrize("check, p, case", list(of_small_cases()))
def test_small_case(check, p, case):
    check(p, case)


IN_FULL = (
    transform_checks.check_vmap,  # gradients of each operand alone, in both orders
    sharding_checks.check_sharding,  # each dim by itself
    sharding_checks.check_every_dim,
    sharding_checks.check_kernel_sharding,
    mesh_checks.check_every_cut,
    mesh_checks.check_two_axes,  # every pair of dims
)


@pytest.mark.full
@pytest.mark.parametrize("check", IN_FULL, ids=lambda check: check.__name__)
@pytest.mark.parametrize("p", OPS, ids=lambda p: p.name)
def test_one_by_one(check, p):
    cases = cases_of(p)
    on_mesh = check is not transform_checks.check_vmap
    case = mesh_checks.mesh_case(p, cases) if on_mesh else smallest_case(p, cases)
    check(p, case, full=True)


@pytest.mark.full
@pytest.mark.parametrize("p", OPS, ids=lambda p: p.name)
def test_explicit_vmap(p):
    sharding_checks.check_explicit_vmap(p, smallest_case(p, cases_of(p)))


@pytest.mark.parametrize(
    "p",
    [p for p in OPS if any(a.optional for a in p.operands)],
    ids=lambda p: p.name,
)
def test_optional_operands_change_results(p):
    """One that a reference ignores passes every check against the reference."""
    small = [case for case in cases_of(p) if is_small(p, case)]
    edge_checks.check_optional_operands(p, *small)


@pytest.mark.parametrize("p", OPS, ids=lambda p: p.name)
def test_op_has_small_cases(p):
    assert any(is_small(p, case) for case in cases_of(p))
