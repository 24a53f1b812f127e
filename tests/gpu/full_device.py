"""Run as a process of its own whose share of the GPU is filled to the brim.

XLA_PYTHON_CLIENT_MEM_FRACTION=0.01 XLA_PYTHON_CLIENT_PREALLOCATE=true \\
    python -m tests.gpu.full_device
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern.runtime import stats, with_oom_fallback
from jaxkern.runtime.trace import events

FREE = 256 << 20  # bytes that stay free
ROWS, COLUMNS = 1 << 17, 1 << 10  # sorted: 512 MB of float32


def medians(x, y):
    """Of each row of an outer sum: little in, little out, much between."""
    rows = jnp.sort(x[:, None] + jnp.sin(x[:, None] * y[None, :]), axis=-1)
    return rows[:, COLUMNS // 2]


def operands():
    rng = np.random.default_rng(0)
    return (
        jnp.asarray(rng.uniform(1, 2, ROWS), jnp.float32),
        jnp.asarray(rng.standard_normal(COLUMNS), jnp.float32),
    )


def truth(x, y, rows):
    x, y = np.float64(x)[rows, None], np.float64(y)[None]
    return np.sort(x + np.sin(x * y), axis=-1)[:, COLUMNS // 2]


def fill() -> list:
    """Takes all memory that this process may have but for about FREE bytes."""
    device = jax.devices()[0]
    jnp.zeros(()).block_until_ready()
    memory = device.memory_stats()
    left = memory["bytes_limit"] - memory["bytes_in_use"] - FREE
    assert 0 < left < 8 << 30, f"a small share of the GPU was asked for, got {memory}"
    ballast, piece = [], left
    while left > 0 and piece > 1 << 20:
        try:
            size = min(piece, left)
            ballast.append(jnp.zeros(size, jnp.uint8).block_until_ready())
            left -= size
        except jax.errors.JaxRuntimeError:
            piece //= 2  # where one piece does not fit
    return ballast


def falls_back_to_the_host(x, y):
    told = []
    try:
        jax.jit(medians)(x, y).block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        assert str(error).startswith("RESOURCE_EXHAUSTED"), error
    else:
        raise AssertionError("the device was not full")
    f = with_oom_fallback(jax.jit(medians, donate_argnums=0), name="on_host")
    with events.subscribe(told.append, kinds=("fallback",)):
        out = f(x, y)
    assert out.devices() == x.devices() and not x.is_deleted()
    assert stats().oom_fallbacks["on_host", "RESOURCE_EXHAUSTED"] == 1
    assert "ran to cpu after: RESOURCE_EXHAUSTED" in told[0].reason
    rows = slice(0, 64)
    np.testing.assert_allclose(out[rows], truth(x, y, rows), rtol=1e-5)


def works_in_parts(x, y):
    f = with_oom_fallback(
        medians, to=None, then=("chunk",), axis=(0, None), name="in_parts"
    )
    out = f(x, y)
    assert out.devices() == x.devices() and out.shape == (ROWS,)
    assert stats().oom_fallbacks["in_parts", "RESOURCE_EXHAUSTED"] == 1
    for rows in (slice(0, 16), slice(ROWS // 2 - 8, ROWS // 2 + 8), slice(-16, None)):
        np.testing.assert_allclose(out[rows], truth(x, y, rows), rtol=1e-5)


if __name__ == "__main__":
    inputs, taken = operands(), fill()
    falls_back_to_the_host(*inputs)
    works_in_parts(*inputs)
    print("both ways on a full device")
