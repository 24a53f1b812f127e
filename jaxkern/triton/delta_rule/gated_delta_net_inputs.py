"""Convolution, silu and norms of a gated delta net's product, each way in one pass.

    z_t = sum_j weight_j x_{t-(w-1)+j},    u = silu(z)
    query, key = u / sqrt(sum of a head's u**2 + eps),    value = u

Programs walk along time as those of causal_conv1d.py, with HEADS heads of DIM columns
of the product: 4 columns a thread, so that a head's sums stay within few warps. The
first programs of a grid have the heads of queries, the next those of keys, of values,
and the last ones copy what stands behind the convolution.
"""
# ruff: noqa: RUF005 - Triton compiles `a + (b,)` but not `(*a, b)`

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu.device import WARP
from jaxkern.gpu.triton_call import jit, like, sparse_call, tl
from jaxkern.gpu.triton_call import unsupported as unsupported_anywhere
from jaxkern.triton.delta_rule.causal_conv1d import (
    FEWEST,
    convolved,
    same_segment,
    segments,
    sigmoid,
    tokens,
    tokens_before,
    weights,
)

WIDEST = 4  # taps, as registers allow
THREAD = 4  # columns of a thread
COLUMNS = 512  # of a program, at most
STEP, STAGES = 4, 3  # tokens that are loaded at once, steps whose loads are on the way
LENGTH = 64  # tokens that a program walks over


def unsupported(x: Any, weight: Any, key_heads: int, key_dim: int, **rest: Any):
    """A reason in words, or None."""
    rest = {name: a for name, a in rest.items() if hasattr(a, "dtype")}
    if weight.shape[1] > WIDEST:
        return f"{weight.shape[1]} taps, above {WIDEST}, take too many registers"
    if x.shape[1] < FEWEST:
        return f"XLA is as fast for {x.shape[1]} tokens, below {FEWEST}"
    if not WARP * THREAD <= key_dim <= COLUMNS or key_dim & (key_dim - 1):
        return f"heads of {key_dim} columns, not of 128, 256 or 512"
    values = weight.shape[0] - 2 * key_heads * key_dim
    if not key_heads or not values or values % key_dim:
        return f"{values} columns of values beside {key_heads} key heads of {key_dim}"
    return unsupported_anywhere(x=x, weight=weight, **rest)


@dataclasses.dataclass(frozen=True)
class Constants:
    """What a problem fixes for both kernels; `C` in them.

    Attributes:
      T, F, TAPPED, W: tokens and columns of the product, those convolved, their taps.
      KEYS, VALUES, GATE: columns of queries and of keys, of values, of the gate.
      EPS: of the norms.
      HEADS, DIM: heads of a program, and columns of each.
      STEP, STAGES, LENGTH: see above.
    """

    T: int
    F: int
    TAPPED: int
    W: int
    KEYS: int
    VALUES: int
    GATE: int
    EPS: float
    HEADS: int
    DIM: int
    STEP: int = STEP
    STAGES: int = STAGES
    LENGTH: int = LENGTH

    @property
    def BLOCK(self) -> int:
        """Columns of a program."""
        return self.HEADS * self.DIM

    @property
    def KEY_BLOCKS(self) -> int:
        """Programs of all queries, and of all keys."""
        return self.KEYS // self.BLOCK

    @property
    def VALUE_BLOCKS(self) -> int:
        """Programs of all values."""
        return self.VALUES // self.BLOCK

    @property
    def REST(self) -> int:
        """Columns behind those of the gate."""
        return self.F - self.TAPPED - self.GATE


def launch_of(
    x: Any, weight: Any, halo: int, key_heads: int, dim: int, gate: int, eps: float
) -> tuple[tuple[int, ...], dict]:
    """Grid and constants; of LENGTH tokens the last `halo` are those of the next."""
    (b, t, f), (c, w) = x.shape, weight.shape
    keys, heads = key_heads * dim, COLUMNS // dim
    while key_heads % heads or (c // dim - 2 * key_heads) % heads:
        heads //= 2
    block = heads * dim
    programs = c // block + -(-gate // block) + -(-(f - c - gate) // block)
    sizes = Constants(
        T=t,
        F=f,
        TAPPED=c,
        W=w,
        KEYS=keys,
        VALUES=c - 2 * keys,
        GATE=gate,
        EPS=float(eps),
        HEADS=heads,
        DIM=dim,
    )
    warps = max(block // (WARP * THREAD), 1)
    return (programs, -(-t // (LENGTH - halo)), b), {"C": sizes, "num_warps": warps}


@jit
def columns_of(block, C: tl.constexpr):
    """The columns of a block of heads, `[HEADS, DIM]`."""
    head = block * C.HEADS + tl.arange(0, C.HEADS)[:, None]
    return head * C.DIM + tl.arange(0, C.DIM)[None, :]


@jit
def head_sum(x):
    """The sum of each head, beside each of its columns."""
    return tl.sum(x, axis=1, keep_dims=True)


@jit
def convolve(
    x_ptr,
    weight_ptr,
    ids_ptr,
    own_ptr,
    block,
    before,
    PART: tl.constexpr,
    C: tl.constexpr,
):
    """A block of heads of a part that has columns `before` it in the product.

    PART is (its columns, whether its heads are normalised).
    """
    packed: tl.constexpr = ids_ptr is not None
    T: tl.constexpr = C.T
    W: tl.constexpr = C.W
    STEP: tl.constexpr = C.STEP
    LENGTH: tl.constexpr = C.LENGTH
    own = columns_of(block, C)
    columns = before + own
    start = tl.program_id(1) * LENGTH
    taps = weights(weight_ptr, columns, W, C.TAPPED)
    zeros = tl.zeros_like(own).to(tl.float32)
    past = tokens_before(x_ptr, None, start, columns, W - 1, C.F)
    for walked in tl.range(0, LENGTH, STEP, num_stages=C.STAGES):
        first = start + walked
        seen = past + tokens(x_ptr, first, columns, STEP, T, C.F)
        ids = segments(ids_ptr, first - (W - 1), STEP + W - 1, T)
        for i in tl.static_range(STEP):
            z = convolved(zeros, taps, seen, ids, i, W, packed)
            y = z * sigmoid(z)
            if PART[1]:
                y *= tl.rsqrt(head_sum(y * y) + C.EPS)
            at = (first + i).to(tl.int64) * PART[0] + own
            tl.store(own_ptr + at, y, (own < PART[0]) & (first + i < T))
        past = seen[STEP:]


@jit
def copy(
    x_ptr,
    own_ptr,
    block,
    start,
    end,
    PART: tl.constexpr,
    C: tl.constexpr,
    BACK: tl.constexpr,
):
    """A block of columns of the tokens from `start` to `end` as they are."""
    STEP: tl.constexpr = C.STEP
    LENGTH: tl.constexpr = C.LENGTH
    own = columns_of(block, C)
    columns = PART[1] + own
    for walked in tl.range(0, LENGTH, STEP, num_stages=C.STAGES):
        first = start + walked
        for i in tl.static_range(STEP):
            row = (first + i).to(tl.int64)
            mask = (own < PART[0]) & (first + i < end)
            if BACK:
                y = tl.load(own_ptr + row * PART[0] + own, mask)
                tl.store(x_ptr + row * C.F + columns, y, mask)
            else:
                y = tl.load(x_ptr + row * C.F + columns, mask)
                tl.store(own_ptr + row * PART[0] + own, y, mask)


@jit
def copy_rest(
    x_ptr,
    gate_ptr,
    rest_ptr,
    block,
    start,
    end,
    C: tl.constexpr,
    BACK: tl.constexpr,
):
    """The gate, and what stands behind it."""
    GATE: tl.constexpr = C.GATE
    PART: tl.constexpr = (GATE, C.TAPPED)
    REST: tl.constexpr = (C.REST, C.TAPPED + GATE)
    gates = (GATE + C.BLOCK - 1) // C.BLOCK
    if block < gates:
        if gate_ptr is not None:
            copy(x_ptr, gate_ptr, block, start, end, PART, C, BACK)
    else:
        if rest_ptr is not None:
            copy(x_ptr, rest_ptr, block - gates, start, end, REST, C, BACK)


@jit
def gated_delta_net_inputs_kernel(
    x_ptr,
    weight_ptr,
    ids_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    gate_ptr,
    rest_ptr,
    C: tl.constexpr,
):
    PART: tl.constexpr = (C.KEYS, True)
    V_PART: tl.constexpr = (C.VALUES, False)
    program = tl.program_id(0)
    row = tl.program_id(2).to(tl.int64) * C.T
    x_ptr += row * C.F
    if ids_ptr is not None:
        ids_ptr += row
    if program < 2 * C.KEY_BLOCKS:
        own_ptr = query_ptr + row * C.KEYS
        if program >= C.KEY_BLOCKS:
            own_ptr = key_ptr + row * C.KEYS
        block = program % C.KEY_BLOCKS
        before = (program - block) * C.BLOCK
        convolve(x_ptr, weight_ptr, ids_ptr, own_ptr, block, before, PART, C)
    elif program < 2 * C.KEY_BLOCKS + C.VALUE_BLOCKS:
        own_ptr = value_ptr + row * C.VALUES
        block, before = program - 2 * C.KEY_BLOCKS, 2 * C.KEYS
        convolve(x_ptr, weight_ptr, ids_ptr, own_ptr, block, before, V_PART, C)
    else:
        start = tl.program_id(1) * C.LENGTH
        end = tl.minimum(start + C.LENGTH, C.T)
        if gate_ptr is not None:
            gate_ptr += row * C.GATE
        if rest_ptr is not None:
            rest_ptr += row * C.REST
        block = program - 2 * C.KEY_BLOCKS - C.VALUE_BLOCKS
        copy_rest(x_ptr, gate_ptr, rest_ptr, block, start, end, C, False)


def gated_delta_net_inputs(
    x: jax.Array,
    weight: jax.Array,
    segment_ids: jax.Array | None,
    *,
    key_heads: int,
    key_dim: int,
    gate_columns: int,
    eps: float,
) -> tuple[jax.Array, ...]:
    sizes = key_heads, key_dim, gate_columns, eps
    grid, constants = launch_of(x, weight, 0, *sizes)
    c, (b, t, _) = constants["C"], x.shape
    heads = (b, t, key_heads, key_dim)
    shapes = {
        "query_ptr": heads,
        "key_ptr": heads,
        "value_ptr": (b, t, c.VALUES),
        "gate_ptr": (b, t, c.GATE),
        "rest_ptr": (b, t, c.REST),
    }
    given = {"x_ptr": x, "weight_ptr": weight, "ids_ptr": segment_ids}
    return with_empty(gated_delta_net_inputs_kernel, grid, given, shapes, x, constants)


def with_empty(kernel, grid, given, shapes, x, constants):
    """`sparse_call` whose results without columns are no pointers of the kernel."""
    results = {
        name: None if 0 in shape else jax.ShapeDtypeStruct(shape, x.dtype)
        for name, shape in shapes.items()
    }
    out = sparse_call(kernel, grid, given, results, constants)
    return tuple(
        jnp.zeros(shape, x.dtype) if y is None else y
        for y, shape in zip(out, shapes.values(), strict=True)
    )


@jit
def convolve_back(
    operands,
    dx_ptr,
    dweight_ptr,
    block,
    before,
    PART: tl.constexpr,
    C: tl.constexpr,
):
    """Walks LENGTH tokens; the last W - 1 only complete dx of those before.

    Operands are product, taps, segments, and the gradients of the part.
    """
    x_ptr, weight_ptr, ids_ptr, own_ptr = operands
    packed: tl.constexpr = ids_ptr is not None
    T: tl.constexpr = C.T
    F: tl.constexpr = C.F
    W: tl.constexpr = C.W
    STEP: tl.constexpr = C.STEP
    LENGTH: tl.constexpr = C.LENGTH
    own = columns_of(block, C)
    columns = before + own
    start = tl.program_id(1) * (LENGTH - (W - 1))
    end = tl.minimum(start + LENGTH - (W - 1), T)
    taps = weights(weight_ptr, columns, W, C.TAPPED)
    zeros = tl.zeros_like(own).to(tl.float32)
    past = tokens_before(x_ptr, None, start, columns, W - 1, F)
    dtaps = ()
    dpast = ()
    for _ in tl.static_range(W):
        dtaps = dtaps + (zeros,)
    for _ in tl.static_range(W - 1):
        dpast = dpast + (zeros,)
    for walked in tl.range(0, LENGTH, STEP, num_stages=C.STAGES):
        first = start + walked
        seen = past + tokens(x_ptr, first, columns, STEP, T, F)
        dys = tokens(own_ptr, first, own, STEP, T, PART[0])
        ids = segments(ids_ptr, first - (W - 1), STEP + W - 1, T)
        dseen = dpast
        for i in tl.static_range(STEP):
            z = convolved(zeros, taps, seen, ids, i, W, packed)
            s = sigmoid(z)
            dz = dys[i]
            if PART[1]:
                u = z * s
                across = head_sum(dz * u)
                squares = head_sum(u * u) + C.EPS
                dz = tl.rsqrt(squares) * (dz - u * (across / squares))
            dz = dz * s * (1.0 + z * (1.0 - s))
            dseen = dseen + (dz,)
            mine = tl.where(first + i < end, dz, 0.0)
            sums = ()
            dx = zeros
            for j in tl.static_range(W):
                tap = same_segment(seen[i + j], ids, i + j, i + W - 1, packed)
                sums = sums + (dtaps[j] + mine * tap,)
                later = same_segment(dseen[i + j], ids, i, i + j, packed)
                dx += taps[W - 1 - j] * later
            dtaps = sums
            to = first + i - (W - 1)
            at = to.to(tl.int64) * F + columns
            tl.store(dx_ptr + at, dx, (own < PART[0]) & (to >= start) & (to < end))
        past = seen[STEP:]
        dpast = dseen[STEP:]
    part = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    for j in tl.static_range(W):
        at = (part * W + j) * C.TAPPED + columns
        tl.store(dweight_ptr + at, dtaps[j], own < PART[0])


@jit
def gated_delta_net_inputs_bwd_kernel(
    x_ptr,
    weight_ptr,
    ids_ptr,
    dquery_ptr,
    dkey_ptr,
    dvalue_ptr,
    dgate_ptr,
    drest_ptr,
    dx_ptr,
    dweight_ptr,
    C: tl.constexpr,
):
    PART: tl.constexpr = (C.KEYS, True)
    V_PART: tl.constexpr = (C.VALUES, False)
    program = tl.program_id(0)
    row = tl.program_id(2).to(tl.int64) * C.T
    x_ptr += row * C.F
    dx_ptr += row * C.F
    if ids_ptr is not None:
        ids_ptr += row
    if program < 2 * C.KEY_BLOCKS:
        own_ptr = dquery_ptr + row * C.KEYS
        if program >= C.KEY_BLOCKS:
            own_ptr = dkey_ptr + row * C.KEYS
        block = program % C.KEY_BLOCKS
        before = (program - block) * C.BLOCK
        operands = x_ptr, weight_ptr, ids_ptr, own_ptr
        convolve_back(operands, dx_ptr, dweight_ptr, block, before, PART, C)
    elif program < 2 * C.KEY_BLOCKS + C.VALUE_BLOCKS:
        own_ptr = dvalue_ptr + row * C.VALUES
        block, before = program - 2 * C.KEY_BLOCKS, 2 * C.KEYS
        operands = x_ptr, weight_ptr, ids_ptr, own_ptr
        convolve_back(operands, dx_ptr, dweight_ptr, block, before, V_PART, C)
    else:
        start = tl.program_id(1) * (C.LENGTH - (C.W - 1))
        end = tl.minimum(start + C.LENGTH - (C.W - 1), C.T)
        if dgate_ptr is not None:
            dgate_ptr += row * C.GATE
        if drest_ptr is not None:
            drest_ptr += row * C.REST
        block = program - 2 * C.KEY_BLOCKS - C.VALUE_BLOCKS
        copy_rest(dx_ptr, dgate_ptr, drest_ptr, block, start, end, C, True)


def gated_delta_net_inputs_bwd(
    x: jax.Array,
    weight: jax.Array,
    segment_ids: jax.Array | None,
    dquery: jax.Array,
    dkey: jax.Array,
    dvalue: jax.Array,
    dgate: jax.Array,
    drest: jax.Array,
    *,
    key_heads: int,
    key_dim: int,
    gate_columns: int,
    eps: float,
) -> tuple[jax.Array, jax.Array]:
    c, w = weight.shape
    sizes = key_heads, key_dim, gate_columns, eps
    grid, constants = launch_of(x, weight, w - 1, *sizes)
    given = {
        "x_ptr": x,
        "weight_ptr": weight,
        "ids_ptr": segment_ids,
        "dquery_ptr": dquery,
        "dkey_ptr": dkey,
        "dvalue_ptr": dvalue,
        "dgate_ptr": dgate if dgate.shape[-1] else None,
        "drest_ptr": drest if drest.shape[-1] else None,
    }
    parts = grid[1] * grid[2]
    results = {
        "dx_ptr": like(x),
        "dweight_ptr": jax.ShapeDtypeStruct((parts, w, c), jnp.float32),
    }
    out: Any = sparse_call(
        gated_delta_net_inputs_bwd_kernel, grid, given, results, constants
    )
    dx, dweight = out
    return dx, dweight.sum(0).T.astype(weight.dtype)
