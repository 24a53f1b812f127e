"""AdamW over a whole tree in one launch, for leaves of any sizes.

A program updates BLOCK elements of one leaf, which it finds by halving: its number
against the first programs of leaves. The kernel's parameters are the pointers of all
leaves, 7 a leaf: 584 leaves fill the 32764 bytes that drivers pass since CUDA 12.1, 72
the 4096 of older ones. Results have pointers of their own, since XLA may give a slice
of a larger array another buffer. Bytes: 28 a parameter in float32, of which 16 are
read; the same with a gradient and a copy in bfloat16, which has one pointer more. The
results lie in the buffers of params, m, v and the copy.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu.device import max_parameter_bytes
from jaxkern.gpu.triton_call import constexpr_function, jit, like, tl, triton_call
from jaxkern.gpu.triton_call import unsupported as unsupported_anywhere
from jaxkern.primitives.optim.adamw import one_minus_power

OTHERS = 3  # parameters: the scalars, and two that Triton adds to every kernel
BLOCK, NUM_WARPS = 2048, 8  # elements of a program


def unsupported(learning_rate: Any, step: Any, **named: Any) -> str | None:
    """A reason in words, or None; the two scalars may be float64."""
    return unsupported_anywhere(**named)


@constexpr_function
def halving(begins, sizes, pointers):
    """PTX that finds the leaf of a program by comparing it with first programs.

    Of 7 pointers: to $0 to $6 they go, to $7 the leaf's first program, to $8 its size;
    the program is $9.
    """
    first, size, program = range(pointers, pointers + 3)
    lines = []

    def among(low: int, high: int) -> None:
        if high - low > 1:
            middle = (low + high) // 2
            lines.append(f"setp.ge.s32 p, ${program}, {begins[middle]};")
            lines.append(f"@p bra LEAF{middle};")
            among(low, middle)
            lines.append(f"LEAF{middle}:")
            among(middle, high)
        else:
            for k in range(pointers):
                # the scalars lie before the results
                n = k * len(begins) + low + (k > 3)
                lines.append(f"ld.param.u64 ${k}, [adamw_kernel_param_{n}];")
            lines.append(f"mov.u32 ${first}, {begins[low]};")
            lines.append(f"mov.u64 ${size}, {sizes[low]};")
            lines.append("bra FOUND;")

    among(0, len(begins))
    return "\n".join(["{ .reg .pred p;", *lines, "FOUND: }"])


@constexpr_function
def leaf_types(pointers):
    """Of what `halving` finds."""
    return (tl.int64,) * pointers + (tl.int32, tl.int64)


@jit
def leaf_of(program, BEGINS: tl.constexpr, SIZES: tl.constexpr, COPIED: tl.constexpr):
    """(pointers as integers, first program, size) of the leaf of a program.

    Tuples take no index known at run time only, and branches of Triton's own take it
    20 s for 500 leaves. The branches are the same for a whole program: a comparison for
    each half, and the pointers of one leaf are read.
    """
    if COPIED:
        found = tl.inline_asm_elementwise(
            halving(BEGINS, SIZES, 8),
            "=l,=l,=l,=l,=l,=l,=l,=l,=r,=l,r",
            [program],
            leaf_types(8),
            is_pure=True,
            pack=1,
        )
        p, g, m, v, new_p, new_m, new_v, copy, begin, size = found
        return p, g, m, v, new_p, new_m, new_v, copy, begin, size
    p, g, m, v, new_p, new_m, new_v, begin, size = tl.inline_asm_elementwise(
        halving(BEGINS, SIZES, 7),
        "=l,=l,=l,=l,=l,=l,=l,=r,=l,r",
        [program],
        leaf_types(7),
        is_pure=True,
        pack=1,
    )
    return p, g, m, v, new_p, new_m, new_v, new_v, begin, size  # no copy


@jit
def pointer(address, like):
    """Aligned to 16 bytes, as XLA's buffers are."""
    return tl.multiple_of(address.to(like.dtype), 16)


@jit
def update_block(
    pointers,
    copy_ptr,
    scalars,
    at,
    inside,
    OPTIONS: tl.constexpr,
    COPIED: tl.constexpr,
):
    param_ptr, grad_ptr, m_ptr, v_ptr, new_param_ptr, new_m_ptr, new_v_ptr = pointers
    learning_rate, m_scale, v_scale, grad_scale = scalars
    B1: tl.constexpr = OPTIONS[0]
    B2: tl.constexpr = OPTIONS[1]
    EPS: tl.constexpr = OPTIONS[2]
    EPS_ROOT: tl.constexpr = OPTIONS[3]
    WEIGHT_DECAY: tl.constexpr = OPTIONS[4]
    p = tl.load(param_ptr + at, inside).to(tl.float32)
    g = tl.load(grad_ptr + at, inside).to(tl.float32) * grad_scale
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
    if COPIED:
        tl.store(copy_ptr + at, p, inside)


@jit
def update_leaf(
    found,
    leaves,
    start,
    count,
    scalars,
    AT: tl.constexpr,
    OPTIONS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of a leaf of the same dtypes as the one AT."""
    p, g, m, v, new_p, new_m, new_v, copy = found
    COPIED: tl.constexpr = len(leaves) == 8
    copy_ptr = pointer(copy, leaves[-1][AT]) + start
    pointers = (
        pointer(p, leaves[0][AT]) + start,
        pointer(g, leaves[1][AT]) + start,
        pointer(m, leaves[2][AT]) + start,
        pointer(v, leaves[3][AT]) + start,
        pointer(new_p, leaves[4][AT]) + start,
        pointer(new_m, leaves[5][AT]) + start,
        pointer(new_v, leaves[6][AT]) + start,
    )
    at = tl.arange(0, BLOCK)
    if count == BLOCK:  # without a mask loads are 16 bytes wide
        update_block(pointers, copy_ptr, scalars, at, None, OPTIONS, COPIED)
    else:
        inside = at < count
        update_block(pointers, copy_ptr, scalars, at, inside, OPTIONS, COPIED)


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
    new_copies,
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
    """GROUPS: where leaves of the same dtypes begin, see `groups_of`."""
    scalars = (
        tl.load(scalars_ptr),
        tl.load(scalars_ptr + 1),
        tl.load(scalars_ptr + 2),
        tl.load(scalars_ptr + 3),
    )
    program = tl.program_id(0)
    p, g, m, v, new_p, new_m, new_v, copy, begin, size = leaf_of(
        program, BEGINS, SIZES, new_copies is not None
    )
    start = (program - begin).to(tl.int64) * BLOCK
    count = tl.minimum(size - start, BLOCK).to(tl.int32)
    leaves = (params, grads, ms, vs, new_params, new_ms, new_vs)
    if new_copies is not None:
        leaves = (params, grads, ms, vs, new_params, new_ms, new_vs, new_copies)
    for k in tl.static_range(len(GROUPS)):
        if (program >= GROUPS[k][1]) & (program < GROUPS[k][2]):
            update_leaf(
                (p, g, m, v, new_p, new_m, new_v, copy),
                leaves,
                start,
                count,
                scalars,
                GROUPS[k][0],
                (B1, B2, EPS, EPS_ROOT, WEIGHT_DECAY),
                BLOCK,
            )


def launches(pointers: int, *lists: Sequence[jax.Array]) -> Iterator[list[int]]:
    """Positions of leaves that share a launch, side by side where dtypes agree."""
    alike: dict[tuple, list[int]] = {}
    for i, leaf in enumerate(zip(*lists, strict=True)):
        if leaf[0].size:
            alike.setdefault(tuple(x.dtype for x in leaf), []).append(i)
    most = (max_parameter_bytes() // 8 - OTHERS) // pointers
    leaves = itertools.chain.from_iterable(alike.values())
    while launch := list(itertools.islice(leaves, most)):
        yield launch


def groups_of(begins: Sequence[int], *lists: Sequence[jax.Array]) -> tuple:
    """Where leaves of the same dtypes begin: (leaf, program, program of the next)."""
    dtypes = [tuple(x.dtype for x in leaf) for leaf in zip(*lists, strict=True)]
    firsts = [k for k, t in enumerate(dtypes) if not k or t != dtypes[k - 1]]
    ends = [*(begins[k] for k in firsts[1:]), begins[-1]]
    return tuple((k, begins[k], e) for k, e in zip(firsts, ends, strict=True))


def adamw_tree(
    params: list[jax.Array],
    grads: list[jax.Array],
    m: list[jax.Array],
    v: list[jax.Array],
    learning_rate: jax.Array,
    step: jax.Array,
    **options: float,
) -> tuple[list[jax.Array], ...]:
    one = jnp.ones((), jnp.float32)
    return updated([params, grads, m, v], None, learning_rate, step, one, **options)


def adamw_copied_tree(
    params: list[jax.Array],
    grads: list[jax.Array],
    m: list[jax.Array],
    v: list[jax.Array],
    copy: list[jax.Array],
    learning_rate: jax.Array,
    step: jax.Array,
    grad_scale: jax.Array,
    **options: float,
) -> tuple[list[jax.Array], ...]:
    """XLA writes the copy over the old one where that is donated."""
    lists = [params, grads, m, v]
    return updated(lists, copy, learning_rate, step, grad_scale, **options)


def updated(
    lists: list[list[jax.Array]],
    copy: list[jax.Array] | None,
    learning_rate: jax.Array,
    step: jax.Array,
    grad_scale: jax.Array,
    *,
    b1: float,
    b2: float,
    eps: float,
    eps_root: float,
    weight_decay: float,
) -> tuple[list[jax.Array], ...]:
    """New params, m and v of params, grads, m and v, and the copy if there is one."""
    t = step.astype(jnp.float32)
    scales = [1 / one_minus_power(b, t) for b in (b1, b2)]
    scalars = [x.astype(jnp.float32) for x in (learning_rate, *scales, grad_scale)]
    written = [lists[0], lists[2], lists[3], *([] if copy is None else [copy])]
    new = tuple(map(list, written))
    by_dtype = lists if copy is None else [*lists, copy]
    absent: dict[str, Any] = {"new_copies": None} if copy is None else {}
    for launch in launches(4 + len(written), *by_dtype):
        given = [[leaves[i] for i in launch] for leaves in lists]
        n = len(launch)
        sizes = tuple(x.size for x in given[0])
        begins = tuple(
            itertools.accumulate((-(-size // BLOCK) for size in sizes), initial=0)
        )
        out = triton_call(
            adamw_kernel,
            *given,
            jnp.stack(scalars),
            out=[[like(leaves[i]) for i in launch] for leaves in written],
            grid=begins[-1:],
            aliases=tuple(
                (operand * n + k, result * n + k)
                for operand, result in ((0, 0), (2, 1), (3, 2))
                for k in range(n)
            ),
            **absent,
            GROUPS=groups_of(begins, *([x[i] for i in launch] for x in by_dtype)),
            BEGINS=begins[:-1],
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
            for leaves, result in zip(new, out[k::n], strict=True):
                leaves[i] = result
    return new
