"""A token's norm, rotation, write to a long cache, and shares of its attention.

As in qk_norm_rope_cache_attention_kernel.py, but for what the shares become: a launch
of merge_shares.py merges them, so that there may be as many as fill the device.
"""

from jaxkern.gpu.dependent_launch import let_next_begin, wait_for_those_ahead
from jaxkern.gpu.triton_call import jit, tl
from jaxkern.triton.attention.decode.decode_kernel import (
    for_later,
    share_and_lse,
    store_share,
)
from jaxkern.triton.attention.qk_norm_rope_cache_attention_kernel import (
    add_block,
    factors_of,
    load_heads,
    share_before,
    sums_of_new,
    take_up,
    turn_of,
)
from jaxkern.triton.kv_cache.cache_slots import new_tokens
from jaxkern.triton.kv_cache.qk_norm_rope_cache_kernel import carry_over_both


@jit
def qk_norm_rope_cache_shares_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    query_weight_ptr,
    key_weight_ptr,
    cos_ptr,
    sin_ptr,
    old_key_cache_ptr,
    old_value_cache_ptr,
    positions_ptr,
    lengths_ptr,
    out_ptr,
    lse_ptr,
    key_cache_ptr,
    value_cache_ptr,
    CALL: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    HEAD: tl.constexpr,
    VALUE: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LOG2E: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    KEY_COPY: tl.constexpr,
    VALUE_COPY: tl.constexpr,
    HELD: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """ROWS query heads over one share: normalised sums, base-2 log-sum-exps.

    Where HELD the share is a block, which is in registers before the kernel ahead has
    ended; else the first of several is asked for in the L2 cache.
    """
    S: tl.constexpr = CALL[2]
    H: tl.constexpr = HEAD[0]
    HV: tl.constexpr = VALUE[0]
    VALUE_DIMS: tl.constexpr = VALUE[1]
    if AHEAD:
        let_next_begin()
    if AHEAD == 1:
        wait_for_those_ahead()
    program = tl.program_id(0)
    head = program % K
    split = program // K % SPLITS
    b = (program // (SPLITS * K)).to(tl.int64)
    position = tl.load(positions_ptr + b).to(tl.int64)
    count = new_tokens(lengths_ptr, b, b >= 0, 1)
    first, start, stop = share_before(position, split, S, None, SPLITS, BLOCK)
    if HELD:
        j = start + tl.arange(0, BLOCK)
        inside = (j >= first) & (j < stop)
        k = load_heads(old_key_cache_ptr, j, inside, b, head, S, K, H, HEAD[1])
        v = load_heads(old_value_cache_ptr, j, inside, b, head, S, K, HV, VALUE_DIMS)
    turn = turn_of(cos_ptr, sin_ptr, b, HEAD)
    factors = factors_of(query_weight_ptr, HEAD), factors_of(key_weight_ptr, HEAD)
    if AHEAD == 2:
        if not HELD:
            row = (b * S + start) * K + head
            for_later(old_key_cache_ptr, row, stop - start, K, H, BLOCK)
            for_later(old_value_cache_ptr, row, stop - start, K, HV, BLOCK)
        wait_for_those_ahead()

    r = tl.arange(0, ROWS)
    present = r < G
    row = b * (K * G) + head * G + r
    fresh = (split == 0) & (count > 0) & (position >= 0) & (position < S)
    new = query_ptr, key_ptr, value_ptr
    weights = query_weight_ptr, key_weight_ptr
    caches = key_cache_ptr, value_cache_ptr
    place = b, head, position
    q, new_key, new_value = take_up(
        new,
        weights,
        turn,
        factors,
        caches,
        place,
        row,
        present,
        fresh,
        S,
        K,
        HEAD,
        VALUE,
        0,
    )
    sums = sums_of_new(q, new_key, new_value, fresh, SCALE, SOFTCAP, LOG2E)
    if HELD:
        top, total, acc = add_block(q, k, v, inside, sums, SCALE, SOFTCAP, LOG2E)
    else:
        top, total, acc = sums
        for at in tl.range(start, stop, BLOCK):
            j = at + tl.arange(0, BLOCK)
            inside = (j >= first) & (j < stop)
            k = load_heads(old_key_cache_ptr, j, inside, b, head, S, K, H, HEAD[1])
            v = load_heads(
                old_value_cache_ptr, j, inside, b, head, S, K, HV, VALUE_DIMS
            )
            top, total, acc = add_block(
                q, k, v, inside, (top, total, acc), SCALE, SOFTCAP, LOG2E
            )
    seen, total, lse = share_and_lse(top, total, 2, LOG2E)
    out = acc / total[:, None]
    store_share(out, lse, seen, (split, row, present), out_ptr, lse_ptr, HV, SPLITS)
    places = positions_ptr, lengths_ptr, None
    old = old_key_cache_ptr, old_value_cache_ptr
    copies: tl.constexpr = (KEY_COPY, VALUE_COPY)
    carry_over_both(program, old, caches, places, CALL, PROGRAMS, copies)
