"""memory_limit: refused before anything runs, exact at the edge, free outside."""

import pickle
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkern.runtime import (
    MemoryLimitExceeded,
    allocated_bytes,
    limited,
    memory_limit,
    stats,
)
from jaxkern.runtime.memory.memory_limit import current_limit
from jaxkern.runtime.trace import events


def table(x):
    return x[:, None] * x[None, :]  # n floats in, n * n out


@pytest.mark.smoke
def test_the_limit_is_exact_and_nothing_runs_beyond_it(quiet_memory):
    runs = []

    def seen(x):
        jax.debug.callback(lambda: runs.append(0))
        return table(x)

    f, x = limited(seen), jnp.arange(64.0)
    need = 64 * 64 * 4
    with memory_limit(None):
        f(x)
    jax.effects_barrier()
    assert runs == [0]
    with memory_limit(1):  # learns what the program plans, callback included
        with pytest.raises(MemoryLimitExceeded) as caught:
            f(x)
    requested = caught.value.requested
    assert requested >= need and caught.value.breakdown["outputs"] == need
    used = allocated_bytes()
    assert caught.value.allocated == used and caught.value.limit == 1
    with memory_limit(used + requested - 1):
        with pytest.raises(MemoryLimitExceeded, match=f"seen: needs {requested:,} b"):
            f(x)
    jax.effects_barrier()
    assert runs == [0]
    with memory_limit(used + requested):
        np.testing.assert_array_equal(f(x), np.outer(x, x))
    jax.effects_barrier()
    assert runs == [0, 0]
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and again.requested == requested
    assert isinstance(again, MemoryError)


def test_a_donated_argument_counts_once_and_survives_a_refusal(quiet_memory):
    f = limited(jax.jit(lambda x: x + 1, donate_argnums=0))
    x = jnp.zeros(1000)
    with memory_limit(allocated_bytes() - 1), pytest.raises(MemoryLimitExceeded) as e:
        f(x)
    assert not x.is_deleted()
    assert e.value.breakdown["donated"] == -4000 and e.value.requested < 4000
    with memory_limit(allocated_bytes() + e.value.requested):
        assert f(x)[0] == 1
    assert x.is_deleted()


def test_arguments_that_are_not_on_the_device_count():
    f, host = limited(lambda x: x[0] + 0), np.zeros(1000, np.float32)
    for x, away in ((host, 4000), (jax.device_put(host, jax.devices()[1]), 0)):
        with memory_limit(0), pytest.raises(MemoryLimitExceeded) as e:
            f(x)
        assert e.value.breakdown["arguments"] == away


def test_an_executable_is_asked_too(quiet_memory):
    x = jnp.arange(64.0)
    compiled = jax.jit(table).lower(x).compile()
    f = limited(compiled)
    used = allocated_bytes()
    with memory_limit(used + 64 * 64 * 4 - 1), pytest.raises(MemoryLimitExceeded):
        f(x)
    with memory_limit(used + 64 * 64 * 4):
        np.testing.assert_array_equal(f(x), np.outer(x, x))


def test_bytes_of_one_device_of_a_mesh():
    mesh = jax.make_mesh((8,), ("m",))
    x = jax.device_put(jnp.zeros((64, 10)), NamedSharding(mesh, P("m")))
    with memory_limit(0), pytest.raises(MemoryLimitExceeded) as e:
        limited(lambda x: x * 2)(x)
    assert e.value.breakdown["outputs"] == 64 * 10 * 4 / 8


def test_live_arrays_count_a_buffer_once(quiet_memory):
    before = allocated_bytes()
    x = jnp.zeros(1000)
    held = x.addressable_shards[0].data, x.addressable_data(0)
    assert allocated_bytes() - before == 4000
    assert allocated_bytes(jax.devices()[1]) < 4000
    del x, held
    assert allocated_bytes() == before


@pytest.mark.smoke
def test_a_signature_is_compiled_once_and_outside_a_block_nothing_is_asked():
    compiled = []
    f, x = limited(table), jnp.arange(7.0)
    with events.subscribe(compiled.append, kinds=("compile",)):
        for _ in range(3):
            with memory_limit(10**12):
                f(x)
            f(x)
    assert [e.name for e in compiled] == ["jit(table)"] and compiled[0].seconds > 0
    same = str(jax.make_jaxpr(f)(x)), str(jax.make_jaxpr(jax.jit(table))(x))
    assert same[0] == same[1]
    with memory_limit(0):  # part of an outer program, which is not asked
        np.testing.assert_array_equal(jax.jit(f)(x), f.__wrapped__(x))
        jax.grad(lambda x: f(x).sum())(x)


def test_a_refusal_is_counted_and_told():
    told, f = [], limited(table)
    before = stats().budget_refusals.get("table", 0)
    with events.subscribe(told.append, kinds=("budget",)), memory_limit(0):
        with pytest.raises(MemoryLimitExceeded) as e:
            f(jnp.zeros(8))
    assert [(x.kind, x.name, x.bytes) for x in told] == [
        ("budget", "table", e.value.requested)
    ]
    assert stats().budget_refusals["table"] == before + 1


def test_a_block_is_of_its_thread_and_blocks_nest():
    seen = []
    with memory_limit(7):
        with memory_limit(None):
            assert current_limit() is None
        thread = threading.Thread(target=lambda: seen.append(current_limit()))
        thread.start()
        thread.join()
        assert current_limit() == 7 and seen == [None]
    assert current_limit() is None
    with pytest.raises(ValueError, match="num_bytes"), memory_limit(-1):
        pass


def test_threads_share_one_function():
    f, xs = limited(table), [jnp.arange(float(n)) for n in (3, 4, 5)]
    errors = []

    def work():
        try:
            for x in xs * 5:
                with memory_limit(10**12):
                    np.testing.assert_array_equal(f(x), np.outer(x, x))
                with memory_limit(0), pytest.raises(MemoryLimitExceeded):
                    f(x)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_nan_is_no_limit():
    """Nothing compares with it: the test of negative limits could not see it."""
    with pytest.raises(ValueError, match="must be >= 0, got nan"):
        with memory_limit(float("nan")):  # pyright: ignore
            pass
