"""Kernels compiled by other processes: which are asked for, and that they are found."""

import sys
from types import SimpleNamespace

import jax
import pytest

from jaxkern.gpu import launch as launches
from jaxkern.gpu import launch_chain
from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.compile_ahead import Compilers, is_on_disk
from jaxkern.gpu.compiling_process import compiling_process
from jaxkern.gpu.device import compiling_for
from jaxkern.gpu.launch import Launch, compiled
from jaxkern.lowering.chained import chained
from jaxkern.lowering.launches_ahead import compiled_ahead, launches_of
from jaxkern.models.cached_steps import decode, prefill
from jaxkern.triton.index.argmax import best_part_kernel
from tests.lowering.test_chained import llama, spec

pytestmark = pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)
INT = "*i32"


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def small(n: int) -> Launch:
    """A kernel that no other test has compiled."""
    constants = {"AHEAD": 0, "PARTS": n, "N": n}
    return Launch(
        best_part_kernel, (INT, INT, INT), tuple(constants.items()), (1,), 1, 3
    )


@pytest.mark.parametrize("step", ["prefill", "decode"])
def test_every_kernel_that_lowering_compiles_is_known_before(step, monkeypatch):
    binary = SimpleNamespace(
        asm={"ptx": "-", "cubin": b"-", "ttir": "-"},
        metadata=SimpleNamespace(name="kernel", num_warps=4, shared=0),
    )
    asked = set()

    def note(launch, capability):
        asked.add(launch._replace(grid=()))
        return binary

    for module in (launches, launch_chain, bridge):
        monkeypatch.setattr(module, "compiled", note)
    config, weights, cache = llama()
    ids = spec(1, dtype="int32")

    def run(weights, ids, cache):
        if step == "decode":
            f = chained(lambda *given: decode(config, *given))
            return f(weights, ids, cache)
        return prefill(config, weights, ids[:, None].repeat(32, 1), ids, cache)

    with compiling_for(90):
        traced = jax.jit(run).trace(weights, ids, cache)
        known = {one._replace(grid=()) for one in launches_of(traced.jaxpr)}
        traced.lower(lowering_platforms=("cuda",))
    assert asked and known == asked


@pytest.mark.usefixtures("empty_cache")
def test_another_process_compiles_it():
    with compiling_process(1) as process, Compilers(process) as compilers:
        compilers.ask(small(4), 90)
        compilers.ask(small(4)._replace(grid=(7,)), 90)
        assert len(compilers.asked) == 1 and not is_on_disk(small(4), 90)
        [at_work] = launches.elsewhere.values()
        assert at_work.exception() is None and is_on_disk(small(4), 90)
        found = compiled(small(4), 90)
    assert found.metadata.name == "best_part_kernel" and not launches.elsewhere
    with compiling_process(1) as process, Compilers(process) as compilers:
        compilers.ask(small(4), 90)
        assert not compilers.asked


@pytest.mark.usefixtures("empty_cache")
def test_what_no_other_process_can_do_is_done_here(monkeypatch):
    @bridge.jit
    def nowhere_kernel():
        return

    monkeypatch.setattr(sys, "executable", "/bin/false")
    with compiling_process(1) as process, Compilers(process) as compilers:
        compilers.ask(small(8), 90)
        assert "best_part_kernel" in compiled(small(8), 90).asm["ptx"]
        compilers.ask(Launch(nowhere_kernel, (), (), (1,), 1, 3), 90)
        assert len(compilers.asked) <= 1


def test_without_a_gpu_nothing_is_asked_for():
    with compiled_ahead() as ask:
        ask(None)
        assert not launches.elsewhere
