"""Every declared op passes every check over its CASES."""

import functools
import math

import pytest

import jaxkern  # noqa: F401  (declares the ops)
from jaxkern.primitives.kernel_primitive import REGISTRY
from tests import (
    checks,
    edge_checks,
    mesh_checks,
    sharding_checks,
    transform_checks,
)

OPS = [p for p in REGISTRY.values() if p.reference.__module__.startswith("jaxkern.")]
MID = 2**20  # elements: larger cases only with `make test-full`
# Every case with `make test-full`; `make test` leaves out the large ones, and looks at
# the dtypes of the smallest.
EACH_CASE = (checks.check_values, checks.check_dtypes)
# Every small case with `make test-full`; `make test` the smallest of each op.
EACH_SMALL_CASE = (
    checks.check_eager,
    checks.check_kernel_is_used,
    edge_checks.check_errors,
    edge_checks.check_degenerate_dims,
    transform_checks.check_gradients,
    transform_checks.check_vmap,
    transform_checks.check_transforms,
    mesh_checks.check_manual_axes,
)
# The same, but `make test` takes the case of each op with the most dims to cut.
ON_MESHES = (
    sharding_checks.check_every_dim,
    sharding_checks.check_sharding,
    mesh_checks.check_two_axes,
)
# What follows from the shared rules or from other checks: `make test` takes the first
# op of each family.
EACH_FAMILY = (
    transform_checks.check_numerical_gradients,
    sharding_checks.check_kernel_sharding,
    sharding_checks.check_explicit_sharding,
    sharding_checks.check_shard_map,
)


def family(p):
    return p.reference.__module__.rpartition(".")[0]


RULES_BY = ("norm", "attention", "index", "quant", "optim")
FIRST_OF_FAMILY = {family(p): p for p in reversed(OPS)} | {  # or what it is named for
    family(p): p for p in OPS if family(p).endswith(f".{p.name}")
}


def of_every_case():
    for p in OPS:
        smallest = smallest_case(p)
        for k, case in enumerate(checks.cases_of(p)):
            large = case.full or checks.num_elements(p, case) > MID
            for check in EACH_CASE:
                of_dtypes = check is checks.check_dtypes
                full = case is not smallest if of_dtypes else large
                yield parameter(check, p, case, full, first=k == 0)


def of_small_cases():
    for p in OPS:
        smallest, cut = smallest_case(p), mesh_checks.mesh_case(p)
        first = FIRST_OF_FAMILY[family(p)] is p
        for check in (*EACH_SMALL_CASE, *ON_MESHES, *EACH_FAMILY):
            chosen = smallest if check in EACH_SMALL_CASE else cut
            for case in filter(functools.partial(is_small, p), checks.cases_of(p)):
                full = case is not chosen or (check in EACH_FAMILY and not first)
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


def is_small(p, case):
    return checks.num_elements(p, case) <= checks.SMALL


def smallest_case(p):
    """The smallest case in which no operand is empty."""

    def is_filled(case):
        shapes = (
            s.shape for s in case.arguments.values() if isinstance(s, checks.Spec)
        )
        return all(math.prod(shape) for shape in shapes)

    filled = filter(is_filled, checks.cases_of(p))
    return min(filled, key=lambda case: checks.num_elements(p, case))


@pytest.mark.parametrize("check, p, case", list(of_every_case()))
def test_case(check, p, case):
    check(p, case)


@pytest.mark.parametrize("check, p, case", list(of_small_cases()))
def test_small_case(check, p, case):
    check(p, case)


@pytest.mark.full
@pytest.mark.parametrize("p", OPS, ids=lambda p: p.name)
def test_every_pair_of_dims_over_two_axes(p):
    mesh_checks.check_two_axes(p, mesh_checks.mesh_case(p), full=True)


@pytest.mark.full
@pytest.mark.parametrize("p", OPS, ids=lambda p: p.name)
def test_vmap_of_each_operand_in_both_orders(p):
    transform_checks.check_vmap(p, smallest_case(p), full=True)


@pytest.mark.full
@pytest.mark.parametrize("p", OPS, ids=lambda p: p.name)
def test_explicit_vmap(p):
    sharding_checks.check_explicit_vmap(p, smallest_case(p))


@pytest.mark.parametrize(
    "p",
    [p for p in OPS if any(a.optional for a in p.operands)],
    ids=lambda p: p.name,
)
def test_optional_operands_change_results(p):
    """One that a reference ignores passes every check against the reference."""
    small = [case for case in checks.cases_of(p) if is_small(p, case)]
    edge_checks.check_optional_operands(p, *small)


@pytest.mark.parametrize("p", OPS, ids=lambda p: p.name)
def test_op_has_small_cases(p):
    assert any(is_small(p, case) for case in checks.cases_of(p))
