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

The members of a family are in `family.py`, their rules in `rules.py`, what an equation
records in `call.py`. Dims are written and checked as `declared_dims.py` says.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval, xla

from jaxkern.primitives import rules
from jaxkern.primitives.declared_dims import Annotated
from jaxkern.primitives.family import Backward, KernelPrimitive, Tangent

# every declared op, in order of declaration
REGISTRY: dict[str, KernelPrimitive] = {}
# by platform: makes of a reference one that the platform computes rightly
REWRITES: dict[str, Callable[[Callable], Callable]] = {}


def at_least_f32(x: jax.Array) -> jax.Array:
    """`x` in float32, or in float64 if it is: arithmetic never runs below float32."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def kernel_primitive(
    reference: Callable,
    *,
    fwd: Callable | None = None,
    bwd: Callable | None = None,
    replicated: Sequence[str] = (),
    bwd_replicated: Sequence[str] = (),
    linear: Sequence[str] = (),
    calls: Sequence[KernelPrimitive] = (),
    of_reference: Sequence[str] = (),
) -> KernelPrimitive:
    """Declares an op by its mathematics and returns its primitive.

    Args:
      reference: `(operands..., *, options) -> result | tuple of results`. Operands and
        results are annotated with jaxtyping dims, `| None` marks an optional operand.
        Options are static and hashable. Many of either may be a record: `records.py`.
      fwd: the same arguments, returns `(*results, *residuals)`. Leave it out where the
        operands and results are all that `bwd` needs.
      bwd: `([operands by name,] [all results,] [residuals,] cotangents of the float
        results, *, options)`, returns one gradient for each Float operand in order,
        None for an absent one. An operand that it does not name is not passed to it.
        Without it the gradient is that of the reference.
      replicated: dims that a kernel needs whole on each device, because a result
        depends on all of them otherwise than by a sum.
      bwd_replicated: more dims that `bwd` needs whole; "..." are the leading ones. A
        gradient that is made of a sum over them is not to be summed again.
      linear: names of operands in which the op is linear, jointly. Then the jvp is the
        op itself and `bwd`, which may not name these operands, is its transpose and
        returns gradients for these operands only; others get theirs from the reference.
      calls: ops with kernels that `fwd` or `bwd` call.
      of_reference: options that only say how the references compute, and have a
        default there; kernels do not get them.

    Returns:
      The primitive. Calling it checks the arguments and binds it.

    Raises:
      ValueError: an op of this name is declared already.
      TypeError: an operand or result without dims, or `bwd` has parameters that are
        none of those.

    Example:
      >>> from jaxkern.primitives.kernel_primitive import kernel_primitive
      >>> from jaxtyping import Array, Float
      >>> def cube_reference(x: Float[Array, "... d"]) -> Float[Array, "... d"]:
      ...     return x**3
      >>> cube_p = kernel_primitive(cube_reference)
      >>> jax.vmap(jax.grad(lambda x: cube_p(x).sum()))(jnp.array([[1.0], [2.0]]))
      Array([[ 3.],
             [12.]], dtype=float32)
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
        p.bwd = Backward(bwd, p, len(residuals), bwd_replicated)
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
    for member in (p, p.fwd, p.bwd):
        if member is not None:
            member.of_reference = tuple(of_reference)
    for called in calls:
        called.callers += tuple(q for q in (p, p.fwd, p.bwd) if q is not None)
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
