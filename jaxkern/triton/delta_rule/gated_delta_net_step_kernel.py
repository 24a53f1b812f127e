"""One token of a gated delta net: the kernel.

A program has one value head of one sequence, or where heads are few some value dims of
it, and a cluster of programs the head: what they share is the sum of squares of the
norm. Each makes the query and key of its head for itself: they are a few hundred
numbers, the state is sixteen thousand. The window of their channels is written by the
first of the programs that share them, and to another array, for the others may still be
reading.

With u and w for the silu of the convolved query and key and S for the state before, the
sums over a key's dims are over what was read, and none waits for another:

    u.u  w.w  u.w   S^T u  S^T w      q = scale u / |u|,  k = w / |w|
    d = beta (v - exp(g) S^T k),      y = exp(g) S^T q + (q.k) d

S is [H, HV], BLOCK_H rows at a time; where these are not all, each is read once more to
be updated, by the threads that have read it.

State, window, taps and norm are on their way before the kernel ahead has ended; the
channels of the token are read behind it.
"""

from jaxkern.gpu.dependent_launch import let_next_begin, wait_for_those_ahead
from jaxkern.gpu.triton_call import jit, tl
from jaxkern.triton.norm.split_rows import (
    await_others,
    begin,
    own_columns,
    split_rstd,
)


@jit
def over_past(
    taps_ptr, inputs_ptr, channel, inside, C: tl.constexpr, PAST: tl.constexpr
):
    """The tokens before, the sums over them, and the tap of this one."""
    past = ()
    total = tl.zeros(channel.shape, tl.float32)
    for p in tl.static_range(PAST):
        x = tl.load(inputs_ptr + p * C + channel, inside, 0.0)
        tap = tl.load(taps_ptr + channel * (PAST + 1) + p, inside, 0.0)
        total += x.to(tl.float32) * tap.to(tl.float32)
        past += (x,)
    tap = tl.load(taps_ptr + channel * (PAST + 1) + PAST, inside, 0.0)
    return past, total, tap.to(tl.float32)


@jit
def convolved(
    taps_ptr, inputs_ptr, x_ptr, channel, inside, C: tl.constexpr, PAST: tl.constexpr
):
    past, total, tap = over_past(taps_ptr, inputs_ptr, channel, inside, C, PAST)
    x = tl.load(x_ptr + channel, inside, 0.0)
    return past, x, silu(total + x.to(tl.float32) * tap)


@jit
def silu(x):
    return x / (1 + tl.exp(-x))


@jit
def move_window(
    past,
    x,
    after_ptr,
    channel,
    mask,
    counts,
    C: tl.constexpr,
    PAST: tl.constexpr,
):
    """Drops the oldest token and appends this one, where it counts."""
    for p in tl.static_range(PAST):
        if p + 1 < PAST:
            newer = past[p + 1]
        else:
            newer = x.to(past[p].dtype)
        moved = tl.where(counts, newer, past[p])
        tl.store(after_ptr + p * C + channel, moved, mask)


@jit
def two_sums(a, b, c, d):
    return a + c, b + d


@jit
def three_sums(a, b, c, d, e, f):
    return a + d, b + e, c + f


@jit
def sums_over_keys(state, query, key):
    """(S^T query, S^T key, query.query, key.key, query.key), each kind in one turn."""
    state = state.to(tl.float32)
    products = state * query[:, None], state * key[:, None]
    read, stored = tl.reduce(products, 0, two_sums)
    products = query * query, key * key, query * key
    queries, keys, both = tl.reduce(products, 0, three_sums)
    return read, stored, queries, keys, both


@jit
def gated_delta_net_step_kernel(
    qkv_ptr,
    gate_ptr,
    write_ptr,
    rate_ptr,
    taps_ptr,
    a_log_ptr,
    dt_bias_ptr,
    norm_ptr,
    inputs_ptr,
    state_ptr,
    counts_ptr,
    out_ptr,
    after_ptr,
    new_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    PAST: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    KEY_EPS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CLUSTER: tl.constexpr,
    EXCHANGE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    memory = begin(CLUSTER, EXCHANGE)
    if AHEAD:
        let_next_begin()
    if AHEAD == 1:
        wait_for_those_ahead()
    C: tl.constexpr = 2 * K * H + N * HV
    KEYS: tl.constexpr = K * H  # channels of queries, then of keys
    PARTS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    head, part_of_head = tl.program_id(0) // CLUSTER, tl.program_id(0) % CLUSTER
    row, own = head // N, head % N
    key_head = own // (N // K)
    leads = (own % (N // K) == 0) & (part_of_head == 0)
    kept_keys = tl.where(leads, H, 0)  # whose window it writes
    rows, columns = tl.arange(0, BLOCK_H), own_columns(BLOCK_V, CLUSTER)
    of_key, of_value = rows < H, columns < HV
    inside = of_key[:, None] & of_value[None, :]
    at = rows[:, None] * HV + columns[None, :] + head.to(tl.int64) * (H * HV)
    state = tl.load(state_ptr + at, inside, 0.0)
    window = row.to(tl.int64) * (PAST * C)
    old, after, x = inputs_ptr + window, after_ptr + window, qkv_ptr + row * C
    q_at = key_head * H + rows
    k_at, v_at = KEYS + q_at, 2 * KEYS + own * HV + columns
    q_past, query, q_tap = over_past(taps_ptr, old, q_at, of_key, C, PAST)
    k_past, key, k_tap = over_past(taps_ptr, old, k_at, of_key, C, PAST)
    v_past, value, v_tap = over_past(taps_ptr, old, v_at, of_value, C, PAST)
    norm = tl.load(norm_ptr + columns, of_value, 0.0).to(tl.float32)
    speed = tl.exp(tl.load(a_log_ptr + own).to(tl.float32))
    bias = tl.load(dt_bias_ptr + own).to(tl.float32)
    if AHEAD == 2:
        wait_for_those_ahead()
    counts = tl.full([], 1, tl.int1)
    if counts_ptr is not None:
        counts = tl.load(counts_ptr + row) > 0
    rate = tl.load(rate_ptr + head).to(tl.float32) + bias
    write = tl.load(write_ptr + head).to(tl.float32)
    gate = tl.load(gate_ptr + head * HV + columns, of_value, 0.0).to(tl.float32)
    q_now = tl.load(x + q_at, of_key, 0.0)
    k_now = tl.load(x + k_at, of_key, 0.0)
    v_now = tl.load(x + v_at, of_value, 0.0)
    query = silu(query + q_now.to(tl.float32) * q_tap)
    key = silu(key + k_now.to(tl.float32) * k_tap)
    value = silu(value + v_now.to(tl.float32) * v_tap)
    read, stored, queries, keys, both = sums_over_keys(state, query, key)
    for part in range(1, PARTS):
        further = part * BLOCK_H + rows
        of_key = further < H
        inside = of_key[:, None] & of_value[None, :]
        more = tl.load(state_ptr + at + part * (BLOCK_H * HV), inside, 0.0)
        at_q = key_head * H + further
        at_k = KEYS + at_q
        past, now, u = convolved(taps_ptr, old, x, at_q, of_key, C, PAST)
        move_window(past, now, after, at_q, further < kept_keys, counts, C, PAST)
        past, now, w = convolved(taps_ptr, old, x, at_k, of_key, C, PAST)
        move_window(past, now, after, at_k, further < kept_keys, counts, C, PAST)
        sums = sums_over_keys(more, u, w)
        read, stored = read + sums[0], stored + sums[1]
        queries, keys, both = queries + sums[2], keys + sums[3], both + sums[4]
    of_query, of_unit = SCALE * tl.rsqrt(queries + KEY_EPS), tl.rsqrt(keys + KEY_EPS)
    decay = tl.exp(-speed * softplus(rate))
    written = (value - decay * of_unit * stored) / (1 + tl.exp(-write))
    y = of_query * (decay * read + of_unit * both * written)
    await_others(CLUSTER)
    y *= split_rstd(y, memory, 0, HV, EPS, CLUSTER) * norm
    tl.store(out_ptr + head * HV + columns, y * silu(gate), of_value)
    # behind the exchange, which waits for what has been stored
    move_window(q_past, q_now, after, q_at, rows < kept_keys, counts, C, PAST)
    move_window(k_past, k_now, after, k_at, rows < kept_keys, counts, C, PAST)
    move_window(v_past, v_now, after, v_at, of_value, counts, C, PAST)
    written *= of_unit
    if PARTS == 1:
        store_state(new_ptr + at, state, decay, key, written, counts, inside)
    else:
        for part in range(PARTS):
            further = part * BLOCK_H + rows
            of_key = further < H
            inside = of_key[:, None] & of_value[None, :]
            here = at + part * (BLOCK_H * HV)
            more = tl.load(state_ptr + here, inside, 0.0)
            at_k = KEYS + key_head * H + further
            _, _, w = convolved(taps_ptr, old, x, at_k, of_key, C, PAST)
            store_state(new_ptr + here, more, decay, w, written, counts, inside)


@jit
def store_state(new_ptr, state, decay, key, written, counts, inside):
    new = decay * state.to(tl.float32) + key[:, None] * written[None, :]
    tl.store(new_ptr, tl.where(counts, new.to(state.dtype), state), inside)


@jit
def softplus(x):
    """log(1 + exp(x)) without overflow, with the digits of what is far below 1."""
    return tl.maximum(x, 0.0) + log_of_one_and(tl.exp(-tl.abs(x)))


@jit
def log_of_one_and(x):
    """log(1 + x) for 0 <= x <= 1 with the digits of a small x."""
    u = 1 + x
    return tl.where(u == 1, x, tl.log(u) * (x / tl.where(u == 1, 1.0, u - 1)))
