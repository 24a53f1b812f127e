"""`benchmark`: what is counted, what is timed, what is refused."""

import fcntl
import time

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxkern import explain, softmax
from jaxkern.testing import Measurement, benchmark
from jaxkern.testing.benchmark import in_units
from jaxkern.testing.device_time import device_alone

FOUND = Measurement(2e-3, 0.1, 1e6, 4e9, copy_rate=1e9, product_rate=1e12, device="it")


def test_bytes_and_flops_are_those_of_the_call():
    x, w = jnp.ones((64, 128)), jnp.ones((128, 32), jnp.bfloat16)
    found = benchmark(lambda x, w: {"y": x @ w.astype(x.dtype)}, x, w)
    assert found.bytes == 4 * 64 * 128 + 2 * 128 * 32 + 4 * 64 * 32
    assert found.flops == pytest.approx(2 * 64 * 128 * 32, rel=0.1)
    given = benchmark(softmax, x, bytes=5.0, flops=7.0)
    assert (given.bytes, given.flops) == (5.0, 7.0)


def test_what_a_kernel_does_is_not_known_to_xla():
    found = benchmark(softmax, jnp.ones((8, 128)))
    assert found.flops is None or found.flops > 0


def test_the_time_is_that_of_a_call():
    """Of one that takes the host at least 5 ms, and of copies in turn."""

    def slow(x):
        def wait(x):
            time.sleep(5e-3)
            return x

        return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    for rotate in (1, 3):
        found = benchmark(slow, jnp.ones(4), rotate=rotate)
        assert 5e-3 <= found.seconds < 1 and found.spread >= 0


def test_the_share_is_of_the_larger_limit():
    assert FOUND.least_seconds == pytest.approx(4e-3)
    assert FOUND.share == pytest.approx(2)
    text = str(FOUND)
    assert text == (
        "2 ms +- 5 %, 0.5 GB/s, 2e+03 GFLOP/s, 200 % of the limit by flops (it)"
    )
    assert [in_units(s) for s in (2.0, 3e-5, 4e-9)] == ["2 s", "30 us", "4 ns"]


def test_what_is_refused():
    with pytest.raises(TypeError, match="at least one argument must be"):
        benchmark(lambda: jnp.ones(2))
    with pytest.raises(TypeError, match=r"must be a jax\.Array, got float"):
        benchmark(jnp.sin, 1.0)
    with pytest.raises(ValueError, match="`rotate` must be at least 1, got 0"):
        benchmark(jnp.sin, jnp.ones(2), rotate=0)
    with pytest.raises(TypeError, match="`f` must be a function, got float"):
        benchmark(1.0, jnp.ones(2))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="needs arrays, got ShapeDtypeStruct"):
        benchmark(jnp.add, jnp.ones(2), jax.ShapeDtypeStruct((2,), jnp.float32))
    with pytest.raises(TypeError, match=r"jax\.jit does not take `f`: Attempted bool"):
        benchmark(lambda x: x if x.sum() > 0 else -x, jnp.ones(2))
    many = NamedSharding(jax.make_mesh((2,), ("x",)), PartitionSpec("x"))
    with pytest.raises(ValueError, match="one device, the arguments lie on 2"):
        benchmark(jnp.sin, jax.device_put(jnp.ones(2), many))


def test_what_is_no_array_reaches_f_as_it_is():
    found = benchmark(lambda x, up, n: x + n if up else x, jnp.ones(4), True, 2)
    assert found.bytes == 32


def test_kernels_are_said_if_asked():
    x = jnp.ones((8, 128))
    found = benchmark(softmax, x, explain=True)
    assert found.kernels is not None and found.kernels == explain(softmax, x)
    first, *lines = str(found).splitlines()
    assert "of the limit by" in first and lines == str(found.kernels).splitlines()
    assert benchmark(softmax, x).kernels is None


def test_a_process_that_has_the_device_may_ask_again(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with device_alone():
        with device_alone():
            pass
        with next(tmp_path.iterdir()).open("w") as other, pytest.raises(OSError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with next(tmp_path.iterdir()).open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
