"""AdamW over a whole tree: one launch for up to 64 leaves of any sizes.

A program updates BLOCK elements of one leaf, which it finds by halving: its number
against six first programs of leaves. The kernel's parameters are the pointers of all
leaves, 7 a leaf, and 64 leaves fill the 4 KiB that every driver passes: 300 leaves are
5 launches, about 10 us, where a launch per leaf costs 600. Bytes: 28 a parameter in
float32, of which 16 are read. The results lie in the buffers of params, m and v.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.primitives.optim.adamw import one_minus_power
from jaxkern.triton.triton_call import constexpr_function, jit, like, tl, triton_call
from jaxkern.triton.triton_call import unsupported as unsupported_anywhere

MOST_LEAVES = 64  # of one launch
BLOCK, NUM_WARPS = 2048, 8  # elements of a program


def unsupported(learning_rate: Any, step: Any, **named: Any) -> str | None:
    """A reason in words, or None; the two scalars may be float64."""
    return unsupported_anywhere(**named)


@constexpr_function
def distinct_move(n):
    return f"mov.b32 $0, {n};"


@jit
def share_of(
    program,
    leaves,
    BEGINS: tl.constexpr,
    SIZES: tl.constexpr,
    BLOCK: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
):
    """(pointers, count) of a program whose leaf is one of LOW to HIGH, by halving.

    Tuples take no index known at run time only. The branches are the same for a whole
    program: six comparisons, and the pointers of one leaf are read, not of all.
    """
    if HIGH - LOW == 1:
        # the move differs from leaf to leaf and may not be moved; else the compiler
        # merges the leaves into one block and selects its operands one by one
        begin = tl.inline_asm_elementwise(
            distinct_move(BEGINS[LOW]), "=r", [], tl.int32, is_pure=False, pack=1
        )
        first = (program - begin).to(tl.int64) * BLOCK
        pointers = (
            leaves[0][LOW] + first,
            leaves[1][LOW] + first,
            leaves[2][LOW] + first,
            leaves[3][LOW] + first,
            leaves[4][LOW] + first,
            leaves[5][LOW] + first,
            leaves[6][LOW] + first,
        )
        return pointers, tl.minimum(SIZES[LOW] - first, BLOCK).to(tl.int32)
    else:
        MIDDLE: tl.constexpr = (LOW + HIGH) // 2
        if program < BEGINS[MIDDLE]:
            found = share_of(program, leaves, BEGINS, SIZES, BLOCK, LOW, MIDDLE)
        else:
            found = share_of(program, leaves, BEGINS, SIZES, BLOCK, MIDDLE, HIGH)
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
    p = tl.load(param_ptr + at, inside).to(tl.float32)
    g = tl.load(grad_ptr + at, inside).to(tl.float32)
    m = tl.load(m_ptr + at, inside).to(tl.float32)
    v = tl.load(v_ptr + at, inside).to(tl.float32)
    m = B1 * m + (1 - B1) * g
    v = B2 * v + (1 - B2) * g * g
    square = v * v_scale + EPS_ROOT
    root = tl.where(square > 0, tl.sqrt(square), 0.0)
    p -= learning_rate * (m * m_scale / (root + EPS) + WEIGHT_DECAY * p)
    tl.store(new_param_ptr + at, p, inside)
    tl.store(new_m_ptr + at, m, inside)
    tl.store(new_v_ptr + at, v, inside)


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
    BLOCK: tl.constexpr,
):
    leaves = (params, grads, ms, vs, new_params, new_ms, new_vs)
    pointers, count = share_of(
        tl.program_id(0), leaves, BEGINS, SIZES, BLOCK, 0, len(BEGINS)
    )
    scalars = (
        tl.load(scalars_ptr),
        tl.load(scalars_ptr + 1),
        tl.load(scalars_ptr + 2),
    )
    at = tl.arange(0, BLOCK)
    if count == BLOCK:  # without a mask loads are 16 bytes wide
        update_block(pointers, scalars, at, None, B1, B2, EPS, EPS_ROOT, WEIGHT_DECAY)
    else:
        inside = at < count
        update_block(pointers, scalars, at, inside, B1, B2, EPS, EPS_ROOT, WEIGHT_DECAY)


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
            (-(-size // BLOCK) for size in sizes), initial=0
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
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
        for k, i in enumerate(group):
            new_params[i], new_m[i], new_v[i] = out[k::n]
    return new_params, new_m, new_v
