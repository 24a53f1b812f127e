"""Attention of all query rows at once, and its gradients: plain, with all scores.

    P = exp(S - lse), S = softcap * tanh(scale * q k^T / softcap) + bias, -inf if hidden
    out = P v

with two variants that `plain_attention` has: a cap of scale * q k^T + bias, and weights
that are dropped, out = (P keep / (1 - rate)) v.

`scores` says what is visible. It holds [b k g t s] scores, in float32 or float64.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern.primitives.attention.dropout import kept as kept_weights
from jaxkern.primitives.attention.mask import make_mask, padding_mask, segment_mask
from jaxkern.primitives.call import cut_as, matmul_precision
from jaxkern.primitives.kernel_primitive import at_least_f32


def attend(query, key, value, sinks, **visibility_and_options):
    """(out, lse) for all query rows at once."""
    out, lse = exact(query, key, value, sinks, **visibility_and_options)
    return out.astype(query.dtype), lse


def attend_fwd(query, key, value, sinks, **visibility_and_options):
    """(out, lse, tail) for all query rows at once."""
    out, lse = exact(query, key, value, sinks, **visibility_and_options)
    rounded = out.astype(query.dtype)
    tail = tail_of(out, rounded) if saves_tail(query.dtype) else no_tail(rounded)
    return rounded, lse, tail


def exact(
    query,
    key,
    value,
    sinks,
    dropout_seeds=None,
    dropout=0.0,
    first_row=0,
    **visibility_and_options,
):
    """(out in float32 or float64, lse); `first_row` is where a block of rows begins."""
    logits, _ = scores(query, key, **visibility_and_options)  # [b k g t s]
    top = jnp.max(logits, axis=-1, keepdims=True, initial=-jnp.inf)
    if sinks is not None:
        sink = per_head(sinks, key)
        top = jnp.maximum(top, sink)
    # Any finite number is right here, so it has no gradient; a hidden row gets 0.
    top = lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    p = jnp.exp(logits - top)  # 0 where hidden
    total = jnp.sum(p, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sink - top)
    seen = total != 0  # a NaN is no row that sees nothing
    total = jnp.where(seen, total, 1)
    lse = jnp.where(seen, top + jnp.log(total), -jnp.inf)
    p = with_dropped(p, dropout_seeds, dropout, first_row)
    out = jnp.einsum("bkgts,bskh->bkgth", p, at_least_f32(value)) / total
    return heads_inside(out), heads_inside(lse)[..., 0]


def with_dropped(weights, seeds, rate, first_row):
    """`[b k g t s]`, 0 where dropped and the others larger by what that takes away."""
    if seeds is None:
        return weights
    b, k, g, t, s = weights.shape
    keep = kept_weights(seeds, rate, t, s, first_row).reshape(b, k, g, t, s)
    return jnp.where(keep, weights / (1 - rate), 0)


# What rounding took from out. Where one key has nearly all weight, delta =
# rowsum(dout out) is nearly the dP of that key, and dS their small difference: of an
# out of 16 bits it would have few right ones. A byte more for each number is enough.
# It costs memory and time, so it is saved for who asks for the highest precision.

TAIL_SHIFT = {"bfloat16": 8, "float16": 5}  # bits of float32 behind these and 8 more


def tail_of(exact, rounded):
    """int8 `[..., hv]`, of two arrays of one shape; `rounded` is of 16 bits."""
    shift = TAIL_SHIFT[rounded.dtype.name]
    behind = bits_of(exact) - bits_of(rounded)
    tail = lax.shift_right_arithmetic(behind + (1 << (shift - 1)), shift)
    # out of range: what is not finite, or too small for the dtype
    return jnp.where(jnp.abs(tail) <= 128, jnp.minimum(tail, 127), 0).astype(jnp.int8)


def saves_tail(dtype) -> bool:
    return dtype.name in TAIL_SHIFT and matmul_precision() in ("highest", "float32")


def no_tail(rounded):
    return jnp.zeros((*rounded.shape[:-1], 0), jnp.int8)


def saves_no_tail(forward):
    """`forward`, a kernel of (out, lse), where gradients may ask for a tail.

    Zeros then: gradients of few queries are of the reference, which reads none.
    """

    @functools.wraps(forward)
    def saving(*operands, **options):
        out, lse = forward(*operands, **options)
        tail = no_tail(out)
        if saves_tail(out.dtype):
            tail = jnp.zeros(out.shape, jnp.int8)
        return out, lse, tail

    return saving


def with_tail(rounded, tail):
    """What was rounded in float32, to 16 bits and the 8 that come behind them."""
    shift = TAIL_SHIFT.get(rounded.dtype.name)
    if shift is None or tail is None or not tail.shape[-1]:
        return at_least_f32(rounded)
    bits = bits_of(rounded) + (tail.astype(jnp.int32) << shift)
    return lax.bitcast_convert_type(bits, jnp.float32)


def bits_of(x):
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)


def attend_bwd(
    query,
    key,
    value,
    bias,
    sinks,
    lse,
    dout,
    dlse,
    softcap,
    scale,
    softcap_after_bias=False,
    dropout_seeds=None,
    dropout=0.0,
    first_row=0,
    **visibility,
):
    """Float32 gradients by name, for all query rows at once.

    With P = exp(S - lse) and dP = dout v^T (Dao 2023, section 2.2, and the two
    results):
        dv = P^T dout,   dS = P (dP - delta),   delta = rowsum(P dP) - dlse
    Kernels, which do not have whole rows, take rowsum(dout out) for that sum. A dropout
    acts on P in dv and, as its transpose, on dP.
    """
    logits, capped = scores(
        query,
        key,
        bias=bias,
        softcap=softcap,
        scale=scale,
        softcap_after_bias=softcap_after_bias,
        **visibility,
    )
    dout, lse, dlse = (
        heads_outside(at_least_f32(x), key)
        for x in (dout, lse[..., None], dlse[..., None])
    )
    seen = jnp.isfinite(lse)
    lse = jnp.where(seen, lse, jnp.inf)  # then P = 0
    p = jnp.exp(logits - lse)  # [b k g t s], 0 where hidden
    dp = jnp.einsum("bkgth,bskh->bkgts", dout, at_least_f32(value))
    dp = with_dropped(dp, dropout_seeds, dropout, first_row)
    delta = jnp.sum(p * dp, axis=-1, keepdims=True) - jnp.where(seen, dlse, 0)
    ds = p * (dp - delta)
    p_kept = with_dropped(p, dropout_seeds, dropout, first_row)
    grads = {"value": jnp.einsum("bkgts,bkgth->bskh", p_kept, dout)}
    slope = None if softcap is None else 1 - (capped / softcap) ** 2
    if softcap_after_bias and slope is not None:
        ds, slope = ds * slope, None
    if bias is not None:
        dbias = ds.reshape(ds.shape[0], -1, *ds.shape[3:])  # [b n t s]
        axes = tuple(i for i, n in enumerate(bias.shape) if n == 1)
        grads["bias"] = jnp.sum(dbias, axis=axes, keepdims=True)
    if sinks is not None:
        dsink = jnp.exp(per_head(sinks, key) - lse) * -delta
        grads["sinks"] = jnp.sum(dsink, axis=(0, 3, 4)).reshape(-1)
    if slope is not None:
        ds = ds * slope
    ds = ds * scale
    dquery = jnp.einsum("bkgts,bskh->bkgth", ds, at_least_f32(key))
    q = heads_outside(at_least_f32(query), key)
    grads["query"] = heads_inside(dquery)
    grads["key"] = jnp.einsum("bkgts,bkgth->bskh", ds, q)
    return grads


def scores(
    query,
    key,
    bias,
    mask,
    q_segment_ids,
    kv_segment_ids,
    kv_lengths,
    q_offset,
    scale,
    causal,
    window,
    softcap,
    softcap_after_bias=False,
):
    """Logits `[b k g t s]`, -inf where a key is hidden, and what the cap gave."""
    t, s = query.shape[1], key.shape[1]
    inside = None if kv_lengths is None else padding_mask(kv_lengths, s)
    q = heads_outside(query, key)
    capped = scale * (products(q, key) if inside is None else kept(q, key, inside))
    added = None if bias is None else per_pair(at_least_f32(bias), key)
    if softcap_after_bias and added is not None:
        capped = capped + added
    if softcap is not None:
        capped = softcap * jnp.tanh(capped / softcap)
    logits = capped
    if added is not None and not softcap_after_bias:
        logits = logits + added
    masks = [] if mask is None else [mask]
    if softcap_after_bias and bias is not None:
        masks.append(bias != -jnp.inf)  # the cap would show it
    if causal or window is not None:
        masks.append(make_mask(t, s, causal=causal, window=window, q_offset=q_offset))
    if q_segment_ids is not None:
        masks.append(segment_mask(q_segment_ids, kv_segment_ids))
    if inside is not None:
        masks.append(inside)
    for visible in masks:
        logits = jnp.where(per_pair(visible, key), logits, -jnp.inf)
    return logits, capped


def products(q, key):
    dtype = score_dtype(q, key)
    return jnp.einsum("bkgth,bskh->bkgts", q, key, preferred_element_type=dtype)


@jax.custom_jvp
def kept(q, key, inside):
    """`products` with the keys that are inside, 0 for the others, which may be NaN.

    Replacing a score is enough here, and reads the keys once. Its derivative still
    multiplies by the key, so there the key itself is replaced.
    """
    return jnp.where(inside[:, :, None], products(q, key), 0)


@kept.defjvp
def kept_jvp(primals, tangents):
    (q, key, inside), (dq, dkey, _) = primals, tangents
    held = cut_as(rows_inside(key, inside), jax.typeof(key))  # lengths may be cut alone
    dproducts = products(dq, held) + products(q, dkey)
    return kept(*primals), jnp.where(inside[:, :, None], dproducts, 0)


def rows_inside(rows, inside):
    return jnp.where(inside[:, 0, 0, :, None, None], rows, 0)  # inside is [b 1 1 s]


def without_rest(rows, kv_lengths):
    """Key or value rows, 0 behind the lengths: a weight of 0 times NaN would be NaN.

    Forward only the values need it; there XLA does it in the copy that it makes anyway.
    """
    if kv_lengths is None:
        return rows
    return rows_inside(rows, padding_mask(kv_lengths, rows.shape[1]))


def score_dtype(query, key):
    return jnp.result_type(query.dtype, key.dtype, jnp.float32)


# Query heads and their rows in memory order are [b t k*g h]; the mathematics has
# [b k g t h], so that the g query heads of a key head meet it in one product.


def heads_outside(x, key):
    """`[b t k*g h]` as `[b k g t h]`."""
    b, t, n, h = x.shape
    k = key.shape[2]
    return jnp.moveaxis(x.reshape(b, t, k, n // max(k, 1), h), 1, 3)


def heads_inside(x):
    """`[b k g t h]` as `[b t k*g h]`."""
    b, k, g, t, h = x.shape
    return jnp.moveaxis(x, 3, 1).reshape(b, t, k * g, h)


def per_pair(x, key):
    """`[#b #k*g #t #s]` as `[#b #k #g #t #s]`."""
    b, n, t, s = x.shape
    k = key.shape[2] if n != 1 else 1
    return x.reshape(b, k, n // max(k, 1), t, s)


def per_head(sinks, key):
    """`[k*g]` as `[1 k g 1 1]`."""
    k = key.shape[2]
    return at_least_f32(sinks).reshape(1, k, sinks.shape[0] // max(k, 1), 1, 1)
