"""AdamW over a whole tree in one launch, for leaves of any sizes.

A program updates BLOCK elements of one leaf, which it finds by halving: its number
against the first programs of leaves. The kernel's parameters are the pointers of all
leaves, 7 a leaf: 584 leaves fill the 32764 bytes that drivers pass since CUDA 12.1, 72
the 4096 of older ones. Results have pointers of their own, since XLA may give a slice
of a larger array another buffer. Bytes: 28 a parameter in float32, of which 16 are
read. The results lie in the buffers of params, m and v.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.primitives.optim.adamw import one_minus_power
from jaxkern.triton.block_sizes import max_parameter_bytes
from jaxkern.triton.triton_call import constexpr_function, jit, like, tl, triton_call
from jaxkern.triton.triton_call import unsupported as unsupported_anywhere

POINTERS = 7  # of a leaf
OTHERS = 3  # parameters: the scalars, and two that Triton adds to every kernel
BLOCK, NUM_WARPS = 2048, 8  # elements of a program


def unsupported(learning_rate: Any, step: Any, **named: Any) -> str | None:
    """A reason in words, or None; the two scalars may be float64."""
    return unsupported_anywhere(**named)


@constexpr_function
def distinct_move(n):
    return f"mov.b32 $0, {n};"


@constexpr_function
def first(numbers, n):
    return numbers[:n]


@constexpr_function
def rest(numbers, n):
    return numbers[n:]


@jit
def divided(leaves, N: tl.constexpr):
    """Lists of pointers, each in two: N, and the rest."""
    p, g, m, v, new_p, new_m, new_v = leaves
    return (
        (p[:N], g[:N], m[:N], v[:N], new_p[:N], new_m[:N], new_v[:N]),
        (p[N:], g[N:], m[N:], v[N:], new_p[N:], new_m[N:], new_v[N:]),
    )


@jit
def leaf_of(program, leaves, BEGINS: tl.constexpr, SIZES: tl.constexpr):
    """(pointers, first program, size) of the leaf of a program, by halving.

    Tuples take no index known at run time only. The branches are the same for a whole
    program: a comparison for each half, and the pointers of one leaf are read. A call
    is given its own leaves and no others, else time to compile would be quadratic.
    """
    if len(BEGINS) == 1:
        # the move differs from leaf to leaf and may not be moved; else the compiler
        # merges the leaves into one block and selects its operands one by one
        begin = tl.inline_asm_elementwise(
            distinct_move(BEGINS[0]), "=r", [], tl.int32, is_pure=False, pack=1
        )
        p, g, m, v, new_p, new_m, new_v = leaves
        pointers = (p[0], g[0], m[0], v[0], new_p[0], new_m[0], new_v[0])
        return pointers, begin, tl.full([], SIZES[0], tl.int64)
    else:
        H: tl.constexpr = len(BEGINS) // 2
        low, high = divided(leaves, H)
        if program < BEGINS[H]:
            found = leaf_of(program, low, first(BEGINS, H), first(SIZES, H))
        else:
            found = leaf_of(program, high, rest(BEGINS, H), rest(SIZES, H))
        return found


@jit
def update_block(
    pointers,
    scalars,
    at,
    inside,
    OPTIONS: tl.constexpr,
):
    param_ptr, grad_ptr, m_ptr, v_ptr, new_param_ptr, new_m_ptr, new_v_ptr = pointers
    learning_rate, m_scale, v_scale = scalars
    B1: tl.constexpr = OPTIONS[0]
    B2: tl.constexpr = OPTIONS[1]
    EPS: tl.constexpr = OPTIONS[2]
    EPS_ROOT: tl.constexpr = OPTIONS[3]
    WEIGHT_DECAY: tl.constexpr = OPTIONS[4]
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
def update_leaves(
    program,
    leaves,
    scalars,
    BEGINS: tl.constexpr,
    SIZES: tl.constexpr,
    OPTIONS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The block of a program, among leaves of the same dtypes."""
    found, begin, size = leaf_of(program, leaves, BEGINS, SIZES)
    p, g, m, v, new_p, new_m, new_v = found
    start = (program - begin).to(tl.int64) * BLOCK
    pointers = (
        p + start,
        g + start,
        m + start,
        v + start,
        new_p + start,
        new_m + start,
        new_v + start,
    )
    count = tl.minimum(size - start, BLOCK).to(tl.int32)
    at = tl.arange(0, BLOCK)
    if count == BLOCK:  # without a mask loads are 16 bytes wide
        update_block(pointers, scalars, at, None, OPTIONS)
    else:
        inside = at < count
        update_block(pointers, scalars, at, inside, OPTIONS)


@jit
def update_groups(
    program,
    leaves,
    scalars,
    GROUPS: tl.constexpr,
    BEGINS: tl.constexpr,
    SIZES: tl.constexpr,
    OPTIONS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """GROUPS: how many leaves have the same dtypes, group after group."""
    N: tl.constexpr = GROUPS[0]
    if len(GROUPS) == 1:
        update_leaves(program, leaves, scalars, BEGINS, SIZES, OPTIONS, BLOCK)
    else:
        low, high = divided(leaves, N)
        if program < BEGINS[N]:
            B: tl.constexpr = first(BEGINS, N)
            update_leaves(program, low, scalars, B, first(SIZES, N), OPTIONS, BLOCK)
        else:
            update_groups(
                program,
                high,
                scalars,
                rest(GROUPS, 1),
                rest(BEGINS, N),
                rest(SIZES, N),
                OPTIONS,
                BLOCK,
            )


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
    GROUPS: tl.constexpr,
    BEGINS: tl.constexpr,
    SIZES: tl.constexpr,
    B1: tl.constexpr,
    B2: tl.constexpr,
    EPS: tl.constexpr,
    EPS_ROOT: tl.constexpr,
    WEIGHT_DECAY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    scalars = (
        tl.load(scalars_ptr),
        tl.load(scalars_ptr + 1),
        tl.load(scalars_ptr + 2),
    )
    update_groups(
        tl.program_id(0),
        (params, grads, ms, vs, new_params, new_ms, new_vs),
        scalars,
        GROUPS,
        BEGINS,
        SIZES,
        (B1, B2, EPS, EPS_ROOT, WEIGHT_DECAY),
        BLOCK,
    )


def launches(*lists: Sequence[jax.Array]) -> Iterator[list[int]]:
    """Positions of leaves that share a launch, side by side where dtypes agree."""
    alike: dict[tuple, list[int]] = {}
    for i, leaf in enumerate(zip(*lists, strict=True)):
        if leaf[0].size:
            alike.setdefault(tuple(x.dtype for x in leaf), []).append(i)
    most = (max_parameter_bytes() // 8 - OTHERS) // POINTERS
    leaves = itertools.chain.from_iterable(alike.values())
    while launch := list(itertools.islice(leaves, most)):
        yield launch


def sizes_of_groups(*lists: Sequence[jax.Array]) -> tuple[int, ...]:
    """How many leaves side by side have the same dtypes."""
    dtypes = [tuple(x.dtype for x in leaf) for leaf in zip(*lists, strict=True)]
    return tuple(len(list(same)) for _, same in itertools.groupby(dtypes))


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
    for launch in launches(params, grads, m, v):
        given = [[leaves[i] for i in launch] for leaves in (params, grads, m, v)]
        n = len(launch)
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
            GROUPS=sizes_of_groups(*given),
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
        for k, i in enumerate(launch):
            new_params[i], new_m[i], new_v[i] = out[k::n]
    return new_params, new_m, new_v
