"""Few rows by clusters of programs, in Triton's interpreter.

A program holds 64 columns here, so that the third one of a row of 126 has nothing where
the row begins at a multiple of 16 bytes, and 2 where it does not.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.gpu import triton_call as bridge
from jaxkern.primitives.kernel_primitive import REGISTRY
from jaxkern.triton.norm import (
    gated_rms_norm,
    layer_norm,
    rms_norm_add,
    row_norm_forward,
    sandwich_rms_norm,
    split_rows,
)
from tests.triton.clusters import in_a_cluster
from tests.triton.interpreted import alone, check_in_its_own_process, starts_it

pytestmark = pytest.mark.skipif(bridge.triton is None, reason="triton is not installed")
ROWS, D = 3, 126
MODULES = gated_rms_norm, layer_norm, rms_norm_add, sandwich_rms_norm
T, V, NONE = (ROWS, D), (D,), None  # a tensor, a vector, absent
PLUS = {"eps": 1e-6, "offset": 1.0}
CASES = {
    "layer": ("layer_norm", (T, V, V), PLUS, ROWS),
    "gate first": (
        "gated_rms_norm",
        (T, T, V),
        {"eps": 1e-6, "norm_before_gate": False},
        0,
    ),
    "added times a number": ("rms_norm_add", (T, T, V, (1,)), PLUS, ROWS),
    "sandwich": ("sandwich_triple_rms_norm", (T, T, V, V, NONE, V), PLUS, 0),
}


def draw(shape, seed):
    if shape is None:
        return None
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.float32(values + 100.0 * (seed == 0))  # x is far from zero


@alone
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(monkeypatch, name):
    op, shapes, options, walked = CASES[name]
    sizes = {"BLOCKS": (64,), "SHORT": 32, "WHOLE": 32, "WALKED": walked}
    for limit, size in sizes.items():
        monkeypatch.setattr(split_rows, limit, size)
    monkeypatch.setattr(split_rows, "most_walked", lambda *_: ROWS)
    monkeypatch.setattr(row_norm_forward, "NARROW", 32)
    monkeypatch.setattr(rms_norm_add, "FEW", 0)  # else a program has a whole row
    p = REGISTRY[op]
    operands = [draw(shape, k) for k, shape in enumerate(shapes)]
    assert p.fwd is not None and p.bwd is not None
    expected = p.fwd.reference(*operands, **options)
    [module] = [m for m in MODULES if hasattr(m, f"{op}_fwd")]

    def in_clusters_of(size, name, options, *operands):
        found, launches = in_a_cluster(
            monkeypatch,
            lambda *x: getattr(module, f"{op}_{name}")(*x, **options),
            *operands,
            kernel=split_rows,
        )
        assert [cluster for cluster, _ in launches] == [size]
        return found

    found = in_clusters_of(3, "fwd", options, *operands)
    check(found, expected, 1e-5 if op == "layer_norm" else 1e-6)
    results, residuals = expected[: len(p.results)], expected[len(p.results) :]
    dys = [draw(y.shape, 10 + k) for k, y in enumerate(results)]
    expected = p.bwd.reference(*operands, *residuals, *dys, **options)
    options = options | {"wanted": tuple(x is not None for x in operands)}
    found = in_clusters_of(2, "bwd", options, *operands, *residuals, *dys)
    check(found, expected, 1e-5)


def check(found, expected, limit):
    for y, e in zip(found, expected, strict=True):
        assert (y is None) == (e is None)
        if e is not None:
            assert jnp.linalg.norm(y - e) / jnp.linalg.norm(e) < limit


@starts_it
def test_in_a_process_of_its_own():
    check_in_its_own_process(__file__, len(CASES))
