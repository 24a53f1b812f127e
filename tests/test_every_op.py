"""Every declared op passes every check over its CASES."""

import pytest

import jaxkern  # noqa: F401  (declares the ops)
from jaxkern.primitives.kernel_primitive import REGISTRY
from tests import checks

OPS = [p for p in REGISTRY.values() if p.reference.__module__.startswith("jaxkern.")]
MID = 2**20  # elements: larger cases only with `make test-full`
EACH_CASE = [checks.check_values, checks.check_dtypes]
EACH_SMALL_CASE = [
    checks.check_gradients,
    checks.check_vmap,
    checks.check_transforms,
    checks.check_sharding,
    checks.check_kernel_sharding,
    checks.check_explicit_sharding,
    checks.check_shard_map,
    checks.check_kernel_is_used,
    checks.check_degenerate_dims,
    checks.check_errors,
]


def parameters(functions, keep):
    return list(generate_parameters(functions, keep))


def generate_parameters(functions, keep):
    for p in OPS:
        kept = [case for case in checks.cases_of(p) if keep(p, case)]
        for k, case in enumerate(kept):
            full = case.full or checks.num_elements(p, case) > MID
            full = full or (keep is is_small and k >= checks.NUM_SMALL)
            for check in functions:
                name = check.__name__.removeprefix("check_")
                yield pytest.param(
                    check,
                    p,
                    case,
                    id=f"{p.name}-{case.name}-{name}",
                    marks=[pytest.mark.full] if full else smoke(check, k),
                )


def smoke(check, k):
    """What `make test` also runs on the oldest jax: each check that meets its API."""
    api = (checks.check_values, checks.check_gradients, checks.check_kernel_sharding)
    return [pytest.mark.smoke] if check in api and k == 0 else []


def is_small(p, case):
    return checks.num_elements(p, case) <= checks.SMALL


def smallest_cases(p):
    sized = [c for c in checks.cases_of(p) if 0 < checks.num_elements(p, c)]
    return sorted(sized, key=lambda c: checks.num_elements(p, c))[:2]


@pytest.mark.parametrize("check, p, case", parameters(EACH_CASE, lambda p, case: True))
def test_case(check, p, case):
    check(p, case)


@pytest.mark.parametrize("check, p, case", parameters(EACH_SMALL_CASE, is_small))
def test_small_case(check, p, case):
    check(p, case)


@pytest.mark.parametrize("p", OPS, ids=lambda p: p.name)
def test_numerical_gradients(p):
    for case in smallest_cases(p):
        checks.check_numerical_gradients(p, case)


@pytest.mark.parametrize("p", OPS, ids=lambda p: p.name)
def test_op_has_small_cases(p):
    assert any(is_small(p, case) for case in checks.cases_of(p))
