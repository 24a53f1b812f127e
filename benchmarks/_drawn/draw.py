"""A draw: one call of an operator, of sizes, dtypes and options taken at random."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

STEPS = (1, 1, 8, 64, 128)  # of which a drawn size is a multiple
DTYPES = ("bfloat16", "bfloat16", "bfloat16", "float16", "float32")
EPSILON = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3}  # of a result
WIDTHS = (576, 700, 2880, 4096, 5000, 7168, 50257)


@dataclasses.dataclass(frozen=True)
class Draw:
    """One call.

    Attributes:
      title: shapes, dtype and options in words.
      arrays: draws the operands from a key.
      f: the operator on these operands.
      floats: positions of the operands to differentiate in, where that is to be done.
      peers: `{name: f}`, beside XLA's compilation of the reference.
      reference: whether XLA is to compile it: not where that takes minutes.
      slack: roundings of the dtype by which a result may be off.
      differing: the share of whole numbers that may differ: of those that depend on
        rounded sums.
      check: in the place of the comparison with float64: raises AssertionError for the
        operands and results.
    """

    title: str
    arrays: Callable[[jax.Array], tuple]
    f: Callable
    floats: tuple[int, ...] = ()
    peers: Mapping[str, Callable] = dataclasses.field(default_factory=dict)
    reference: bool = True
    slack: float = 2.0
    differing: float = 0.0
    check: Callable[[tuple, Any], None] | None = None


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a draw takes its numbers; an operand has about `elements` at most."""

    rng: np.random.Generator
    elements: int

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def one_of[T](self, choices: Sequence[T]) -> T:
        return choices[int(self.rng.integers(len(choices)))]

    def size(self, low: int, high: float, known: Sequence[int] = ()) -> int:
        """Log-uniform, at a step in most draws; one of `known` in a quarter of them."""
        high = max(low, min(int(high), self.elements))
        fitting = [n for n in known if low <= n <= high]
        if fitting and self.chance(0.25):
            return self.one_of(fitting)
        n = round(math.exp(self.rng.uniform(math.log(low), math.log(high))))
        step = self.one_of(STEPS)
        return max(low, n // step * step)

    def matrix(self, low: int, high: float, known: Sequence[int] = WIDTHS) -> tuple:
        """(rows, width) of at most so many elements as an operand may have."""
        width = self.size(low, high, known)
        return self.size(1, max(1, self.elements // width)), width

    def dtype(self) -> str:
        return self.one_of(DTYPES)


def normals(dtype: str, *shapes: tuple[int, ...]) -> Callable[[jax.Array], tuple]:
    """Draws an array of normal numbers for each shape."""

    def arrays(key):
        keys = jax.random.split(key, len(shapes))
        return tuple(
            jax.random.normal(k, s).astype(dtype)
            for k, s in zip(keys, shapes, strict=True)
        )

    return arrays


def in_words(*shape: int, **options: Any) -> str:
    """`4x700, causal, window 64`: what is False or None goes without saying."""
    said = ["x".join(map(str, shape))]
    for name, value in options.items():
        if value is not None and value is not False:
            said.append(name if value is True else f"{name} {value}")
    return ", ".join(said)


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is None."""
    return {name: value for name, value in options.items() if value is not None}


def with_options(f: Callable, **options: Any) -> Callable:
    return functools.partial(f, **given(options))


def drawn_lengths(key: jax.Array, count: int, most: int) -> jax.Array:
    return jax.random.randint(key, (count,), 1, most + 1, jnp.int32)
