"""What a dump says: the same module and buffers; launches as XLA lists them."""

import re

import jax
import jax.numpy as jnp
import pytest

from jaxkern import runtime
from jaxkern.runtime.plan.compiler_dump import dump_compilation, read_thunks
from jaxkern.runtime.plan.memory_map import memory_map

X = jax.ShapeDtypeStruct((16, 16), jnp.float32)
CAPTURED = """\
000: kCommandBuffer\t
  001: kKernel        \tloop_add_fusion (device kernel)
  002: kGemm          \tcustom-call.1
  003: kSequential    \t
    004: kKernel      \tnested
005: kCopy         \tcopy.1
006: kWhile        \tcondition:
  007: kKernel     \tcompare
body:
  008: kCommandBuffer\t
    009: kCustomCall\ttriton
    010: kCustomCall\ttriton
  011: kKernel     \talone
"""


@pytest.mark.smoke
def test_launches_inside_and_outside():
    module = runtime.compile(jnp.sin, X).module
    report = read_thunks(CAPTURED, module)
    assert report.sizes == (3, 2) and report.inside == 5
    assert report.outside == {"Copy": 1, "Kernel": 2}
    assert report.share == 5 / 8
    assert str(report) == (
        "2 command buffers of 3, 2 launches (62.5% of all); alone: 1 Copy, 2 Kernel"
    )
    # XLA before it numbered them
    numberless = re.sub(r"\d+: ", "", CAPTURED)
    assert read_thunks(numberless, module).sizes == (3, 2)


def test_no_list_says_so():
    module = runtime.compile(jnp.sin, X).module
    report = read_thunks("", module)
    assert not report.sizes and "no list of its launches" in str(report)
    assert report.share == 0
    alone = read_thunks("000: kKernel\tsine\n", module)
    assert "fewer than XLA's smallest graph" in str(alone)


@pytest.mark.smoke
def test_a_dump_has_the_buffers_that_the_executable_reports():
    """On a CPU both exist; on a GPU there is only the dump."""
    plan = runtime.compile(lambda x: jnp.sort(jnp.tanh(x @ x) @ x), X)
    dump = dump_compilation(plan.stage.lowered, {})
    stats = plan.compiled.memory_analysis()
    again = memory_map(stats, dump.module, dump.buffer_assignment, None)
    assert again.arena == plan.memory().arena and again.arena
    assert again.order == plan.memory().order
    nothing = memory_map(stats, plan.module, b"", "XLA shows no places here.")
    assert nothing.arena == () and "no places" in str(nothing)


def test_a_dump_does_not_come_from_the_persistent_cache(tmp_path):
    plan = runtime.compile(lambda x: jnp.sort(x @ x), X)
    names = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in names}
    try:
        for name, value in names.items():
            jax.config.update(name, value)
        for _ in range(2):
            assert dump_compilation(plan.stage.lowered, {}).buffer_assignment
        assert jax.config.jax_enable_compilation_cache
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
