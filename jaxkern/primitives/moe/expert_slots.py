"""Experts of a few tokens in two ops, which read each expert where it lies.

    hidden[k] = swiglu(gate[e] x + gate_bias[e], up[e] x + up_bias[e]),   e = ids[k]
    y         = residual + sum_k weights[k] * (down[e] hidden[k] + down_bias[e])

Sums, biases, gate and weights are float32 (or wider); each result is rounded once. An
expert that every token passes may stand beside the others: its id is their number, and
it has no bias. Any other id outside gives nothing.

Each container has a pair of its own, as `expert_slots` declares them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer, UInt8

from jaxkern.primitives.activation.swiglu import swiglu_reference
from jaxkern.primitives.family import KernelPrimitive
from jaxkern.primitives.float8 import decode_float8
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.quant.decoded_products import decoded_product, routed_product
from jaxkern.primitives.quant.fp8_tensor import FP8Tensor
from jaxkern.primitives.quant.interleaved_matmul import INTERLEAVED
from jaxkern.primitives.quant.interleaved_tensor import InterleavedTensor
from jaxkern.primitives.quant.microscaled import FAMILY as MICROSCALED
from jaxkern.primitives.quant.microscaled_tensor import MicroscaledTensor
from jaxkern.primitives.quant.quantized_family import QuantizedFamily, declared
from jaxkern.primitives.quant.quantized_tensor import QuantizedTensor

Experts = Float[Array, "e f d"] | QuantizedTensor


def bias_of_slots(bias: Float[Array, "..."], ids: Integer[Array, "..."]) -> Array:
    """bias[ids] of bias `[e, *rows]`, in float32; zero for an id outside.

    A sum over all experts, of which one has a part: its gradient adds up in order.
    """
    named = ids[..., None] == jnp.arange(bias.shape[0])
    named = named.reshape(*named.shape, *[1] * (bias.ndim - 1))
    return jnp.where(named, at_least_f32(bias), 0).sum(axis=ids.ndim)


def of_named(products: Array, ids: Array, shared: Array | None, experts: int) -> Array:
    """The products of experts, or where an id is their number what `shared` gives."""
    if shared is None:
        return products
    all_pass = (ids == experts).reshape(*ids.shape, *[1] * (products.ndim - ids.ndim))
    return products + jnp.where(all_pass, shared, 0)


class ExpertArrays(NamedTuple):
    """How the arrays of one container stand among the operands of an op."""

    family: QuantizedFamily

    @property
    def names(self) -> tuple[str, ...]:
        """Those that are always there."""
        return tuple(n for n in self.family.arrays if n not in self.family.optional)

    def placed(self, of: str, place: str, optional: bool = False) -> dict[str, Any]:
        """Annotated operands `of_name`, `place` standing before their dims."""
        arrays = self.family.placed(lambda dims: f"{place} {dims}")
        found = {f"{of}_{name}": arrays[name] for name in self.names}
        return {n: a | None for n, a in found.items()} if optional else found

    def read(self, w: Any) -> list[Any]:
        """The arrays of a container, or None for each where there is none."""
        if w is None:
            return [None] * len(self.names)
        read = dict(zip(self.family.arrays, self.family.read(w), strict=True))
        return [read[name] for name in self.names]

    def check(self, op: str, x: Array, arrays: Sequence[Array], layout: dict) -> None:
        """Raises TypeError unless `x` is as wide as the weights."""
        absent = [None] * len(self.family.optional)  # they stand behind the others
        self.family.check_columns(op, x, [*arrays, *absent], layout)

    def product(self, x: Array, ids: Array, arrays: Sequence[Array], layout: dict):
        """w[ids[..., k]] x of x `[..., d]`: `[..., k, rows]`."""
        decode = partial(self.family.decode, **layout)
        return self.family.split_rows(routed_product(x, ids, arrays, decode, None))

    def shared(self, x: Array, arrays: Sequence[Array], layout: dict):
        """w x of one matrix: `[..., rows]`."""
        decode = partial(self.family.decode, **layout)
        return self.family.split_rows(decoded_product(x, arrays, decode, 1, None))

    def hidden(self, op: str, x, ids, *operands, alpha, limit, up_offset, **layout):
        """The reference of `<name>_expert_hidden`."""
        n = len(self.names)
        gate, up, both = (operands[i * n : (i + 1) * n] for i in range(3))
        gate_bias, up_bias = operands[3 * n :]
        x32, experts, halves = at_least_f32(x), *gate[0].shape[:2]
        if halves != (2 if up[0] is None else 1):
            raise TypeError(
                f"{op}: experts have gate alone beside `up`, and both without it, got "
                f"{halves} halves and {'no ' if up[0] is None else ''}`up`."
            )
        if up[0] is None:
            up = [a[:, 1] for a in gate]
            up_bias = None if gate_bias is None else gate_bias[:, 1]
        gate = [a[:, 0] for a in gate]
        gate_bias = None if gate_bias is None else gate_bias[:, 0]
        self.check(op, x, gate, layout)

        def one(half: int, arrays: Sequence[Array], bias: Array | None) -> Array:
            y = self.product(x32, ids, arrays, layout)
            if both[0] is not None:
                of_all = self.shared(x32, [a[half] for a in both], layout)
                y = of_named(y, ids, jnp.expand_dims(of_all, x.ndim - 1), experts)
            return y if bias is None else y + bias_of_slots(bias, ids)

        z, u = one(0, gate, gate_bias), one(1, up, up_bias)
        options = dict(alpha=alpha, limit=limit, up_offset=up_offset)
        return swiglu_reference(z, u, **options).astype(x.dtype)

    def sum(self, op: str, x, ids, weights, *operands, **layout):
        """The reference of `<name>_expert_sum`."""
        n = len(self.names)
        down, back = operands[:n], operands[n : 2 * n]
        bias, residual = operands[2 * n :]
        self.check(op, x, down, layout)
        x32, experts = at_least_f32(x), down[0].shape[0]
        y = jnp.squeeze(self.product(x32, ids[..., None], down, layout), ids.ndim)
        if back[0] is not None:
            y = of_named(y, ids, self.shared(x32, back, layout), experts)
        if bias is not None:
            y = y + bias_of_slots(bias, ids)
        known = (ids >= 0) & (ids < experts + (back[0] is not None))
        rows = (*ids.shape, *[1] * (y.ndim - ids.ndim))
        y = at_least_f32(weights).reshape(rows) * y
        y = jnp.where(known.reshape(rows), y, 0).sum(axis=ids.ndim - 1)
        return (y if residual is None else at_least_f32(residual) + y).astype(x.dtype)


class ExpertSlots(NamedTuple):
    """The two ops of a container and how they take its arrays."""

    arrays: ExpertArrays
    hidden: KernelPrimitive
    sum: KernelPrimitive


def expert_slots(name: str, family: QuantizedFamily) -> ExpertSlots:
    """Declares `<name>_expert_hidden` and `<name>_expert_sum`."""
    arrays, rows = ExpertArrays(family), family.rows
    ids: Any = Integer[Array, "... k"]
    bias: Any = Float[Array, f"e {rows}"]
    both: Any = Float[Array, f"e halves {rows}"]
    residual: Any = Float[Array, f"... {rows}"]
    hidden = {
        "x": Float[Array, f"... {family.columns}"],
        "ids": ids,
        **arrays.placed("gate", "e halves"),
        **arrays.placed("up", "e", optional=True),
        **arrays.placed("shared", "2", optional=True),
        "gate_bias": both | None,
        "up_bias": bias | None,
    }
    weighted = {
        "x": Float[Array, f"... k {family.columns}"],
        "ids": ids,
        "weights": Float[Array, "... k"],
        **arrays.placed("down", "e"),
        **arrays.placed("shared", "", optional=True),
        "down_bias": bias | None,
        "residual": residual | None,
    }

    def op(kind: str, f: Callable, operands: dict, options: tuple, result: Any):
        title = f"{name}_expert_{kind}"

        def reference(*given, **named):
            return f(title, *given, **named)

        options = (*family.layout, *options)
        declared(reference, title, __name__, operands, options, result)
        # an id may name any expert
        return kernel_primitive(
            reference, replicated=("e", "halves", "k", *family.whole)
        )

    options = ("alpha", "limit", "up_offset")
    by_slot, by_token = (Float[Array, f"... {r}"] for r in (f"k {rows}", rows))
    return ExpertSlots(
        arrays,
        op("hidden", arrays.hidden, hidden, options, by_slot),
        op("sum", arrays.sum, weighted, (), by_token),
    )


DENSE = QuantizedFamily(
    arrays={"w": Float[Array, "f d"]},
    layout=(),
    decode=lambda w, dtype: w.astype(dtype),
    whole=("d",),
    arrays_of=lambda w: (w,),
)


def decode_fp8_rows(
    codes: UInt8[Array, "... d"],
    scales: Float[Array, "..."],
    *,
    format: str,
    dtype: jnp.dtype | None,
) -> Float[Array, "... d"]:
    w = decode_float8(codes, format) * at_least_f32(scales)[..., None]
    return w if dtype is None else w.astype(dtype)


def rows_of_fp8(w: FP8Tensor) -> tuple[Array, Array]:
    """Codes, and a scale for each row of the one or more that share it."""
    f, scales = w.shape[-2], w.scales[..., 0]
    if scales.shape[-1] != f:
        scales = jnp.repeat(scales, w.block[0] or f, axis=-1)[..., :f]
    return w.codes, scales


FP8_ROWS = QuantizedFamily(
    arrays={"codes": UInt8[Array, "f d"], "scales": Float[Array, " f"]},
    layout=("format",),
    decode=decode_fp8_rows,
    whole=("d",),
    arrays_of=rows_of_fp8,
)
SLOTS = {
    jax.Array: expert_slots("dense", DENSE),
    FP8Tensor: expert_slots("fp8", FP8_ROWS),
    InterleavedTensor: expert_slots("interleaved", INTERLEAVED),
    MicroscaledTensor: expert_slots("microscaled", MICROSCALED),
}


def slots_of(w: Any) -> ExpertSlots | None:
    """The ops of a container; None where it has none."""
    if isinstance(w, jax.Array | np.ndarray):
        return SLOTS[jax.Array]
    if getattr(w, "global_scale", None) is not None:
        return None
    if isinstance(w, FP8Tensor) and w.scales.shape[-1] != 1:
        return None  # scales of parts of a row
    return SLOTS.get(type(w))


def are_alike(*weights: Any) -> bool:
    """Whether one kernel reads them: one container that has the ops, one layout."""
    found = [slots_of(w) for w in weights]
    first = found[0]
    if first is None or any(s is not first for s in found):
        return False
    family = first.arrays.family
    if family is DENSE:
        return len({w.dtype for w in weights}) == 1
    return all(family.layout_of(w) == family.layout_of(weights[0]) for w in weights)


def expert_hidden(
    x: Float[Array, "t d"],
    ids: Integer[Array, "t k"],
    gate: Experts,
    up: Experts | None,
    gate_bias: Float[Array, "e f"] | None,
    up_bias: Float[Array, "e f"] | None,
    shared: Any = None,
    **options: Any,
) -> Float[Array, "t k f"]:
    """`hidden` of each slot; where `up` is None gate and its bias have both halves.

    `shared` is `[2*f, d]`, of the container of the others. `options` are those of
    `swiglu`.
    """
    ops = slots_of(gate)
    assert ops is not None
    family, halves = ops.arrays.family, 2 if up is None else 1
    f = gate.shape[1] // halves
    gates = [in_parts(a, 1, halves) for a in ops.arrays.read(gate)]
    both = [in_parts(a, 0, 2) for a in ops.arrays.read(shared)]
    if gate_bias is not None:
        gate_bias = family.split_rows(in_parts(gate_bias, 1, halves))
    up_bias = None if up_bias is None else family.split_rows(up_bias)
    weights = *gates, *ops.arrays.read(up), *both, gate_bias, up_bias
    y = ops.hidden(x, ids, *weights, **family.layout_of(gate), **options)
    return y.reshape(*ids.shape, f)


def in_parts(a: Any, axis: int, parts: int) -> Any:
    """An array with one dim as so many parts of it; None stays."""
    if a is None:
        return None
    shape = (*a.shape[:axis], parts, a.shape[axis] // parts, *a.shape[axis + 1 :])
    return a.reshape(shape)


def expert_sum(
    hidden: Float[Array, "t k f"],
    ids: Integer[Array, "t k"],
    weights: Float[Array, "t k"],
    down: Experts,
    bias: Float[Array, "e d"] | None,
    residual: Float[Array, "t d"] | None = None,
    shared: Any = None,
) -> Float[Array, "t d"]:
    """`y` of each token; `shared` is `[d, f]`, of the container of the others."""
    ops = slots_of(down)
    assert ops is not None
    family = ops.arrays.family
    rows = [None if a is None else family.split_rows(a) for a in (bias, residual)]
    arrays = *ops.arrays.read(down), *ops.arrays.read(shared)
    y = ops.sum(hidden, ids, weights, *arrays, *rows, **family.layout_of(down))
    return y.reshape(len(hidden), down.shape[1])
