"""Benchmarks without a GPU: they refuse in words, and their operands fit."""

import importlib
import re

import jax
import numpy as np
import pytest

from benchmarks._find import names
from benchmarks.kv_cache import qk_norm_rope_cache as cache_steps

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
