"""tokamax's ragged products, and how it says the sizes of their groups."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer

from jaxkern.interop.calling import as_asked, takes_holders
from jaxkern.interop.ragged_product import ROWS_IN_GROUPS, ragged_product
from jaxkern.primitives.activation.activations import Activation as ActivationName
from jaxkern.primitives.activation.glu import glu

Activation = Callable[[Array], Array]
FUSED_GATES: dict[str, ActivationName] = {
    "silu": "silu",
    "gelu": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RaggedDotGroupSizes:
    """Sizes of groups, and such as they will be, for who measures: not read here.

    Attributes:
      value: `[g]`, integers.
      repr_value_or_total_size: representative sizes, one a group, or their sum.

    Example:
      >>> from jaxkern.interop import tokamax
      >>> sizes = tokamax.RaggedDotGroupSizes(jnp.array([3, 1]), [2, 2])
      >>> jnp.asarray(sizes), sizes.representative_value
      (Array([3, 1], dtype=int32), (2, 2))
    """

    value: Integer[Array, " g"] | np.ndarray
    repr_value_or_total_size: Sequence[int] | int = dataclasses.field(
        metadata={"static": True}
    )

    def __post_init__(self):
        said = self.repr_value_or_total_size
        if isinstance(said, int) or not hasattr(self.value, "shape"):
            return
        if self.value.shape != (len(said),):
            raise ValueError(
                "RaggedDotGroupSizes: `repr_value_or_total_size` must have one size a "
                f"group, got {len(said)} for {list(self.value.shape)}."
            )
        object.__setattr__(self, "repr_value_or_total_size", tuple(said))

    def __jax_array__(self) -> Array:
        return jnp.asarray(self.value)

    @property
    def representative_value(self) -> tuple[int, ...]:
        """Sizes that stand for those to come: as given, or drawn of the sum."""
        said = self.repr_value_or_total_size
        if isinstance(said, int):
            return generate_ragged_dot_group_sizes(m=said, num_groups=len(self.value))
        return tuple(said)


def generate_ragged_dot_group_sizes(
    *, m: int, num_groups: int, p: Sequence[float] | None = None, seed: int = 0
) -> tuple[int, ...]:
    """How many of m rows each group has, where every row draws its own.

    Args:
      m: rows.
      num_groups: of which each row draws one.
      p: the probability of each group; all alike without it.
      seed: of the draw. The sizes are others than tokamax's of that seed.

    Example:
      >>> from jaxkern.interop import tokamax
      >>> sum(tokamax.generate_ragged_dot_group_sizes(m=100, num_groups=8))
      100
    """
    shares = np.full(num_groups, 1 / num_groups) if p is None else np.asarray(p)
    if len(shares) != num_groups:
        raise ValueError(
            "generate_ragged_dot_group_sizes: `p` must have one probability a group, "
            f"got {len(shares)} for {num_groups}."
        )
    return tuple(map(int, np.random.default_rng(seed).multinomial(m, shares)))


@takes_holders
def ragged_dot(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "g k n"],
    group_sizes: Integer[Array, " g"] | RaggedDotGroupSizes,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: Array | None = None,
    activation: Activation | None = None,
    manual_axis_type: Any = None,
    *,
    implementation: str | Sequence[str] | None = None,
    bypass_device_check: bool | None = None,
    zero_initialize: bool = False,
    fuse_gateup_activation: str | None = None,
) -> Float[Array, "m n"]:
    """Rows of a group times the group's weight, then what is done to these sums.

    Args:
      lhs, rhs, group_sizes, precision, preferred_element_type: as in tokamax.
      group_offset: as in `jaxkern.interop.jax_nn.ragged_dot`.
      activation: a function of the sums, which are float32 until after it.
      manual_axis_type: None: the type of the result follows from its operands.
      implementation: "xla", "triton" or "mosaic"; None for the fastest.
      bypass_device_check: whatever it is: what a device lacks is asked in any case.
      zero_initialize: rows of no group are 0 either way.
      fuse_gateup_activation: "silu", "gelu" or "gelu_tanh", both of them by tanh, of
        the first half of each row, which multiplies the second; before `activation`.

    Raises:
      TypeError: shapes or dtypes do not fit, or an operand is a quantised array.
      ValueError: an unknown implementation, precision or name of an activation.
      NotImplementedError: a `manual_axis_type`.

    Example:
      >>> from jaxkern.interop import tokamax
      >>> sizes = jnp.array([1, 1])
      >>> tokamax.ragged_dot(jnp.ones((2, 1)), jnp.array([[[1.0]], [[2.0]]]), sizes)
      Array([[1.],
             [2.]], dtype=float32)
    """
    del bypass_device_check, zero_initialize
    then = Then("ragged_dot", activation, fuse_gateup_activation, manual_axis_type)
    with as_asked(then.op, implementation, precision):
        return then.of(
            *(lhs, rhs, group_sizes, ROWS_IN_GROUPS),
            *(preferred_element_type, group_offset),
        )


@takes_holders
def ragged_dot_general(
    lhs: Float[Array, "..."],
    rhs: Float[Array, "..."],
    group_sizes: Integer[Array, "... g"] | RaggedDotGroupSizes,
    ragged_dot_dimension_numbers: jax.lax.RaggedDotDimensionNumbers,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: Array | None = None,
    activation: Activation | None = None,
    manual_axis_type: Any = None,
    *,
    implementation: str | Sequence[str] | None = None,
    bypass_device_check: bool | None = None,
    zero_initialize: bool = False,
    fuse_gateup_activation: str | None = None,
) -> Float[Array, "..."]:
    """Rows or sums in groups, as `jaxkern.interop.jax_nn.ragged_dot_general` has them.

    Args and errors are those of `ragged_dot`, and a NotImplementedError for a
    `group_offset` where rhs has no groups.

    Example:
      >>> from jaxkern.interop import tokamax
      >>> output_major = jax.lax.RaggedDotDimensionNumbers(
      ...     (((1,), (2,)), ((), ())), [0], [0])
      >>> weights, sizes = jnp.ones((2, 3, 4)), jnp.array([2, 3])
      >>> tokamax.ragged_dot_general(jnp.ones((5, 4)), weights, sizes, output_major)[4]
      Array([4., 4., 4.], dtype=float32)
    """
    del bypass_device_check, zero_initialize
    op = "ragged_dot_general"
    then = Then(op, activation, fuse_gateup_activation, manual_axis_type)
    with as_asked(op, implementation, precision):
        return then.of(
            *(lhs, rhs, group_sizes, ragged_dot_dimension_numbers),
            *(preferred_element_type, group_offset),
        )


@dataclasses.dataclass(frozen=True)
class Then:
    """What tokamax's ragged products do with the sums; refused if it is not known."""

    op: str
    activation: Activation | None
    gate: str | None
    manual_axis_type: Any

    def __post_init__(self):
        if self.manual_axis_type is not None:
            raise NotImplementedError(
                f"{self.op}: `manual_axis_type` is not supported. Leave it out: the "
                "type of the result follows from its operands."
            )
        if self.gate is not None and self.gate not in FUSED_GATES:
            raise ValueError(
                f"{self.op}: `fuse_gateup_activation` must be one of "
                f"{sorted(FUSED_GATES)}, got {self.gate!r}."
            )

    def of(
        self,
        lhs: Array,
        rhs: Array,
        group_sizes: Any,
        numbers: jax.lax.RaggedDotDimensionNumbers,
        preferred: DTypeLike | None,
        group_offset: Array | None,
    ) -> Array:
        wide = preferred
        if self.activation or self.gate:
            wide = jnp.promote_types(
                preferred or jnp.result_type(lhs, rhs), jnp.float32
            )
        y = ragged_product(self.op, lhs, rhs, group_sizes, numbers, wide, group_offset)
        if self.gate:
            y = glu(y, activation=FUSED_GATES[self.gate])
        if self.activation:
            y = self.activation(y)
        return y.astype(preferred or jnp.result_type(lhs, rhs))
