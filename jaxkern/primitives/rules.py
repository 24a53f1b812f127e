"""What JAX's transformations make of a declared op: `kernel_primitive` registers this.

Abstract evaluation traces what the op means. Batching folds the new axis into `...` or
records it. Differentiation binds `fwd`, then `tangent`, whose transpose is `bwd`; of an
op that is linear the jvp is the op itself. Unused residuals and gradients are dropped.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad
from jax.sharding import PartitionSpec as P

from jaxkern.primitives.call import (
    Call,
    same_manual_axes,
    with_fixed,
    without,
)
from jaxkern.primitives.family import (
    Backward,
    KernelPrimitive,
    Tangent,
    float_positions,
)


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
        if call.cuts:  # of gradients: the new dim is the first behind recorded axes
            at = zip(args, axes, strict=True)
            specs = [(jax.typeof(x).sharding.spec, a) for x, a in at]
            cut = next((s[a] for s, a in specs if a is not None and s[a]), None)
            cuts = tuple(P(cut, *spec) for spec in call.cuts)
            call = dataclasses.replace(call, cuts=cuts)
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
    primals = [jnp.asarray(x) for x in primals]  # a constant comes as a number
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
    p: KernelPrimitive,
    primals,
    results,
    residuals,
    tangents,
    call: Call,
    static: dict,
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
    cuts = cuts_of_gradients(tangents, [axes for axes, _, _ in axes_of])
    grads = bind_backward(
        p,
        operands,
        saved,
        cotangents,
        [(own, kept) for _, own, kept in axes_of],
        dataclasses.replace(call, vmaps=(), wanted=wanted, cuts=cuts),
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
            call=dataclasses.replace(call, absent=absent, vmaps=vmaps, wanted=wanted),
            **static,
        )
    )


def is_integer_cotangent(ct: Any) -> bool:
    return is_zero(ct) and ct.aval.dtype == jax.dtypes.float0


def cuts_of_gradients(args: Sequence, levels: Sequence[Sequence]) -> tuple[P, ...]:
    """On an explicit mesh how each gradient is to be cut: as its operand."""
    asked = [
        (i, x.aval.to_ct_aval())
        for i, x in enumerate(args)
        if ad.is_undefined_primal(x)
    ]
    if not any(aval.sharding.mesh.explicit_axes for _, aval in asked):
        return ()
    depth = [sum(level[i] is not None for level in levels) for i, _ in asked]
    return tuple(
        P(*aval.sharding.spec[n:]) for (_, aval), n in zip(asked, depth, strict=True)
    )


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
    cuts = cuts_of_gradients(args, call.vmaps)
    grads = bind_backward(
        p,
        args,
        (),
        cotangents,
        [(level, ()) for level in call.vmaps],
        dataclasses.replace(call, vmaps=(), wanted=wanted, cuts=cuts),
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
    cuts = tuple(c for c, u in zip(call.cuts, used, strict=False) if u)
    call = dataclasses.replace(call, wanted=wanted, cuts=cuts)
    params = {**eqn.params, "call": call}
    return [True] * len(eqn.invars), eqn.replace(outvars=outvars, params=params)
