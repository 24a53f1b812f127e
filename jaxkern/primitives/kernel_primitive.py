"""`kernel_primitive` turns a plain reference into a JAX primitive with all its rules.

An op is declared by its mathematics alone:

    rms_norm_p = kernel_primitive(
        rms_norm_reference,          # operands with their dims, options -> results
        fwd=rms_norm_fwd_reference,  # the same -> (*results, *residuals)
        bwd=rms_norm_bwd_reference,  # what it names, then cotangents -> gradients
        replicated=("d",),           # dims that a kernel needs whole on each device
    )

where `without_residuals(rms_norm_fwd_reference)` makes the reference of the `fwd`. It
becomes a family of four primitives: `rms_norm` (inference), `rms_norm_fwd` (saves
residuals), `rms_norm_tangent` (linear in the tangents, so that forward mode works) and
`rms_norm_bwd` (the transpose of the tangent). Every rule follows from the declaration:

    abstract eval   traces the reference, cached: shapes, dtypes, shardings, manual axes
    argument check  the jaxtyping dims of the reference
    jvp             `fwd`, then `tangent`; without `bwd`: the jvp of the reference
    transpose       of `tangent` is `bwd`; of an op with `linear=` operands is `bwd` too
    batching        folded into `...` where that is exact, else recorded in the equation
                    and applied with `jax.vmap` at lowering
    dead code       `fwd` without used residuals is the op; unused gradients are dropped
    lowering        the reference, until `jaxkern.lowering` adds a row for a kernel, or
                    a rewrite for a platform that computes a part of it wrongly

The second and higher derivatives differentiate the references.

Dims are written and checked as `declared_dims.py` says; the rules are in `rules.py`,
what an equation records in `call.py`.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval, xla

from jaxkern.primitives import rules
from jaxkern.primitives.call import (
    Call,
    apply_call,
    backend_context,
    float_positions,
    same_manual_axes,
    with_absent,
    with_fixed,
    without,
)
from jaxkern.primitives.declared_dims import (
    Annotated,
    annotations,
    as_array,
    check_dims,
    check_static,
)

# every declared op, in order of declaration
REGISTRY: dict[str, "KernelPrimitive"] = {}
# by platform: makes of a reference one that the platform computes rightly
REWRITES: dict[str, Callable[[Callable], Callable]] = {}


def at_least_f32(x: jax.Array) -> jax.Array:
    """`x` in float32, or in float64 if it is: arithmetic never runs below float32."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


class KernelPrimitive(Primitive):
    """One primitive of a family; call it with arrays (None for an absent operand).

    Attributes:
      reference: what the primitive means, in plain JAX.
      operands, results: their names, dims and dtypes, read from the reference.
      replicated: dims that a kernel needs whole on each device.
      linear: operands in which the op is linear, jointly.
      fwd, bwd, tangent: the other members of the family, or None.
      rows: kernels by platform, filled by `jaxkern.lowering.lower`.
    """

    multiple_results = True

    def __init__(
        self, reference: Callable, replicated: Sequence[str], linear: Sequence[str] = ()
    ):
        super().__init__(reference.__name__.removesuffix("_reference"))
        self.reference = reference
        self.operands, self.results = annotations(reference)
        self.replicated, self.linear = tuple(replicated), tuple(linear)
        self.fwd: KernelPrimitive | None = None
        self.bwd: Backward | None = None
        self.tangent: Tangent | None = None
        self.rows: dict[str, list] = {}

    def __repr__(self) -> str:
        sides = (self.operands, self.results)
        left, right = (", ".join(" ".join(a.dims) for a in side) for side in sides)
        return f"{self.name}: {left} -> {right}"

    def __call__(self, *operands: Any, **static: Any) -> Any:
        arrays = [
            as_array(self.name, a, x)
            for a, x in zip(self.operands, operands, strict=True)
        ]
        check_dims(repr(self), self.operands, arrays)
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

        def unbatched(*arrays):
            out = fn(*with_absent(arrays, call.absent), **static)
            return list(out) if isinstance(out, tuple | list) else [out]

        return apply_call(unbatched, call)(*arrays)

    def array_annotations(
        self, call: Call
    ) -> tuple[Sequence[Annotated], Sequence[Annotated]]:
        """The annotations of the arrays and of the results of one equation."""
        return without(self.operands, call.absent), self.results


class Backward(KernelPrimitive):
    """`bwd`: takes the operands it names, saved values and cotangents; gives gradients.

    `operand_positions` says which operands of the op it takes, `takes_results` whether
    the saved values begin with the op's results, `targets` which operands its gradients
    belong to. `call.absent` counts its own operands; only wanted gradients are results.
    """

    def __init__(self, reference: Callable, op: KernelPrimitive, num_residuals: int):
        super().__init__(reference, op.replicated)
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

        return apply_call(unbatched, call)(*arrays)

    def array_annotations(
        self, call: Call
    ) -> tuple[Sequence[Annotated], Sequence[Annotated]]:
        operands = without(self.op.operands, call.absent)
        floats = float_positions(self.op, call.absent)
        moving = [operands[i] for i, w in zip(floats, call.wanted, strict=True) if w]
        results = [r for r in self.op.results if r.is_float]
        return [*moving, *operands, *self.saved], results


def kernel_primitive(
    reference: Callable,
    *,
    fwd: Callable | None = None,
    bwd: Callable | None = None,
    replicated: Sequence[str] = (),
    linear: Sequence[str] = (),
) -> KernelPrimitive:
    """Declares an op by its mathematics and returns its primitive.

    Args:
      reference: `(operands..., *, options) -> result | tuple of results`. Operands and
        results are annotated with jaxtyping dims, `| None` marks an optional operand.
        Options are static and hashable.
      fwd: the same arguments, returns `(*results, *residuals)`. Leave it out where the
        operands and results are all that `bwd` needs.
      bwd: `([operands by name,] [all results,] [residuals,] cotangents of the float
        results, *, options)`, returns one gradient for each Float operand in order,
        None for an absent one. An operand that it does not name is not passed to it.
        Without it the gradient is that of the reference.
      replicated: dims that a kernel needs whole on each device, because a result
        depends on all of them otherwise than by a sum.
      linear: names of operands in which the op is linear, jointly. Then the jvp is the
        op itself and `bwd`, which may not name these operands, is its transpose and
        returns gradients for these operands only; others get theirs from the reference.

    Returns:
      The primitive. Calling it checks the arguments and binds it.
    """
    p = KernelPrimitive(reference, replicated, linear)
    if p.name in REGISTRY:
        raise ValueError(f"kernel_primitive: {p.name} is declared already.")
    register(p)
    if bwd is not None:
        residuals: Sequence[Annotated] = ()
        if fwd is not None:
            p.fwd = KernelPrimitive(fwd, replicated)
            residuals = p.fwd.results[len(p.results) :]
            register(p.fwd)
            ad.primitive_jvps[p.fwd] = functools.partial(rules.jvp_of_fwd, p)
            partial_eval.dce_rules[p.fwd] = functools.partial(rules.drop_residuals, p)
        p.bwd = Backward(bwd, p, len(residuals))
        register(p.bwd)
        partial_eval.dce_rules[p.bwd] = rules.drop_gradients
        if linear:
            ad.primitive_jvps[p] = functools.partial(rules.jvp_of_linear, p)
            ad.primitive_transposes[p] = functools.partial(rules.transpose_of_linear, p)
        else:
            results = p.results if p.bwd.takes_results else ()
            p.tangent = Tangent(p, (*results, *residuals))
            register(p.tangent)
            ad.primitive_jvps[p] = functools.partial(rules.jvp_of_op, p)
            ad.primitive_transposes[p.tangent] = functools.partial(
                rules.transpose_of_tangent, p
            )
    elif fwd is not None or linear:
        raise TypeError(f"kernel_primitive: {p.name} has fwd= or linear= but no bwd=.")
    REGISTRY[p.name] = p
    return p


def register(p: KernelPrimitive | Tangent) -> None:
    """The rules that every member of a family shares."""
    p.def_impl(functools.partial(xla.apply_primitive, p))
    p.def_abstract_eval(functools.partial(rules.abstract_eval, p))
    batching.primitive_batchers[p] = functools.partial(rules.batch, p)
    ad.primitive_jvps[p] = functools.partial(rules.jvp_by_reference, p)
    mlir.register_lowering(p, functools.partial(lower_reference, p))


def lower_reference(p: KernelPrimitive | Tangent, ctx, *args, **params):
    """The lowering of an op for which no row names a kernel."""
    backend = params["call"].backend
    if backend.strict and backend.name not in ("auto", "xla"):
        if not isinstance(p, Tangent):
            raise ValueError(f"{p.name}: has no {backend.name} kernel on any platform.")
    f = functools.partial(p.evaluate, **params)
    return lower_named(p, f, ctx, *args)


def lower_named(p: Primitive, f: Callable, ctx, *args):
    """Lowers `f` in the place of `p`, rewritten where a platform asks for it.

    Profiles show p's name with each instruction.
    """
    platforms = ctx.platforms or ctx.module_context.platforms
    rewritten = {t: REWRITES[t](f) for t in platforms if t in REWRITES}
    if len(platforms) == 1:
        f = rewritten.get(platforms[0], f)
    elif rewritten:
        f = functools.partial(lax.platform_dependent, default=f, **rewritten)
    f = jax.named_scope(p.name)(f)
    return mlir.lower_fun(f, multiple_results=True)(ctx, *args)
