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
from jaxkern.lowering.lower import backend
from jaxkern.testing import checks
from jaxkern.testing.check_op import is_small
from tests.cases import cases_of
from tests.test_every_op import FIRST_OF_FAMILY, OPS

KNOWN = {  # on a plugin that no supported jax can load: reported, not cured
    "METAL": {
        *("fft", "gated_delta_step", "gated_delta_net_step", "softmax_sample"),
        *("gated_delta_net_verify", "kimi_delta_attention_step", "linear"),
        "solve_unit_lower",
        "qk_norm_rope_cache_attention",
    }
}


def cases(*on):
    """All cases of all ops for `make test-full`, `on` are those for `make test`."""
    for p in OPS:
        for case in filter(functools.partial(is_small, p), cases_of(p)):
            name = f"{p.name}-{case.name}"
            marks = [] if name in on else [pytest.mark.full]
            yield pytest.param(p, case, id=name, marks=marks)


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
    with backend("xla"):  # no kernel of the CPU, which rounds in another order
        expected, grads = jax.jit(f)(*operands)
    actual, actual_grads = exported.call(*operands)
    for a, e in zip(*map(checks.as_tuple, (actual, expected)), strict=True):
        checks.assert_near(a, e, case.ulps, what=f"{p.name} for {platform}")
    checks.same(actual_grads, grads, 64, what=f"{p.name} for {platform}: gradient")


@pytest.mark.parametrize("p, case", list(cases("update_paged_kv_cache-plain")))
def test_mps(p, case):
    check_op("mps", p, case)


@pytest.mark.parametrize("p, case", list(cases()))
def test_metal(p, case):
    check_op("metal", p, case)


def test_the_first_op_of_each_family_is_clean():
    for p in FIRST_OF_FAMILY.values():
        case = cases_of(p)[0]
        _, _, exported = lowered(p, case, "mps")
        report = check_module(exported.mlir_module_serialized, PLUGINS["mps"])
        assert report.findings == (), f"{p.name}: {report}"


@pytest.mark.full
@pytest.mark.parametrize("platform", ["mtl", "METAL"])
def test_reported(platform):
    """What docs/apple.md says of the two that are only reported."""
    found = set()
    for p in OPS:
        for case in filter(functools.partial(is_small, p), cases_of(p)):
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
