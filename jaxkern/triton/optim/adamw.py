"""AdamW over a whole tree: one launch for up to 64 leaves of any sizes.

A program updates CHUNK elements of one leaf, which it finds by its own number. The
kernel's parameters are the pointers of all leaves, 7 a leaf, and 64 leaves fill the 4
KiB that every driver passes: 300 leaves are 5 launches, about 10 us, where a launch per
leaf costs 600. Bytes: 28 a parameter in float32, of which 16 are read. The results lie
in the buffers of params, m and v.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.primitives.optim.adamw import one_minus_power
from jaxkern.triton.triton_call import jit, like, tl, triton_call
from jaxkern.triton.triton_call import unsupported as unsupported_anywhere

MOST_LEAVES = 64  # of one launch
CHUNK, BLOCK, NUM_WARPS = 16384, 2048, 8  # elements of a program, and at once


def unsupported(learning_rate: Any, step: Any, **named: Any) -> str | None:
    """A reason in words, or None; the two scalars may be float64."""
    return unsupported_anywhere(**named)


@jit
def of_leaf(of_each, program, BEGINS: tl.constexpr):
    """The entry of this program's leaf: tuples take no index known at run time only."""
    found = of_each[0]
    for k in tl.static_range(1, len(BEGINS)):
        found = tl.where(program >= BEGINS[k], of_each[k], found)
    return found


@jit
def update_block(
    pointers,
    scalars,
    at,
    inside,
    B1: tl.constexpr,
    B2: tl.constexpr,
    EPS: tl.constexpr,
    EPS_ROOT: tl.constexpr,
    WEIGHT_DECAY: tl.constexpr,
):
    param_ptr, grad_ptr, m_ptr, v_ptr, new_param_ptr, new_m_ptr, new_v_ptr = pointers
    learning_rate, m_scale, v_scale = scalars
    p = tl.load(param_ptr + at, inside, eviction_policy="evict_first").to(tl.float32)
    g = tl.load(grad_ptr + at, inside, eviction_policy="evict_first").to(tl.float32)
    m = tl.load(m_ptr + at, inside, eviction_policy="evict_first").to(tl.float32)
    v = tl.load(v_ptr + at, inside, eviction_policy="evict_first").to(tl.float32)
    m = B1 * m + (1 - B1) * g
    v = B2 * v + (1 - B2) * g * g
    square = v * v_scale + EPS_ROOT
    root = tl.where(square > 0, tl.sqrt(square), 0.0)
    p -= learning_rate * (m * m_scale / (root + EPS) + WEIGHT_DECAY * p)
    tl.store(new_param_ptr + at, p, inside, eviction_policy="evict_first")
    tl.store(new_m_ptr + at, m, inside, eviction_policy="evict_first")
    tl.store(new_v_ptr + at, v, inside, eviction_policy="evict_first")


@jit
def adamw_kernel(
    params,
    grads,
    ms,
    vs,
    scalars_ptr,
    new_params,
    new_ms,
    new_vs,
    BEGINS: tl.constexpr,
    SIZES: tl.constexpr,
    B1: tl.constexpr,
    B2: tl.constexpr,
    EPS: tl.constexpr,
    EPS_ROOT: tl.constexpr,
    WEIGHT_DECAY: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    first = (program - of_leaf(BEGINS, program, BEGINS)).to(tl.int64) * CHUNK
    count = tl.minimum(of_leaf(SIZES, program, BEGINS) - first, CHUNK).to(tl.int32)
    pointers = (
        of_leaf(params, program, BEGINS) + first,
        of_leaf(grads, program, BEGINS) + first,
        of_leaf(ms, program, BEGINS) + first,
        of_leaf(vs, program, BEGINS) + first,
        of_leaf(new_params, program, BEGINS) + first,
        of_leaf(new_ms, program, BEGINS) + first,
        of_leaf(new_vs, program, BEGINS) + first,
    )
    scalars = (
        tl.load(scalars_ptr),
        tl.load(scalars_ptr + 1),
        tl.load(scalars_ptr + 2),
    )
    columns = tl.arange(0, BLOCK)
    for begin in range(0, CHUNK, BLOCK):
        at = begin + columns
        if begin + BLOCK <= count:  # without a mask loads are 16 bytes wide
            update_block(
                pointers, scalars, at, None, B1, B2, EPS, EPS_ROOT, WEIGHT_DECAY
            )
        elif begin < count:
            update_block(
                pointers, scalars, at, at < count, B1, B2, EPS, EPS_ROOT, WEIGHT_DECAY
            )


def launches(*lists: Sequence[jax.Array]) -> Iterator[list[int]]:
    """Positions of leaves that share a launch: of the same dtypes, at most 64."""
    alike: dict[tuple, list[int]] = {}
    for i, leaf in enumerate(zip(*lists, strict=True)):
        if leaf[0].size:
            alike.setdefault(tuple(x.dtype for x in leaf), []).append(i)
    for group in alike.values():
        for start in range(0, len(group), MOST_LEAVES):
            yield group[start : start + MOST_LEAVES]


def adamw_tree(
    params: list[jax.Array],
    grads: list[jax.Array],
    m: list[jax.Array],
    v: list[jax.Array],
    learning_rate: jax.Array,
    step: jax.Array,
    *,
    b1: float,
    b2: float,
    eps: float,
    eps_root: float,
    weight_decay: float,
) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
    t = step.astype(jnp.float32)
    scales = [1 / one_minus_power(b, t) for b in (b1, b2)]
    scalars = jnp.stack([learning_rate.astype(jnp.float32), *scales])
    new_params, new_m, new_v = list(params), list(m), list(v)
    for group in launches(params, grads, m, v):
        given = [[leaves[i] for i in group] for leaves in (params, grads, m, v)]
        n = len(group)
        sizes = tuple(x.size for x in given[0])
        *begins, programs = itertools.accumulate(
            (-(-size // CHUNK) for size in sizes), initial=0
        )
        out = triton_call(
            adamw_kernel,
            *given,
            scalars,
            out=[list(map(like, given[k])) for k in (0, 2, 3)],
            grid=(programs,),
            aliases=tuple(
                (operand * n + k, result * n + k)
                for operand, result in ((0, 0), (2, 1), (3, 2))
                for k in range(n)
            ),
            BEGINS=tuple(begins),
            SIZES=sizes,
            B1=b1,
            B2=b2,
            EPS=eps,
            EPS_ROOT=eps_root,
            WEIGHT_DECAY=weight_decay,
            CHUNK=CHUNK,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
        for k, i in enumerate(group):
            new_params[i], new_m[i], new_v[i] = out[k::n]
    return new_params, new_m, new_v
