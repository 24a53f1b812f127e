"""Gradients of the fused norms over long rows, in Triton's interpreter.

What a row needs beyond registers is tried on short rows, by lower limits.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.gpu import triton_call as bridge
from jaxkern.primitives.kernel_primitive import REGISTRY
from jaxkern.triton.norm import (
    gated_rms_norm,
    gated_rms_norm_backward,
    multi_rms_norm,
    rms_norm_add,
    rms_norm_mul,
    row_tiles,
    sandwich_norm_backward,
    sandwich_rms_norm,
)
from jaxkern.triton.norm.moe_rms_norm_add import (
    bwd as moe_rms_norm_add_backward,
)
from jaxkern.triton.norm.moe_rms_norm_add import fwd as moe_rms_norm_add
from tests.triton.interpreted import (
    alone,
    check_in_its_own_process,
    interpreted,
    starts_it,
)

pytestmark = pytest.mark.skipif(bridge.triton is None, reason="triton is not installed")
ROWS, D = 9, 9001
MODULES = (
    gated_rms_norm,
    moe_rms_norm_add,
    moe_rms_norm_add_backward,
    multi_rms_norm,
    rms_norm_add,
    rms_norm_mul,
    sandwich_rms_norm,
)
T, V, NONE = (ROWS, D), (D,), None  # a tensor, a vector, absent
CASES = {
    "gated": ("gated_rms_norm", (T, T, V), {"norm_before_gate": True}),
    "gate first": ("gated_rms_norm", (T, T, V), {"norm_before_gate": False}),
    "gate without a weight": (
        "gated_rms_norm",
        (T, T, NONE),
        {"norm_before_gate": True},
    ),
    "times a factor": ("rms_norm_mul", (T, T, V), {"offset": 1.0}),
    "added": ("rms_norm_add", (T, T, V, NONE), {"offset": 1.0}),
    "added without a weight": ("rms_norm_add", (T, T, NONE, NONE), {"offset": 0.0}),
    "added and scaled": ("rms_norm_add", (T, T, V, V), {"offset": 0.0}),
    "added times a number": ("rms_norm_add", (T, T, V, (1,)), {"offset": 0.0}),
    "dual": ("dual_rms_norm", (T, V, V), {"offset": 0.0}),
    "triple": ("triple_rms_norm", (T, V, NONE, V), {"offset": 1.0}),
    "sandwich": ("sandwich_rms_norm", (T, T, V, V), {"offset": 1.0}),
    "experts": (
        "moe_rms_norm_add",
        ((ROWS, 3, D), (ROWS, 3), T, V, V),
        {"offset": 1.0, "normalize_residual": True},
    ),
    "two experts": (
        "moe_rms_norm_add",
        ((ROWS, 2, D), (ROWS, 2), T, NONE, NONE),
        {"offset": 0.0, "normalize_residual": False},
    ),
    "sandwich of three": (
        "sandwich_triple_rms_norm",
        (T, T, V, V, NONE, V),
        {"offset": 0.0},
    ),
}


@pytest.mark.full
@starts_it
def test_in_a_process_of_its_own():
    check_in_its_own_process(__file__, 2 * len(CASES))


def draw(seed):
    rng = np.random.default_rng(seed)
    return lambda shape: (
        None if shape is None else jnp.float32(rng.standard_normal(shape))
    )


@alone
@pytest.mark.parametrize("most", [10**6, 0], ids=["chunks", "stripes"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_long_rows(monkeypatch, name, most):
    modules = gated_rms_norm_backward, moe_rms_norm_add, sandwich_norm_backward
    for module in (*modules, moe_rms_norm_add_backward):
        monkeypatch.setattr(module, "LONGEST", 512)
        monkeypatch.setattr(module, "LONGEST_OF_TWO", 512, raising=False)
        monkeypatch.setattr(module, "MOST", most, raising=False)
        monkeypatch.setattr(module, "MOST_OF_TWO", most, raising=False)
    # which the interpreter has no instruction for
    monkeypatch.setattr(row_tiles, "PREFETCH", False)
    op, shapes, options = CASES[name]
    options = options | {"eps": 1e-6}
    p = REGISTRY[op]
    operands = [draw(k)(shape) for k, shape in enumerate(shapes)]
    assert p.fwd is not None and p.bwd is not None
    out = p.fwd.reference(*operands, **options)
    results, residuals = out[: len(p.results)], out[len(p.results) :]
    dys = [draw(10 + k)(y.shape) for k, y in enumerate(results)]
    expected = p.bwd.reference(*operands, *residuals, *dys, **options)
    [kernel] = [f for m in MODULES if (f := getattr(m, f"{op}_bwd", None))]
    wanted = tuple(x is not None for x in operands)
    with interpreted():
        found = kernel(*operands, *residuals, *dys, **options, wanted=wanted)
    for y, e in zip(found, expected, strict=True):
        assert (y is None) == (e is None)
        if e is not None:
            error = jnp.linalg.norm(y - e) / jnp.linalg.norm(e)
            assert error < 2e-6
