"""`portable`: a function in which nothing is left that a plugin would compute wrongly.

Each trap of a plugin (`Plugin.traps`) that can be avoided has one rewrite here, of
equations of a jaxpr. So the references stay as they are on every other platform.

    scatter_inside      indices are clamped; a dropped update goes to a spare place
    sort_by_one_key     one stable sort after the other, the last key first
    exact_integer_dot   partial sums of few enough terms are added as integers
    dot_keeps_dtype     the factors get the dtype of the product first
    one_contracted_dim  dims are merged before the product
    max_pool_only       a running sum becomes an associative scan
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from jaxkern.lowering.apple.plugins import PLUGINS

Rewrite = Callable[..., list | None]  # (eqn, *operands) -> results, None: keep it
EXACT = 2**24  # float32 holds every integer up to here


def portable(f: Callable, platform: str) -> Callable:
    """`f` as the plugin of an Apple platform computes it rightly.

    jaxkern's operators are rewritten wherever they are lowered; use it on functions of
    your own that `check` complains about. It is no function to differentiate: take the
    gradient first.

    Args:
      f: of arrays or pytrees of them.
      platform: "mps", "metal", "mtl" or "METAL".

    Returns:
      A function of the same arguments with the same results.
    """
    rewrites = rewrites_for(platform)

    def rewritten(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(f, return_shape=True)(*args)
        if not is_touched(closed, rewrites):
            return f(*args)
        out = evaluate(closed, rewrites, *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return rewritten


@functools.cache
def rewrites_for(platform: str) -> dict[str, tuple[Rewrite, ...]]:
    """Rewrites by the name of JAX's primitive."""
    found: dict[str, tuple[Rewrite, ...]] = {}
    for trap in PLUGINS[platform].traps:
        for name, rewrite in REWRITES.get(trap, {}).items():
            found[name] = (*found.get(name, ()), rewrite)
    return found


# Jaxprs.

INLINED = ("jit", "closed_call", "custom_jvp_call", "custom_vjp_call")
BODIES = (
    {  # parameters that hold the jaxprs of an equation
        "scan": ("jaxpr",),
        "while": ("cond_jaxpr", "body_jaxpr"),
        "cond": ("branches",),
        "remat2": ("jaxpr",),
        "jit": ("jaxpr",),
    }
    | dict.fromkeys(INLINED[1:], ("call_jaxpr",))
)


def bodies(eqn: Any) -> Iterator[Any]:
    for name in BODIES.get(eqn.primitive.name, ()):
        yield from jax.tree.leaves(eqn.params[name], is_leaf=is_jaxpr)


def is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns")


def is_touched(jaxpr: Any, rewrites: dict) -> bool:
    """Does it have an equation that a rewrite might change?"""
    return any(
        eqn.primitive.name in rewrites
        or any(is_touched(body, rewrites) for body in bodies(eqn))
        for eqn in jaxpr.eqns
    )


def evaluate(closed: Any, rewrites: dict, *args: Any) -> list:
    """The results of a jaxpr, rewritten, also in the bodies of loops."""
    jaxpr = getattr(closed, "jaxpr", closed)
    known = [*getattr(closed, "consts", ()), *args]
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], known, strict=True))

    def value(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else values[v]

    for eqn in jaxpr.eqns:
        operands = [value(v) for v in eqn.invars]
        out = None
        for rewrite in rewrites.get(eqn.primitive.name, ()):
            out = rewrite(eqn, *operands) if out is None else out
        if out is None:
            out = bind(eqn, rewrites, operands)
        values |= zip(eqn.outvars, out, strict=True)
    return [value(v) for v in jaxpr.outvars]


def bind(eqn: Any, rewrites: dict, operands: list) -> list:
    """The equation itself, its bodies rewritten."""
    params, name = dict(eqn.params), eqn.primitive.name
    run = functools.partial(functools.partial, evaluate)
    if name in INLINED:  # the function is lowered, not differentiated
        (body,) = bodies(eqn)
        return evaluate(body, rewrites, *operands)
    if name == "remat2":
        options = {k: params[k] for k in ("prevent_cse", "policy")}
        return jax.checkpoint(run(params["jaxpr"], rewrites), **options)(*operands)

    def rebuilt(body: Any) -> Any:
        return jax.make_jaxpr(run(body, rewrites))(*body.in_avals)

    for body in BODIES.get(name, ()):
        params[body] = jax.tree.map(rebuilt, params[body], is_leaf=is_jaxpr)
    out = eqn.primitive.bind(*operands, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


# The rewrites.

SCATTERS = {
    "scatter": lax.scatter,
    "scatter-add": lax.scatter_add,
    "scatter-mul": lax.scatter_mul,
    "scatter-min": lax.scatter_min,
    "scatter-max": lax.scatter_max,
}


def scatter_inside(scatter: Callable, eqn: Any, x, indices, updates) -> list | None:
    """Updates that lie outside go to a spare place behind the first indexed dim."""
    params = eqn.params
    numbers, mode = params["dimension_numbers"], params["mode"]
    dims = [int(d) for d in numbers.scatter_dims_to_operand_dims]
    if mode == lax.GatherScatterMode.CLIP or not dims:
        return None
    window = window_sizes(numbers, x.ndim, updates.shape)
    last = [x.shape[d] - window[d] for d in dims]  # that an index may be
    columns = [indices[..., k].astype(jnp.int32) for k in range(len(dims))]
    drops = mode == lax.GatherScatterMode.FILL_OR_DROP
    size = x.shape[dims[0]]
    if drops:
        inside = functools.reduce(
            jnp.logical_and,
            ((c >= 0) & (c <= n) for c, n in zip(columns, last, strict=True)),
        )
        columns[0] = jnp.where(inside, columns[0], size)
        last[0] = size
        ends = [(0, window[d] if d == dims[0] else 0, 0) for d in range(x.ndim)]
        x = lax.pad(x, jnp.zeros((), x.dtype), ends)
    clamped = jnp.stack(columns, axis=-1)
    limits = [jnp.full_like(c, max(n, 0)) for c, n in zip(columns, last, strict=True)]
    clamped = lax.clamp(jnp.int32(0), clamped, jnp.stack(limits, axis=-1))
    out = scatter(
        x,
        clamped,
        updates,
        numbers,
        # several dropped updates share the spare place
        indices_are_sorted=params["indices_are_sorted"] and not drops,
        unique_indices=params["unique_indices"] and not drops,
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )
    return [lax.slice_in_dim(out, 0, size, axis=dims[0])]


def window_sizes(numbers: Any, ndim: int, shape: tuple[int, ...]) -> list[int]:
    """Sizes of what one update covers, for each dim of the operand."""
    single = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    covered = iter(numbers.update_window_dims)
    return [1 if d in single else shape[next(covered)] for d in range(ndim)]


def sort_by_one_key(eqn: Any, *operands) -> list | None:
    num_keys = eqn.params["num_keys"]
    if num_keys == 1:
        return None
    operands = list(operands)
    for k in reversed(range(num_keys)):
        key, *rest = lax.sort(
            [operands[k], *operands[:k], *operands[k + 1 :]],
            dimension=eqn.params["dimension"],
            is_stable=True,
            num_keys=1,
        )
        operands = [*rest[:k], key, *rest[k:]]
    return operands


LARGEST = {jnp.dtype("int8"): 128, jnp.dtype("uint8"): 255}  # magnitudes


def exact_terms(left: jnp.dtype, right: jnp.dtype) -> int:
    """How many products float32 adds exactly; 0 if the dtypes do not say."""
    if not {left, right} <= set(LARGEST):
        return 0
    return EXACT // (LARGEST[left] * LARGEST[right])


def exact_integer_dot(eqn: Any, left, right) -> list | None:
    ((lefts, rights), _) = eqn.params["dimension_numbers"]
    terms = exact_terms(left.dtype, right.dtype)
    if len(lefts) != 1 or not terms or left.shape[lefts[0]] <= terms:
        return None
    (i,), (j,) = lefts, rights
    size = left.shape[i]
    parts = [
        dot(
            eqn,
            lax.slice_in_dim(left, start, min(start + terms, size), axis=i),
            lax.slice_in_dim(right, start, min(start + terms, size), axis=j),
        )
        for start in range(0, size, terms)
    ]
    return [functools.reduce(jnp.add, parts)]


def dot(eqn: Any, left, right, numbers: Any = None) -> jax.Array:
    return lax.dot_general(
        left,
        right,
        numbers or eqn.params["dimension_numbers"],
        precision=eqn.params["precision"],
        preferred_element_type=eqn.params["preferred_element_type"],
    )


def dot_keeps_dtype(eqn: Any, left, right) -> list | None:
    dtype = eqn.params["preferred_element_type"]
    if dtype != jnp.float32 or left.dtype == right.dtype == dtype:
        return None
    return [dot(eqn, left.astype(dtype), right.astype(dtype))]


def one_contracted_dim(eqn: Any, left, right) -> list | None:
    """Moves the contracted dims behind the others and merges them."""
    contracted, batched = eqn.params["dimension_numbers"]
    if len(contracted[0]) <= 1:
        return None
    (left, a, left_batch), (right, b, right_batch) = (
        merged_last(x, own, batch)
        for x, own, batch in zip((left, right), contracted, batched, strict=True)
    )
    return [dot(eqn, left, right, (((a,), (b,)), (left_batch, right_batch)))]


def merged_last(x, merged: tuple, batch: tuple) -> tuple[jax.Array, int, list[int]]:
    """x with some dims as one behind the others, where that is, where `batch` is."""
    kept = [d for d in range(x.ndim) if d not in merged]
    shape = [*(x.shape[d] for d in kept), math.prod(x.shape[d] for d in merged)]
    y = x.transpose(*kept, *merged).reshape(shape)
    return y, len(kept), [kept.index(d) for d in batch]


def running(combine: Callable, eqn: Any, x) -> list:
    axis, reverse = eqn.params["axis"], eqn.params["reverse"]
    return [lax.associative_scan(combine, x, reverse=reverse, axis=axis)]


REWRITES: dict[str, dict[str, Rewrite]] = {  # by trap and primitive
    "scatter_inside": {
        name: functools.partial(scatter_inside, scatter)
        for name, scatter in SCATTERS.items()
    },
    "sort_by_one_key": {"sort": sort_by_one_key},
    "exact_integer_dot": {"dot_general": exact_integer_dot},
    "dot_keeps_dtype": {"dot_general": dot_keeps_dtype},
    "one_contracted_dim": {"dot_general": one_contracted_dim},
    "max_pool_only": {
        "cumsum": functools.partial(running, lax.add),
        "cumprod": functools.partial(running, lax.mul),
        "cummax": functools.partial(running, lax.max),
        "cummin": functools.partial(running, lax.min),
    },
}
