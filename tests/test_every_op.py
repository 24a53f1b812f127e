"""Every declared op passes every check over its CASES."""

import pytest

import jaxkern  # noqa: F401  (declares the ops)
from jaxkern.primitives.kernel_primitive import REGISTRY
from tests import checks, edge_checks, sharding_checks, transform_checks

OPS = [p for p in REGISTRY.values() if p.reference.__module__.startswith("jaxkern.")]
MID = 2**20  # elements: larger cases only with `make test-full`
EACH_CASE = {checks.check_values: 9, checks.check_dtypes: 9}
EACH_SMALL_CASE = {  # how many small cases of an op `make test` takes; `test-full` all
    transform_checks.check_gradients: 1,
    edge_checks.check_errors: 1,
}
# What follows from the shared rules more than from the op: `make test` takes the first
# op of each family, `test-full` all.
EACH_FAMILY = {
    checks.check_dtypes: 1,
    sharding_checks.check_kernel_sharding: 1,
    edge_checks.check_degenerate_dims: 1,
    transform_checks.check_vmap: 1,
    transform_checks.check_transforms: 1,
    sharding_checks.check_sharding: 1,
    sharding_checks.check_explicit_sharding: 1,
    sharding_checks.check_shard_map: 1,
    checks.check_kernel_is_used: 1,
}


def family(p):
    return p.reference.__module__.rpartition(".")[0]


RULES_BY = ("norm", "attention", "index", "quant", "optim")
FIRST_OF_FAMILY = {family(p): p for p in reversed(OPS)}


def parameters(functions, keep):
    return list(generate_parameters(functions, keep))


def generate_parameters(functions, keep):
    for p in OPS:
        kept = [case for case in checks.cases_of(p) if keep(p, case)]
        for k, case in enumerate(kept):
            large = case.full or checks.num_elements(p, case) > MID
            for check, cases in functions.items():
                first = FIRST_OF_FAMILY[family(p)] is p
                full = large or k >= EACH_FAMILY.get(check, cases)
                full = full or (check in EACH_FAMILY and not first)
                name = check.__name__.removeprefix("check_")
                yield pytest.param(
                    check,
                    p,
                    case,
                    id=f"{p.name}-{case.name}-{name}",
                    marks=[pytest.mark.full] if full else smoke(p, check, k),
                )


def smoke(p, check, k):
    """What `make test` also runs on the oldest jax: each check that meets its API.

    The rules are those of one helper, so a few families stand for all.
    """
    shared = (
        transform_checks.check_gradients,
        sharding_checks.check_kernel_sharding,
        transform_checks.check_vmap,
    )
    of_rules = check in shared and family(p).rpartition(".")[2] in RULES_BY
    api = check is checks.check_values or of_rules
    first = FIRST_OF_FAMILY[family(p)] is p
    return [pytest.mark.smoke] if api and first and k == 0 else []


def is_small(p, case):
    return checks.num_elements(p, case) <= checks.SMALL


def smallest_case(p):
    sized = [c for c in checks.cases_of(p) if 0 < checks.num_elements(p, c)]
    return min(sized, key=lambda c: checks.num_elements(p, c))


@pytest.mark.parametrize("check, p, case", parameters(EACH_CASE, lambda p, case: True))
def test_case(check, p, case):
    check(p, case)


@pytest.mark.parametrize(
    "check, p, case",
    parameters(
        {
            k: n
            for k, n in (EACH_SMALL_CASE | EACH_FAMILY).items()
            if k not in EACH_CASE
        },
        is_small,
    ),
)
def test_small_case(check, p, case):
    check(p, case)


def first_of_families():
    """Every op, all but the first of each family for `make test-full`."""
    for p in OPS:
        rare = FIRST_OF_FAMILY[family(p)] is not p
        yield pytest.param(p, id=p.name, marks=[pytest.mark.full] if rare else [])


@pytest.mark.parametrize("p", list(first_of_families()))
def test_numerical_gradients(p):
    transform_checks.check_numerical_gradients(p, smallest_case(p))


@pytest.mark.full
@pytest.mark.parametrize("p", OPS, ids=lambda p: p.name)
def test_explicit_vmap(p):
    sharding_checks.check_explicit_vmap(p, smallest_case(p))


@pytest.mark.parametrize("p", OPS, ids=lambda p: p.name)
def test_op_has_small_cases(p):
    assert any(is_small(p, case) for case in checks.cases_of(p))
