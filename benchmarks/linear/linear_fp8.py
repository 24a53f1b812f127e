"""`linear` of 8-bit operands beside bfloat16, forward and with its gradients.

    python -m benchmarks linear_fp8 [--shape 16384x2048x5632] [--text]

Shapes are n x d x f. Milliseconds by the device's clock, cuBLAS for every product as in
a step of `jaxkern.train`, the operands of each call its own. Beside them the products
alone, of operands that are 8 bits wide already, and what stands around them: the
largest element, codes, and codes with their transpose. `fp8 calls` counts the products
of fp8 in the compiled text; "--text" prints its instructions.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks._time import JaxProgram, copy_rate, device_alone, seconds_in_turn
from jaxkern import linear
from jaxkern.primitives.linear.linear_fp8 import encoded
from jaxkern.primitives.linear.scaled_float8 import OPERANDS, codes_of, scale_of
from jaxkern.train.train_step import COMPILER_OPTIONS

FP8_CALL = "__cublas$lt$matmul$f8"
SETS = 4


def product(dtype: str | None) -> Callable:
    return lambda x, w, dy: linear(x, w, compute_dtype=dtype)


def product_and_gradients(dtype: str | None) -> Callable:
    def f(x, w, dy):
        y, pull = jax.vjp(lambda x, w: linear(x, w, compute_dtype=dtype), x, w)
        dx, dw = pull(dy)
        return y, dx, dw

    return f


def of_codes(x, w, dy):
    """The product of operands that are converted and not scaled."""
    narrow = [a.astype(jnp.float8_e4m3fn).astype(a.dtype) for a in (x, w)]
    return jax.lax.dot_general(*narrow, (((1,), (1,)), ((), ())))


def codes_alone(x, w, dy):
    scale = scale_of(x, OPERANDS)
    return codes_of(x, scale, OPERANDS), scale


CALLS: dict[str, Callable] = {
    "forward bf16": product(None),
    "forward fp8": product("float8_e4m3fn"),
    "both bf16": product_and_gradients(None),
    "both fp8": product_and_gradients("float8_e4m3fn"),
    "largest of x": lambda x, w, dy: scale_of(x, OPERANDS),
    "codes of x": codes_alone,
    "codes of x and their transpose": lambda x, w, dy: encoded(x[None], OPERANDS),
    "x and w to fp8, product": of_codes,
}


def operands(n: int, d: int, f: int) -> list[tuple[jax.Array, ...]]:
    keys = jax.random.split(jax.random.key(0), SETS)
    shapes = (n, d), (f, d), (n, f)

    @jax.jit
    def draw(key):
        each = zip(jax.random.split(key, 3), shapes, strict=True)
        return tuple(jax.random.normal(k, s, jnp.bfloat16) for k, s in each)

    return [draw(k) for k in keys]


def compiled(f: Callable, sets: list[tuple[jax.Array, ...]]) -> Any:
    def every(sets):
        return [f(*s) for s in sets]

    return jax.jit(every, compiler_options=COMPILER_OPTIONS).lower(sets).compile()


def entry_of(text: str) -> list[str]:
    """The instructions of the entry computation, without what only names them."""
    lines = text[text.index("\nENTRY") :].splitlines()
    return [line.split(", metadata=")[0].strip() for line in lines if " = " in line]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks linear_fp8", description=__doc__)
    parser.add_argument("--shape", default="16384x2048x5632")
    parser.add_argument("--text", action="store_true")
    options = parser.parse_args(arguments)
    if jax.default_backend() != "gpu":
        print(f"{parser.prog}: needs a GPU, found {jax.default_backend()}.")
        return 2
    for shape in options.shape.split(","):
        n, d, f = map(int, shape.split("x"))
        sets = operands(n, d, f)
        programs = {}
        for name, call in CALLS.items():
            made = compiled(call, sets)
            programs[name] = JaxProgram(made, sets)
            calls = made.as_text().count(f'custom_call_target="{FP8_CALL}"')
            print(f"{shape} {name}: fp8 calls {calls / SETS:g}", flush=True)
            if options.text and "fp8" in name:
                one = compiled(call, sets[:1])
                print("\n".join(entry_of(one.as_text())), flush=True)
        with device_alone():
            for program in programs.values():
                program.warm()
            seconds = seconds_in_turn(programs)
        for name, s in seconds.items():
            flops = 2.0 * n * d * f * (3 if "both" in name else 1)
            rate = f", {flops / s / 1e12:.0f} TFLOP/s" if name[-3:] != "ose" else ""
            print(f"{shape} {name}: {1e3 * s:.3f} ms{rate}", flush=True)
        print(f"a copy: {copy_rate() / 1e12:.2f} TB/s", flush=True)
    return 0
