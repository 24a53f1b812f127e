"""The primitives that one declaration makes: an op, its `fwd`, its tangent, its `bwd`.

Each knows what it means (`evaluate`), what its arrays are (`array_annotations`) and its
relatives. `kernel_primitive` makes them and registers their rules.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive

from jaxkern.primitives.call import (
    Call,
    apply_call,
    backend_context,
    same_manual_axes,
    with_absent,
    with_fixed,
    without,
)
from jaxkern.primitives.declared_cuts import cuts_of_results
from jaxkern.primitives.declared_dims import (
    Annotated,
    annotations,
    as_array,
    check_dims,
    check_static,
)
from jaxkern.primitives.records import flat


class KernelPrimitive(Primitive):
    """One primitive of a family; call it with arrays (None for an absent operand).

    Attributes:
      reference: what the primitive means, in plain JAX.
      operands, results: their names, dims and dtypes, read from the reference.
      replicated: dims that a kernel needs whole on each device; "..." are the leading.
      linear: operands in which the op is linear, jointly.
      fwd, bwd, tangent: the other members of the family, or None.
      rows: kernels by platform, filled by `jaxkern.lowering.lower`.
      callers: ops that call this one, which are lowered as it asks.
      of_reference: options that say how the reference computes; kernels get none.
    """

    multiple_results = True

    def __init__(
        self, reference: Callable, replicated: Sequence[str], linear: Sequence[str] = ()
    ):
        super().__init__(reference.__name__.removesuffix("_reference"))
        self.reference = flat(reference)
        self.operands, self.results = annotations(self.reference)
        self.replicated, self.linear = tuple(replicated), tuple(linear)
        self.fwd: KernelPrimitive | None = None
        self.bwd: Backward | None = None
        self.tangent: Tangent | None = None
        self.rows: dict[str, list] = {}
        self.callers: tuple[KernelPrimitive, ...] = ()
        self.of_reference: tuple[str, ...] = ()

    def __repr__(self) -> str:
        sides = (self.operands, self.results)
        left, right = (", ".join(" ".join(a.dims) for a in side) for side in sides)
        return f"{self.name}: {left} -> {right}"

    def check(self, *operands: Any) -> list[jax.Array | None]:
        """The operands as arrays; TypeError unless kinds and dims are as declared."""
        arrays = [
            as_array(self.name, a, x)
            for a, x in zip(self.operands, operands, strict=True)
        ]
        check_dims(repr(self), self.operands, arrays)
        return arrays

    def __call__(self, *operands: Any, **static: Any) -> Any:
        arrays = self.check(*operands)
        check_static(self.name, static)
        absent = tuple(i for i, x in enumerate(arrays) if x is None)
        present = same_manual_axes([x for x in arrays if x is not None])
        call = Call(backend_context.value, absent)
        out = self.bind(*present, call=call, **static)
        return out[0] if len(self.results) == 1 else tuple(out)

    def evaluate(self, *arrays: Any, call: Call, **static: Any) -> list:
        """The reference on the present arrays, under the recorded vmaps."""
        return self.evaluate_with(self.reference, *arrays, call=call, **static)

    def evaluate_with(
        self, fn: Callable, *arrays: Any, call: Call, **static: Any
    ) -> list:
        """`fn` in the place of the reference: same operands, same results."""
        static = self.options_of(fn, static)

        def unbatched(*arrays):
            out = fn(*with_absent(arrays, call.absent), **static)
            return list(out) if isinstance(out, tuple | list) else [out]

        cuts_of = cuts_declared(self.array_annotations(call), self.replicated, call)
        return apply_call(unbatched, call, cuts_of)(*arrays)

    def options_of(self, fn: Callable, static: dict[str, Any]) -> dict[str, Any]:
        """Those that `fn` takes, the reference or a kernel."""
        if fn is self.reference or not self.of_reference:
            return static
        return {k: x for k, x in static.items() if k not in self.of_reference}

    def array_annotations(
        self, call: Call
    ) -> tuple[Sequence[Annotated], Sequence[Annotated]]:
        """The annotations of the arrays and of the results of one equation."""
        return without(self.operands, call.absent), self.results

    def named_shapes(
        self, avals: Sequence, call: Call
    ) -> dict[str, jax.ShapeDtypeStruct | None]:
        """Shape and dtype of each operand without the dims that vmaps added."""
        operands, _ = self.array_annotations(call)
        named: dict[str, jax.ShapeDtypeStruct | None] = {
            a.name: None for a in self.operands
        }
        for i, (operand, aval) in enumerate(zip(operands, avals, strict=True)):
            depth = sum(level[i] is not None for level in call.vmaps)
            named[operand.name] = jax.ShapeDtypeStruct(aval.shape[depth:], aval.dtype)
        return named


def cuts_declared(sides: Any, replicated: Sequence[str], call: Call) -> Any:
    return functools.partial(cuts_of_results, sides, replicated, call)


def float_positions(p: KernelPrimitive, absent: tuple[int, ...]) -> list[int]:
    """Positions of the Float operands among the present ones."""
    return [i for i, a in enumerate(without(p.operands, absent)) if a.is_float]


class Backward(KernelPrimitive):
    """`bwd`: takes the operands it names, saved values and cotangents; gives gradients.

    `operand_positions` says which operands of the op it takes, `takes_results` whether
    the saved values begin with the op's results, `targets` which operands its gradients
    belong to. `call.absent` counts its own operands; only wanted gradients are results.
    """

    def __init__(
        self,
        reference: Callable,
        op: KernelPrimitive,
        num_residuals: int,
        replicated: Sequence[str] = (),
    ):
        super().__init__(reference, (*op.replicated, *replicated))
        position = {a.name: i for i, a in enumerate(op.operands)}
        names = [a.name for a in self.operands]
        shared = [n for n in names if n in position]
        self.operand_positions = tuple(position[n] for n in shared)
        self.targets = tuple(
            i
            for i, a in enumerate(op.operands)
            if a.is_float and (not op.linear or a.name in op.linear)
        )
        num_cotangents = sum(r.is_float for r in op.results)
        rest = len(names) - len(shared) - num_residuals - num_cotangents
        self.takes_results = rest == len(op.results)
        in_order = names[: len(shared)] == shared
        if rest not in (0, len(op.results)) or not in_order:
            raise TypeError(
                f"{self.name}: parameters must be operands of {op.name}, then "
                f"[its {len(op.results)} results,] {num_residuals} residuals and "
                f"{num_cotangents} cotangents, got {names}."
            )
        if len(self.results) != len(self.targets):
            targets = [op.operands[i].name for i in self.targets]
            raise TypeError(
                f"{self.name}: must return gradients for {targets}, "
                f"its annotation has {len(self.results)} results."
            )
        if clash := [n for n in op.linear if n in names]:
            raise TypeError(
                f"{self.name}: the op is linear in {clash}: do not take it."
            )

    def evaluate_with(
        self, fn: Callable, *arrays: Any, call: Call, **static: Any
    ) -> list:
        """`fn` in the place of the reference, only the wanted gradients.

        Where it takes `wanted` it learns which, and gives None for the others.
        """
        static = self.options_of(fn, static)
        if "wanted" in inspect.signature(fn).parameters:
            static = {**static, "wanted": call.wanted}

        def unbatched(*arrays):
            out = fn(*with_absent(arrays, call.absent), **static)
            out = out if isinstance(out, tuple | list) else (out,)
            wanted = [g for g, w in zip(out, call.wanted, strict=True) if w]
            # a gradient of nothing but zeros varies as its operand does, too
            return same_manual_axes([*wanted, *arrays])[: len(wanted)]

        return apply_call(unbatched, call)(*arrays)

    def array_annotations(
        self, call: Call
    ) -> tuple[Sequence[Annotated], Sequence[Annotated]]:
        wanted = [r for r, w in zip(self.results, call.wanted, strict=True) if w]
        return without(self.operands, call.absent), wanted


class Tangent(Primitive):
    """`tangent`: takes tangents, operands and what `bwd` needs; gives result tangents.

    Linear in the tangents, which are those of the wanted float operands. It runs the
    jvp of the reference; the saved values are there for its transpose.
    """

    multiple_results = True

    def __init__(self, op: KernelPrimitive, saved: Sequence[Annotated]):
        super().__init__(f"{op.name}_tangent")
        self.op, self.saved = op, tuple(saved)

    def split(self, args: Sequence, call: Call) -> tuple[Sequence, Sequence, Sequence]:
        """(tangents, operands, saved values) of one equation's arguments."""
        num_tangents = sum(call.wanted)
        num_operands = len(self.op.operands) - len(call.absent)
        end = num_tangents + num_operands
        return args[:num_tangents], args[num_tangents:end], args[end:]

    def evaluate(self, *arrays: Any, call: Call, **static: Any) -> list:
        floats = float_positions(self.op, call.absent)
        wanted = [i for i, w in zip(floats, call.wanted, strict=True) if w]
        unbatched_call = dataclasses.replace(call, vmaps=(), wanted=())

        def unbatched(*arrays):
            tangents, operands, _ = self.split(arrays, call)
            f = with_fixed(
                functools.partial(self.op.evaluate, call=unbatched_call, **static),
                operands,
                wanted,
            )
            dots = jax.jvp(f, tuple(operands[i] for i in wanted), tuple(tangents))[1]
            return [d for d, r in zip(dots, self.op.results, strict=True) if r.is_float]

        cuts_of = cuts_declared(self.array_annotations(call), self.op.replicated, call)
        return apply_call(unbatched, call, cuts_of)(*arrays)

    def array_annotations(
        self, call: Call
    ) -> tuple[Sequence[Annotated], Sequence[Annotated]]:
        operands = without(self.op.operands, call.absent)
        floats = float_positions(self.op, call.absent)
        moving = [operands[i] for i, w in zip(floats, call.wanted, strict=True) if w]
        results = [r for r in self.op.results if r.is_float]
        return [*moving, *operands, *self.saved], results
