"""Benchmarks without a GPU: they refuse in words, and their operands fit."""

import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from benchmarks import tune
from benchmarks._find import names
from benchmarks._gpu import Benchmark, Case
from benchmarks.kv_cache import qk_norm_rope_cache as cache_steps
from jaxkern import softmax

ANYWHERE = {"codebook_gather"}  # measures the machine, with a GPU or without
OF_OPERATORS = sorted(
    name
    for name, module in names().items()
    if module.count(".") == 2 and name not in ANYWHERE
)
CACHE_STEPS = (
    "qk_norm_rope_cache",
    "qk_norm_rope_paged_cache",
    "update_quantized_kv_cache",
)


def module_of(name):
    return importlib.import_module(names()[name])


@pytest.mark.parametrize("name", OF_OPERATORS)
def test_it_refuses_without_a_gpu(name, capsys):
    assert module_of(name).main([]) == 2
    assert re.search(r": needs a( CUDA)? GPU", capsys.readouterr().out)


@pytest.mark.parametrize("name", OF_OPERATORS)
def test_its_operands_fit_its_operator(name):
    """It runs on a GPU only: a shape that does not fit was seen there first."""
    module = module_of(name)
    found = getattr(module, "BENCHMARKS", None) or [getattr(module, "BENCHMARK", None)]
    if found == [None]:
        pytest.skip("it has no cases of operands")
    for benchmark in found:
        for case in (benchmark.cases[0], benchmark.cases[-1]):
            operands = jax.eval_shape(case.arrays, jax.random.key(0))
            assert jax.tree.leaves(jax.eval_shape(benchmark.f, *operands)), case.name


@pytest.mark.parametrize("name", CACHE_STEPS)
def test_every_column_of_a_cache_step_is_the_same_step(name):
    codec = cache_steps.CODECS["int8" if "quantized" in name else "bf16"]
    (query, layers, positions), fixed, heads = cache_steps.operands(2, 3, codec)
    step = (query, *heads[0], fixed, layers[0], positions)
    columns = [
        jax.tree.leaves(jax.jit(f)(*step)) for f, _ in module_of(name).BY.values()
    ]
    for column in columns:
        for x, y in zip(column, columns[0], strict=True):
            x, y = (np.asarray(a, np.float32) for a in (x, y))
            np.testing.assert_allclose(x, y, rtol=0.01, atol=0.01)
    written = [np.any(np.asarray(x, np.float32)) for x in columns[0]]
    assert all(written)


def test_tune_measures_both_passes_of_the_cases_asked_for(monkeypatch, capsys):
    calls = []

    def recorded(f, *args, path, rotate):
        calls.append((path, rotate > 1, [x.shape for x in args]))
        return jax.tree.map(lambda v: v.shape, jax.eval_shape(f, *args))

    def rows(n):
        def arrays(key):
            return (jax.random.normal(key, (n, 8)),)

        return Case(f"{n} rows", arrays, (1e3, 1e3))

    module = SimpleNamespace(BENCHMARK=Benchmark("s", softmax, [rows(2), rows(3)]))
    monkeypatch.setattr(tune, "autotune", recorded)
    monkeypatch.setattr(tune, "benchmark", lambda name: module)
    assert tune.main(["softmax", "--shapes", "3 rows", "--table", "t.json"]) == 0
    table = Path("t.json")
    assert calls == [(table, True, [(3, 8)]), (table, True, [(3, 8), (3, 8)])]
    assert capsys.readouterr().out == "(3, 8)\n((3, 8), ((3, 8),))\n"
    assert tune.main(["softmax", "--shapes", "4 rows"]) == 2
    assert "no such case, but 2 rows, 3 rows." in capsys.readouterr().out
