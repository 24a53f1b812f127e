"""`NormRope`: how the operators of a cache normalise heads and rotate them."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax

from jaxkern.primitives.check_arguments import check_fields
from jaxkern.primitives.declared_dims import Annotated, as_array
from jaxkern.primitives.rope.rope import Pairing, rotary_tables


@dataclass(frozen=True)
class NormRope:
    """How heads are normalised and rotated on their way from a projection to a cache.

        y     = apply_rope(x / sqrt(mean(x**2) + eps) * (weight + offset), cos, sin)
        value = value / sqrt(mean(value**2) + value_eps)          (only with value_eps)

    for x of the queries and of the keys. Weights and tables are operands; these are the
    options, static and hashable.

    Attributes:
      eps: of the norms of queries and keys, in units of x**2; None leaves them out.
      value_eps: of a norm of the values, which has no weight (Gemma 4); None for none.
      offset: added to the weights; 1.0 for Gemma 3, which stores weight - 1.
      pairing, pair_offset, at_end: which dims turn together, see `apply_rope`.

    Example:
      >>> gemma = jaxkern.NormRope(eps=1e-5, offset=1.0)
      >>> gemma.eps, gemma.value_eps, gemma.offset, gemma.pairing
      (1e-05, None, 1.0, 'neox')
    """

    eps: float | None = 1e-6
    value_eps: float | None = None
    offset: float = 0.0
    pairing: Pairing = "neox"
    pair_offset: int | None = None
    at_end: bool = False

    def __post_init__(self):
        check_fields(self)


def as_operands(
    op: str, x: jax.Array, norm_weights: Any, tables: Any, norm_rope: NormRope
) -> tuple[tuple[jax.Array | None, ...], dict[str, Any]]:
    """(query_weight, key_weight, cos, sin), the tables for rows of x, and the options.

    The primitives have them one by one.
    """
    weights = pair_of(op, "norm_weights", ("query_weight", "key_weight"), norm_weights)
    if norm_rope.eps is None and any(w is not None for w in weights):
        raise ValueError(
            f"{op}: eps=None leaves out the norms, so `norm_weights` must be (None, "
            "None). Pass eps."
        )
    cos, sin = pair_of(op, "tables", ("cos", "sin"), tables)
    cos, sin, pair_offset = rotary_tables(
        op, x, cos, sin, norm_rope.pairing, norm_rope.pair_offset
    )
    options = dataclasses.asdict(norm_rope) | {"pair_offset": pair_offset}
    return (*weights, cos, sin), options


def pair_of(op: str, name: str, parts: tuple[str, str], x: Any) -> list:
    """The two arrays of an argument, each checked under its own name."""
    if not isinstance(x, tuple | list) or len(x) != 2:
        got = type(x).__name__
        if isinstance(x, tuple | list):
            got += f" of {len(x)}"
        raise TypeError(
            f"{op}: `{name}` must be the pair ({', '.join(parts)}), got {got}."
        )
    optional = name == "norm_weights"
    declared = [Annotated(part, (), "Float", (), optional) for part in parts]
    return [as_array(op, a, array) for a, array in zip(declared, x, strict=True)]
