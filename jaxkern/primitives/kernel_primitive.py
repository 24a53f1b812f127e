"""`kernel_primitive` turns a plain reference into a JAX primitive with all its rules.

An op is declared by its mathematics alone:

    rms_norm_p = kernel_primitive(
        rms_norm_reference,          # operands with their dims, options -> results
        fwd=rms_norm_fwd_reference,  # the same -> (*results, *residuals)
        bwd=rms_norm_bwd_reference,  # what it names, then cotangents -> gradients
        replicated=("d",),           # dims that a kernel needs whole on each device
    )

and becomes a family of four primitives: `rms_norm` (inference), `rms_norm_fwd` (saves
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

Dims are written and checked as `declared_dims.py` says.
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

from jaxkern.primitives.declared_dims import (
    Annotated,
    annotations,
    as_array,
    check_dims,
    check_static,
)

Levels = tuple[tuple[int | None, ...], ...]

REGISTRY: dict[
    str, "KernelPrimitive"
] = {}  # every declared op, in order of declaration


REWRITES: dict[
    str, Callable[[Callable], Callable]
] = {}  # by platform: makes of a reference one that the platform computes rightly


def at_least_f32(x: jax.Array) -> jax.Array:
    """`x` in float32, or in float64 if it is: arithmetic never runs below float32."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


@dataclasses.dataclass(frozen=True)
class Backend:
    """Which implementation the user asked for; see `jaxkern.backend`."""

    name: str = "auto"
    strict: bool = False

    def __repr__(self) -> str:
        return self.name + (" strict" if self.strict else "")


backend_context = jax.make_user_context(Backend())


@dataclasses.dataclass(frozen=True)
class Call:
    """What an equation records beside the op's own options.

    Attributes:
      backend: the user's choice when the op was called. Carried, not read at lowering:
        a backward pass is traced after the `with` block has ended.
      absent: positions of the optional operands that were not given.
      vmaps: recorded vmaps, innermost first: for each array 0 or None. The axes of an
        array stand in front of its dims, outermost first.
      wanted: for each float operand that is present: does it take part in this tangent
        or want its gradient? Empty for the op itself.
    """

    backend: Backend = Backend()
    absent: tuple[int, ...] = ()
    vmaps: Levels = ()
    wanted: tuple[bool, ...] = ()

    def __repr__(self) -> str:
        extra = {"absent": self.absent, "vmaps": self.vmaps, "wanted": self.wanted}
        return " ".join(
            [repr(self.backend), *(f"{k}={v}" for k, v in extra.items() if v)]
        )


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

        return apply_vmaps(unbatched, call.vmaps)(*arrays)

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

        return apply_vmaps(unbatched, call.vmaps)(*arrays)

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
        unbatched_call = Call(call.backend, call.absent)

        def unbatched(*arrays):
            tangents, operands, _ = self.split(arrays, call)
            f = with_fixed(
                functools.partial(self.op.evaluate, call=unbatched_call, **static),
                operands,
                wanted,
            )
            dots = jax.jvp(f, tuple(operands[i] for i in wanted), tuple(tangents))[1]
            return [d for d, r in zip(dots, self.op.results, strict=True) if r.is_float]

        return apply_vmaps(unbatched, call.vmaps)(*arrays)

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
            ad.primitive_jvps[p.fwd] = functools.partial(jvp_of_fwd, p)
            partial_eval.dce_rules[p.fwd] = functools.partial(drop_residuals, p)
        p.bwd = Backward(bwd, p, len(residuals))
        register(p.bwd)
        partial_eval.dce_rules[p.bwd] = drop_gradients
        if linear:
            ad.primitive_jvps[p] = functools.partial(jvp_of_linear, p)
            ad.primitive_transposes[p] = functools.partial(transpose_of_linear, p)
        else:
            results = p.results if p.bwd.takes_results else ()
            p.tangent = Tangent(p, (*results, *residuals))
            register(p.tangent)
            ad.primitive_jvps[p] = functools.partial(jvp_of_op, p)
            ad.primitive_transposes[p.tangent] = functools.partial(
                transpose_of_tangent, p
            )
    elif fwd is not None or linear:
        raise TypeError(f"kernel_primitive: {p.name} has fwd= or linear= but no bwd=.")
    REGISTRY[p.name] = p
    return p


def register(p: KernelPrimitive | Tangent) -> None:
    """The rules that every member of a family shares."""
    p.def_impl(functools.partial(xla.apply_primitive, p))
    p.def_abstract_eval(functools.partial(abstract_eval, p))
    batching.primitive_batchers[p] = functools.partial(batch, p)
    ad.primitive_jvps[p] = functools.partial(jvp_by_reference, p)
    mlir.register_lowering(p, functools.partial(lower_reference, p))


# Evaluation.


def same_manual_axes(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Inside shard_map: lets every operand vary over the axes that any varies over."""

    def varying(x):
        return jax.typeof(x).manual_axis_type.varying

    every = frozenset().union(*map(varying, arrays))
    return [
        jax.lax.pcast(x, tuple(sorted(every - varying(x))), to="varying")
        if every - varying(x)
        else x
        for x in arrays
    ]


def with_absent(arrays: Sequence, absent: tuple[int, ...]) -> list:
    """The arrays with None put back where an optional operand was not given."""
    full = list(arrays)
    for i in absent:
        full.insert(i, None)
    return full


def without(items: Sequence, absent: tuple[int, ...]) -> list:
    return [x for i, x in enumerate(items) if i not in absent]


def with_fixed(f: Callable, arrays: Sequence, free: Sequence[int]) -> Callable:
    """`f` as a function of the arrays at the positions `free`, the others held."""

    def of_free(*values):
        full = list(arrays)
        for i, v in zip(free, values, strict=True):
            full[i] = v
        return f(*full)

    return of_free


def apply_vmaps(f: Callable, vmaps: Levels) -> Callable:
    """`f` under the recorded vmaps, with the promotion that references are written for.

    What the user forbids in his own code, by `jax_numpy_rank_promotion` and
    `jax_numpy_dtype_promotion`, is not forbidden here.
    """
    for axes in vmaps:
        f = jax.vmap(f, in_axes=axes)

    def promoting(*arrays):
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return f(*arrays)

    return promoting


def float_positions(p: KernelPrimitive, absent: tuple[int, ...]) -> list[int]:
    """Positions of the Float operands among the present ones."""
    return [i for i, a in enumerate(without(p.operands, absent)) if a.is_float]


@functools.lru_cache(maxsize=8192)
def result_avals(
    p: KernelPrimitive | Tangent, avals: tuple, params: tuple, context: tuple
) -> tuple:
    del context  # part of the key: the mesh and x64 mode change what tracing gives
    f = functools.partial(p.evaluate, **dict(params))
    return tuple(jax.make_jaxpr(f)(*avals).out_avals)


def abstract_eval(p: KernelPrimitive | Tangent, *avals: Any, **params: Any) -> list:
    context = (jax.sharding.get_abstract_mesh(), jax.config.jax_enable_x64)
    return list(result_avals(p, avals, tuple(sorted(params.items())), context))


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


# Batching.


def batch(p, args: Sequence, axes: Sequence[int | None], *, call: Call, **static):
    """Folds the new axis into `...` where that is exact, else records it."""
    operands, results = p.array_annotations(call)
    mapped = [a is not None for a in axes]
    foldable = [a.has_leading for a in operands] == mapped and all(
        r.has_leading for r in results
    )
    if foldable:
        depth = [  # recorded axes stand in front of the leading dims
            sum(level[i] is not None for level in call.vmaps) for i in range(len(args))
        ]
        moved = [
            x if a is None else jnp.moveaxis(x, a, n)
            for x, a, n in zip(args, axes, depth, strict=True)
        ]
        out = p.bind(*moved, call=call, **static)
        return out, [len(call.vmaps)] * len(out)
    moved = [
        x if a is None else jnp.moveaxis(x, a, 0)
        for x, a in zip(args, axes, strict=True)
    ]
    level = tuple(0 if m else None for m in mapped)
    recorded = dataclasses.replace(call, vmaps=(*call.vmaps, level))
    out = p.bind(*moved, call=recorded, **static)
    return out, [0] * len(out)


# Differentiation.


def is_zero(tangent: Any) -> bool:
    return type(tangent) is ad.Zero


def zero_tangent(x: jax.Array) -> ad.Zero:
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def jvp_of_reference(p, primals: Sequence, tangents: Sequence, params: dict) -> list:
    """Result tangents of `p` by tracing its meaning; ad.Zero for integer results."""
    moving = [i for i, t in enumerate(tangents) if not is_zero(t)]
    f = with_fixed(functools.partial(p.evaluate, **params), primals, moving)
    y, dots = jax.jvp(
        f, tuple(primals[i] for i in moving), tuple(tangents[i] for i in moving)
    )
    return [
        zero_tangent(v) if d.dtype == jax.dtypes.float0 else d
        for v, d in zip(y, dots, strict=True)
    ]


def jvp_by_reference(p, primals, tangents, **params):
    return p.bind(*primals, **params), jvp_of_reference(p, primals, tangents, params)


def result_tangents(
    p: KernelPrimitive, primals, results, residuals, tangents, call: Call, static: dict
) -> list:
    """Binds the tangent primitive for the operands that have a tangent."""
    assert p.tangent is not None and p.bwd is not None
    floats = float_positions(p, call.absent)
    wanted = tuple(not is_zero(tangents[i]) for i in floats)
    moving = [i for i, w in zip(floats, wanted, strict=True) if w]
    if not moving:
        return [zero_tangent(y) for y in results]
    saved = [*(results if p.bwd.takes_results else ()), *residuals]
    vmaps = tuple(
        (*(axes[i] for i in moving), *axes, *(0,) * len(saved)) for axes in call.vmaps
    )
    dots = iter(
        p.tangent.bind(
            *(tangents[i] for i in moving),
            *primals,
            *saved,
            call=dataclasses.replace(call, vmaps=vmaps, wanted=wanted),
            **static,
        )
    )
    return [
        next(dots) if r.is_float else zero_tangent(y)
        for r, y in zip(p.results, results, strict=True)
    ]


def jvp_of_op(p: KernelPrimitive, primals, tangents, *, call: Call, **static):
    out = (p.fwd or p).bind(*primals, call=call, **static)
    results, residuals = out[: len(p.results)], out[len(p.results) :]
    dots = result_tangents(p, primals, results, residuals, tangents, call, static)
    return results, dots


def jvp_of_fwd(p: KernelPrimitive, primals, tangents, *, call: Call, **static):
    assert p.fwd is not None
    out = p.fwd.bind(*primals, call=call, **static)
    n = len(p.results)
    dots = result_tangents(p, primals, out[:n], out[n:], tangents, call, static)
    params = {"call": call, **static}
    return out, dots + jvp_of_reference(p.fwd, primals, tangents, params)[n:]


def transpose_of_tangent(p: KernelPrimitive, cotangents, *args, call: Call, **static):
    assert p.tangent is not None
    tangents, operands, saved = p.tangent.split(args, call)
    fixed = len(operands) + len(saved)
    undefined = [ad.is_undefined_primal(t) for t in tangents]
    if all(map(is_zero, cotangents)):
        zeros = [
            ad.Zero(t.aval) if u else None
            for t, u in zip(tangents, undefined, strict=True)
        ]
        return zeros + [None] * fixed
    asked = iter(undefined)
    wanted = tuple(w and next(asked) for w in call.wanted)
    num = len(tangents)
    axes_of = [
        p.tangent.split(level, call) for level in call.vmaps
    ]  # (tangents, operands, saved) at each recorded vmap
    grads = bind_backward(
        p,
        operands,
        saved,
        cotangents,
        [(own, kept) for _, own, kept in axes_of],
        dataclasses.replace(call, vmaps=(), wanted=wanted),
        static,
    )
    out: list = [None] * (num + fixed)
    for i in (i for i, u in enumerate(undefined) if u):
        out[i] = sum_unmapped(next(grads), [axes[i] for axes, _, _ in axes_of])
    return out


def bind_backward(p, operands, saved, cotangents, axes, call: Call, static):
    """Binds `bwd`; yields the wanted gradients, each with all recorded vmaps in front.

    `axes` has, for each recorded vmap, those of the operands and of the saved values;
    `call.wanted` is for each present float operand among the targets.
    """
    bwd: Backward = p.bwd
    given = [i for i in range(len(p.operands)) if i not in call.absent]
    at = {i: k for k, i in enumerate(given)}  # position of an operand among the present
    cts = [
        ad.instantiate_zeros(ct) for ct in cotangents if not is_integer_cotangent(ct)
    ]
    takes = [at[i] for i in bwd.operand_positions if i in at]
    absent = tuple(k for k, i in enumerate(bwd.operand_positions) if i not in at)
    vmaps = tuple(
        (*(own[k] for k in takes), *kept, *(0,) * len(cts)) for own, kept in axes
    )
    present = iter(call.wanted)
    wanted = tuple(i in at and next(present) for i in bwd.targets)
    arrays = same_manual_axes([*(operands[k] for k in takes), *saved, *cts])
    return iter(
        bwd.bind(
            *arrays,
            call=Call(call.backend, absent, vmaps, wanted),
            **static,
        )
    )


def is_integer_cotangent(ct: Any) -> bool:
    return is_zero(ct) and ct.aval.dtype == jax.dtypes.float0


def sum_unmapped(gradient: jax.Array, axes: Sequence[int | None]) -> jax.Array:
    """An operand that a vmap does not map gets its gradient summed over that level."""
    levels = tuple(k for k, a in enumerate(reversed(axes)) if a is None)
    return gradient.sum(levels) if levels else gradient


def jvp_of_linear(p: KernelPrimitive, primals, tangents, *, call: Call, **static):
    """The op on the tangents of its linear operands, plus the reference for others."""
    operands = without(p.operands, call.absent)
    linear = [a.name in p.linear for a in operands]
    out = p.bind(*primals, call=call, **static)
    dots = None
    if not all(is_zero(t) for t, lin in zip(tangents, linear, strict=True) if lin):
        moved = [
            ad.instantiate_zeros(t) if lin else x
            for x, t, lin in zip(primals, tangents, linear, strict=True)
        ]
        dots = p.bind(*same_manual_axes(moved), call=call, **static)
    others = [
        zero_tangent(x) if lin else t
        for x, t, lin in zip(primals, tangents, linear, strict=True)
    ]
    if all(map(is_zero, others)):
        return out, dots if dots is not None else [zero_tangent(y) for y in out]
    rest = jvp_of_reference(p, primals, others, {"call": call, **static})
    return out, rest if dots is None else [
        ad.add_tangents(a, b) for a, b in zip(dots, rest, strict=True)
    ]


def transpose_of_linear(p: KernelPrimitive, cotangents, *args, call: Call, **static):
    undefined = [ad.is_undefined_primal(x) for x in args]
    if all(map(is_zero, cotangents)):
        return [
            ad.Zero(x.aval) if u else None for x, u in zip(args, undefined, strict=True)
        ]
    operands = without(p.operands, call.absent)
    wanted = tuple(
        u for u, a in zip(undefined, operands, strict=True) if a.name in p.linear
    )
    grads = bind_backward(
        p,
        args,
        (),
        cotangents,
        [(level, ()) for level in call.vmaps],
        dataclasses.replace(call, vmaps=(), wanted=wanted),
        static,
    )
    return [
        sum_unmapped(next(grads), [level[i] for level in call.vmaps]) if u else None
        for i, u in enumerate(undefined)
    ]


# Dead code. The arguments are (used, eqn) in jax 0.11, (used, live, eqn) in 0.12.


def drop_residuals(p: KernelPrimitive, used: Sequence[bool], *rest):
    """`fwd` whose residuals nobody reads is the op itself."""
    eqn = rest[-1]
    n = len(p.results)
    if not any(used):
        return [False] * len(eqn.invars), None
    if any(used[n:]):
        return [True] * len(eqn.invars), eqn
    return [True] * len(eqn.invars), eqn.replace(primitive=p, outvars=eqn.outvars[:n])


def drop_gradients(used: Sequence[bool], *rest):
    """`bwd` computes only the gradients that somebody reads."""
    eqn = rest[-1]
    if not any(used):
        return [False] * len(eqn.invars), None
    call = eqn.params["call"]
    asked = iter(used)
    wanted = tuple(w and next(asked) for w in call.wanted)
    outvars = [v for v, u in zip(eqn.outvars, used, strict=True) if u]
    params = {**eqn.params, "call": dataclasses.replace(call, wanted=wanted)}
    return [True] * len(eqn.invars), eqn.replace(outvars=outvars, params=params)
