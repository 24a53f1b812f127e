"""Products with low-rank adapters (LoRA): y = x W + s (x A) B, W however it is kept.

https://arxiv.org/abs/2106.09685. A and B lie output-major, as files have them: `[r, d]`
and `[f, r]`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class LowRank(NamedTuple):
    """The two factors of an adapter."""

    a: Float[Array, "r d"]
    b: Float[Array, "f r"]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("base", "parts"),
    meta_fields=("names", "widths", "scales"),
)
@dataclass(frozen=True)
class Adapted:
    """Matrices side by side with one input, some of them with an adapter.

    Attributes:
      base: `jaxkern.models.products.Matrices`, kept in any way.
      parts: the adapter of each tensor that they are made of, None for none.
      names: of these tensors, as in GGUF files.
      widths: their rows.
      scales: s of each.
    """

    base: tuple[Any, ...]
    parts: tuple[LowRank | None, ...]
    names: tuple[str, ...]
    widths: tuple[int, ...]
    scales: tuple[float, ...]

    def added(self, x: Float[Array, "... d"]) -> Float[Array, "... f"]:
        """s (x A) B of each part, zeros where it has no adapter; in x's dtype.

        Both products are summed in float32 and rounded to x's dtype.
        """
        from jaxkern import linear

        found = []
        for part, width, scale in zip(
            self.parts, self.widths, self.scales, strict=True
        ):
            if part is None:
                found.append(jnp.zeros((*x.shape[:-1], width), x.dtype))
                continue
            a, b = part.a.astype(x.dtype), part.b.astype(x.dtype)
            found.append(linear(linear(x, a), b) * jnp.asarray(scale, x.dtype))
        return found[0] if len(found) == 1 else jnp.concatenate(found, axis=-1)

    def dense(self) -> Float[Array, "f d"]:
        """s B A of each part, side by side, in float32: what merging adds to W."""
        (d,) = {part.a.shape[1] for part in self.parts if part is not None}
        rows = [
            jnp.zeros((width, d))
            if part is None
            else scale * jnp.matmul(part.b, part.a, precision="highest")
            for part, width, scale in zip(
                self.parts, self.widths, self.scales, strict=True
            )
        ]
        return jnp.concatenate(rows).astype(jnp.float32)


def adapted_in(weights: Any) -> Iterator[Adapted]:
    """Every `Adapted` of a model's weights."""
    leaves = jax.tree.leaves(weights, is_leaf=is_adapted)
    yield from (leaf for leaf in leaves if is_adapted(leaf))


def is_adapted(x: Any) -> bool:
    return isinstance(x, Adapted)


def adapters_of(weights: Any) -> dict[str, LowRank]:
    """The adapters in a model's weights, by the names of their tensors."""
    return {
        name: part
        for own in adapted_in(weights)
        for name, part in zip(own.names, own.parts, strict=True)
        if part is not None
    }


def with_adapters(weights: Any, adapters: Mapping[str, LowRank]) -> Any:
    """The weights with other adapters in the places of theirs."""

    def replaced(x: Any) -> Any:
        if not is_adapted(x):
            return x
        parts = tuple(
            None if part is None else adapters[name]
            for name, part in zip(x.names, x.parts, strict=True)
        )
        return Adapted(x.base, parts, x.names, x.widths, x.scales)

    return jax.tree.map(replaced, weights, is_leaf=is_adapted)


def merged(own: Adapted, *, output_major: bool) -> tuple[Any, ...]:
    """One plain array W + s B A, laid out and rounded as W was.

    Args:
      output_major: W is `[f, d]`, as in files; else as `products.Matrix` says.

    Raises:
      ValueError: W is quantised, where the sum has no place.
    """
    if len(own.base) != 1 or not isinstance(own.base[0], jax.Array):
        raise ValueError(
            f"load: {own.names[0]} is quantised, so the adapter cannot be merged with "
            "it. Take the weights f32 or bf16."
        )
    (w,), delta = own.base, own.dense()
    if not output_major and w.dtype == jnp.float32 and delta.shape[0] >= delta.shape[1]:
        delta = delta.T
    return ((w.astype(jnp.float32) + delta).astype(w.dtype),)
