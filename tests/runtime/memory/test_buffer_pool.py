"""BufferPool: the same memory again, zeroed; the old name is dead."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkern.runtime import (
    BufferPool,
    MemoryLimitExceeded,
    allocated_bytes,
    memory_limit,
)

SPEC = jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)


@pytest.mark.smoke
def test_memory_comes_back_zeroed_and_use_after_release_is_an_error():
    pool = BufferPool()
    x = pool.acquire(SPEC)
    assert x.shape == (4, 8) and x.dtype == jnp.bfloat16 and not x.any()
    old = x
    x = jax.jit(lambda c: c.at[0].set(jnp.nan), donate_argnums=0)(x)  # in place
    address = x.unsafe_buffer_pointer()
    pool.release(x)
    assert len(pool) == 1
    for gone in (x, old):
        with pytest.raises(RuntimeError, match="Array has been deleted"):
            gone + 1
        with pytest.raises(ValueError, match=r"release: .* already"):
            pool.release(gone)
    y = pool.acquire(SPEC)
    assert y.unsafe_buffer_pointer() == address and len(pool) == 0
    np.testing.assert_array_equal(np.asarray(y, np.float32), np.zeros((4, 8)))


def test_the_key_is_shape_dtype_and_sharding():
    pool, mesh = BufferPool(), jax.make_mesh((2,), ("m",))
    cut = NamedSharding(mesh, P("m"))
    specs = [
        SPEC,
        jax.ShapeDtypeStruct((8, 4), jnp.bfloat16),
        jax.ShapeDtypeStruct((4, 8), jnp.float16),
        jax.ShapeDtypeStruct((4, 8), jnp.bfloat16, sharding=cut),
    ]
    arrays = [pool.acquire(s) for s in specs]
    assert arrays[3].sharding == cut
    places = [x.addressable_shards[-1].data.unsafe_buffer_pointer() for x in arrays]
    for x in arrays:
        pool.release(x)
    assert len(pool) == 4
    for spec, place in zip(reversed(specs), reversed(places), strict=True):
        again = pool.acquire(spec)
        assert again.addressable_shards[-1].data.unsafe_buffer_pointer() == place
        pool.release(again)
    pool.clear()
    assert len(pool) == 0


def test_only_new_buffers_ask_the_limit(quiet_memory):
    pool = BufferPool()
    pool.release(pool.acquire(SPEC))
    with memory_limit(allocated_bytes()):
        x = pool.acquire(SPEC)
        with pytest.raises(MemoryLimitExceeded, match=r"BufferPool.acquire: needs 64 "):
            pool.acquire(SPEC)
    with memory_limit(allocated_bytes() + 64):
        pool.acquire(SPEC)
    del x


def test_threads_never_share_a_buffer():
    pool, errors = BufferPool(), []

    def work(mark):
        try:
            for _ in range(20):
                x = pool.acquire(SPEC) + mark
                assert (np.asarray(x, np.float32) == mark).all()
                pool.release(x)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in (1, 2, 3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert errors == [] and 1 <= len(pool) <= 60
