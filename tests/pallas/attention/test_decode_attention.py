"""The Hopper decode kernel on a machine without a GPU: the interpreter, lowering."""

import functools
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxkern import attention, backend, explain
from jaxkern.gpu.device import compiling_for
from jaxkern.pallas.attention.decode import attention as hopper
from tests.pallas.interpreted_decode import CASES

DEFAULT = ("together", "divided")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in DEFAULT else [pytest.mark.full]) for n in CASES],
)
def test_in_the_interpreter(name):
    """Twelve threads wait for each other, so the runtime needs as many."""
    subprocess.run(
        [sys.executable, "-m", "tests.pallas.interpreted_decode", name],
        env=os.environ | {"NPROC": "32", "JAX_PLATFORMS": "cpu"},
        check=True,
        timeout=300,
    )


def zeros(b, t, s, k, g, h, dtype=jnp.bfloat16):
    return (
        jnp.zeros((b, t, k * g, h), dtype),
        jnp.zeros((b, s, k, h), dtype),
        jnp.zeros((b, s, k, h), dtype),
    )


@pytest.mark.parametrize(
    "shape, options, reason",
    [
        ((32, 2, 256, 8, 4, 128), {}, "2 queries, not one"),
        ((32, 1, 256, 8, 4, 96), {}, "head dims 96 and 96"),
        ((32, 1, 256, 8, 3, 128), {}, "no whole groups of 8"),
        ((32, 1, 100, 8, 4, 128), {}, "100 keys are fewer than 128"),
        ((32, 1, 260, 8, 4, 128), {}, "or no multiple of 8"),
        ((200, 1, 256, 8, 4, 128), {}, "200 sequences, more than 128"),
        ((32, 1, 256, 8, 4, 128, jnp.float32), {}, "`query` is float32"),
        ((32, 1, 256, 8, 4, 128), {"window": 9}, "`window` and `softcap` are not"),
        ((32, 1, 256, 8, 4, 128), {"sinks": jnp.zeros(32)}, "`sinks` is not"),
        ((4, 1, 256, 8, 4, 128), {}, "32 heads of keys keep 48% of the device busy"),
        (
            (16, 1, 256, 8, 4, 128),
            {"kv_lengths": jnp.arange(16)},
            "128 heads of keys of different lengths are too few to balance",
        ),
        ((9, 1, 256, 8, 4, 128), {}, "72 heads of keys keep 55% of the device busy"),
    ],
)
def test_refusals_in_words(shape, options, reason):
    f = functools.partial(attention, **options)
    with compiling_for(90), backend("auto"):
        text = str(explain(f, *zeros(*shape), platform="cuda"))
    assert reason in text


def test_older_gpus_are_left_to_triton():
    text = str(explain(attention, *zeros(32, 1, 256, 8, 4, 128), platform="cuda"))
    assert "not 90 (Hopper)" in text


@pytest.mark.parametrize(
    "b, h, g", [(32, 128, 4), (8, 128, 8), (64, 64, 8), (32, 256, 2)]
)
def test_it_lowers_for_hopper(b, h, g):
    arrays = (*zeros(b, 1, 512, 8, g, h), jnp.zeros(b, jnp.int32))

    def f(query, key, value, lengths):
        return [
            attention(query, key, value, kv_lengths=n, return_lse=True)
            for n in (None, lengths)
        ]

    with compiling_for(90), backend("mosaic_gpu", strict=True):
        rows = explain(f, *arrays, platform="cuda").rows
        for row, lengths in zip(rows, (False, True), strict=True):
            launch: Any
            [launch] = row.launches
            c = hopper.plan(b, 512, 8, g, h, 1.0, lengths)
            assert launch.grid == (c.clusters,)
            assert launch.cluster == (() if c.cluster == 1 else (c.cluster,))


def test_a_vmap_of_sequences_is_one_launch():
    stacked = [jnp.stack([x] * 4) for x in zeros(8, 1, 512, 8, 4, 128)]
    with compiling_for(90), backend("mosaic_gpu", strict=True):
        [row] = explain(jax.vmap(attention), *stacked, platform="cuda").rows
        assert len(row.launches) == 1


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("b", [8, 16, 24, 32, 33, 128])
def test_programs_take_all_heads(b, lengths, monkeypatch):
    monkeypatch.setattr(hopper, "num_sms", lambda: 132)
    c = hopper.plan(b, 4096, 8, 4, 128, 1.0, lengths)
    programs = c.clusters * (c.cluster if c.alone else 1)
    assert c.workers <= programs and c.clusters * c.cluster <= 132
    assert hopper.busy(c.heads, 132 if c.alone else 66) >= hopper.BUSY
