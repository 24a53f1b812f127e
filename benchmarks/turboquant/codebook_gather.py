"""How fast codes become numbers: a codebook look-up against reading float16 numbers.

Both read the same number of bytes and write float32. A cache in codes pays off in time
where the look-up keeps up with at least half the bytes per second of the plain read.
"""

import argparse
import time

import jax
import jax.numpy as jnp

from jaxkern import QuantizedVectors, TurboQuantCodec, dequantize_vectors


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks codebook_gather")
    parser.add_argument("--mbytes", type=int, default=64, help="bytes read, in 2**20")
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args(arguments)
    num_bytes = options.mbytes * 2**20
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")

    numbers = jnp.ones((num_bytes // 512, 256), jnp.float16)
    plain = measure(lambda x: x.astype(jnp.float32), numbers, options.repeats)
    print(f"float16 read     {num_bytes / plain / 1e9:8.1f} GB/s")
    for bits in (4, 8):
        vectors = num_bytes * 8 // bits // 256
        cache = QuantizedVectors.zeros((vectors, 256), TurboQuantCodec(bits))
        seconds = measure(
            lambda x: dequantize_vectors(x, unrotate=False), cache, options.repeats
        )
        share = plain / seconds
        print(
            f"{bits}-bit codebook   {num_bytes / seconds / 1e9:8.1f} GB/s, "
            f"{share:.0%} of the float16 read"
        )
    return 0


def measure(f, x, repeats: int) -> float:
    """Seconds of the fastest of several calls."""
    f = jax.jit(f)
    jax.block_until_ready(f(x))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(f(x))
        seconds.append(time.perf_counter() - start)
    return min(seconds)
