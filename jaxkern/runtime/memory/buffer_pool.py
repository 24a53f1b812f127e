"""`BufferPool`: zeroed device arrays that are used again."""

import collections
import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.runtime.memory.memory_limit import check_request, default_device


class BufferPool:
    """Device arrays by shape, dtype and sharding, for caches that come and go.

    `release` takes the memory away from the array: it is donated to zeros, written in
    place, and whoever still holds the array gets JAX's error "Array has been deleted".
    What was acquired and then updated in place (by donation) is another array in the
    same memory: release that one. Safe under threads.

        cache = pool.acquire(jax.ShapeDtypeStruct((2, 4096, 8, 128), jnp.bfloat16))
        ...
        pool.release(cache)

    Example:
      >>> from jaxkern import runtime
      >>> pool = runtime.BufferPool()
      >>> cache = pool.acquire(jax.ShapeDtypeStruct((2, 8), jnp.bfloat16))
      >>> pool.release(cache)
      >>> cache.is_deleted()
      True
    """

    def __init__(self) -> None:
        self._free: dict[tuple, list[jax.Array]] = collections.defaultdict(list)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Arrays that wait for use."""
        with self._lock:
            return sum(map(len, self._free.values()))

    def acquire(self, spec: jax.ShapeDtypeStruct) -> jax.Array:
        """A zeroed array, of the pool or new.

        Args:
          spec: its shape, dtype and sharding; without one, on the default device.

        Raises:
          MemoryLimitExceeded: a new one does not fit into the `memory_limit` in force.
        """
        sharding = spec.sharding or jax.sharding.SingleDeviceSharding(default_device())
        key = (tuple(spec.shape), jnp.dtype(spec.dtype), sharding)
        with self._lock:
            if self._free[key]:
                return self._free[key].pop()
        shard = sharding.shard_shape(key[0])
        size = jax.ShapeDtypeStruct(shard, key[1]).size * key[1].itemsize
        check_request({"buffer": size}, sharding.device_set, "BufferPool.acquire")
        return jnp.zeros(key[0], key[1], device=sharding)

    def release(self, array: jax.Array) -> None:
        """Zeroes the array's memory and keeps it; the array itself is gone.

        Raises:
          ValueError: the array was released or donated before.
        """
        if array.is_deleted():
            raise ValueError(
                f"release: the {array.dtype} array {array.shape} has been released or "
                "donated already. Release what the last update returned."
            )
        key = (array.shape, array.dtype, array.sharding)
        zeroed = zeros_in_place(array.sharding)(array)
        if not array.is_deleted():  # NumPy looks at it, or the platform cannot donate
            array.delete()
        with self._lock:
            self._free[key].append(zeroed)

    def clear(self) -> None:
        """Gives all waiting arrays back to the device."""
        with self._lock:
            self._free.clear()


@functools.lru_cache(maxsize=256)
def zeros_in_place(sharding: Any) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(
        jnp.zeros_like, donate_argnums=0, keep_unused=True, out_shardings=sharding
    )
