"""Every op, forward and backward: nothing an Apple plugin would refuse or get wrong.

What is lowered for the platform also runs here, on the CPU, with the numbers of the op.
"""

import functools

import jax
import numpy as np
import pytest

from jaxkern.lowering.apple.findings import check_module
from jaxkern.lowering.apple.plugins import PLUGINS
from jaxkern.lowering.apple.wire import export
from tests import checks
from tests.test_every_op import FIRST_OF_FAMILY, OPS, family, is_small

KNOWN = {  # on a plugin that no supported jax can load: reported, not cured
    "METAL": {"fft", "gated_delta_step", "softmax_sample", "solve_unit_lower"}
}


def cases(platform):
    """The first op of each family in `make test`, all with all cases in `test-full`."""
    for p in OPS:
        kept = [case for case in checks.cases_of(p) if is_small(p, case)]
        for k, case in enumerate(kept):
            first = FIRST_OF_FAMILY[family(p)] is p and platform == "mps" and k == 0
            full = [pytest.mark.full] if not first or case.full else []
            yield pytest.param(p, case, id=f"{p.name}-{case.name}", marks=full)


def every_direction(p, case, operands):
    """The op, and its gradients where it has any, as one function."""
    f = checks.bound(p, case)
    if not checks.differentiable(p, operands):
        return lambda *operands: (f(*operands), ())
    return lambda *operands: (f(*operands), checks.gradients(f, operands)(*operands))


def lowered(p, case, platform):
    operands = checks.operands_of(p, case)
    f = every_direction(p, case, operands)
    return operands, f, export(f, *operands, platform=platform)


def check_op(platform, p, case):
    operands, f, exported = lowered(p, case, platform)
    report = check_module(exported.mlir_module_serialized, PLUGINS[platform])
    assert report.findings == (), report
    expected, grads = jax.jit(f)(*operands)
    actual, actual_grads = exported.call(*operands)
    for a, e in zip(*map(checks.as_tuple, (actual, expected)), strict=True):
        checks.assert_near(a, e, case.ulps, what=f"{p.name} for {platform}")
    checks.same(actual_grads, grads, 64, what=f"{p.name} for {platform}: gradient")


@pytest.mark.parametrize("p, case", list(cases("mps")))
def test_mps(p, case):
    check_op("mps", p, case)


@pytest.mark.parametrize("p, case", list(cases("metal")))
def test_metal(p, case):
    check_op("metal", p, case)


@pytest.mark.full
@pytest.mark.parametrize("platform", ["mtl", "METAL"])
def test_reported(platform):
    """What docs/apple.md says of the two that are only reported."""
    found = set()
    for p in OPS:
        for case in filter(functools.partial(is_small, p), checks.cases_of(p)):
            _, _, exported = lowered(p, case, platform)
            artifact = exported.mlir_module_serialized
            if check_module(artifact, PLUGINS[platform]).findings:
                found.add(p.name)
    assert found == KNOWN.get(platform, set())


def test_the_check_would_fail():
    """A module that jax-mps would get wrong is not called clean."""
    x = np.ones((4, 8), np.float32)
    exported = export(lambda x: jax.lax.sort((x, x), num_keys=2), x, platform="mps")
    report = check_module(exported.mlir_module_serialized, PLUGINS["mps"])
    assert [f.what for f in report.hard] == ["sort by several keys"]
