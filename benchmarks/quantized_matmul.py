"""Products with packed rows: one launch for few activations, decoded weights for many.

    python -m benchmarks quantized_matmul [--qtype Q4_K] [--rows 1] [--shape 8192x4096]

Microseconds by the device's clock, the operands of each call its own; beside them XLA
with weights of bfloat16, and what the bytes take at the rate of a copy.
"""

import argparse

import jax
import jax.numpy as jnp

from benchmarks._time import JaxProgram, copy_rate, device_alone, seconds_in_turn
from jaxkern import InterleavedTensor, quantized_matmul
from jaxkern.primitives.quant.gguf_blocks import BLOCK_FORMATS

SHAPES = "28672x8192,14336x4096,4096x4096,4096x14336"
ROTATED = 2.5e8  # bytes: more than the L2 cache holds


def packed(qtype: str, f: int, d: int) -> list[InterleavedTensor]:
    """Random bytes, as many weights as are rotated."""
    form = BLOCK_FORMATS[qtype]
    tile_bytes = 16 * d // form.elements * form.bytes
    count = max(2, int(ROTATED // (f // 16 * tile_bytes)) + 1)
    shape = (f // 16, tile_bytes)
    keys = jax.random.split(jax.random.key(0), count)
    return [InterleavedTensor(jax.random.bits(k, shape, "uint8"), qtype) for k in keys]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks quantized_matmul", description=__doc__
    )
    parser.add_argument("--qtype", default="Q4_K,Q6_K,Q8_0")
    parser.add_argument("--rows", default="1,16,64,4096")
    parser.add_argument("--shape", default=SHAPES)
    options = parser.parse_args(arguments)
    if jax.default_backend() != "gpu":
        print(f"{parser.prog}: needs a GPU, found {jax.default_backend()}.")
        return 2
    for shape in options.shape.split(","):
        f, d = map(int, shape.split("x"))
        for qtype in options.qtype.split(","):
            packs = packed(qtype, f, d)
            count = max(2, int(ROTATED // (2 * f * d)) + 1)
            keys = jax.random.split(jax.random.key(1), count)
            plain = [jax.random.normal(k, (f, d), jnp.bfloat16) for k in keys]
            for rows in map(int, options.rows.split(",")):
                x = jax.random.normal(jax.random.key(2), (rows, d), jnp.bfloat16)
                with device_alone():
                    programs = {
                        "ours": JaxProgram.of(
                            quantized_matmul, [(x, w) for w in packs]
                        ),
                        "XLA": JaxProgram.of(jnp.inner, [(x, w) for w in plain]),
                    }
                    for program in programs.values():
                        program.warm()
                    seconds = seconds_in_turn(programs)
                ours, xla = (1e6 * seconds[name] for name in ("ours", "XLA"))
                limit = 1e6 * packs[0].nbytes / copy_rate()
                print(
                    f"{qtype} {shape} M={rows}: {ours:.1f} us, bfloat16 by XLA "
                    f"{xla:.1f}, bytes {limit:.1f}",
                    flush=True,
                )
    return 0
