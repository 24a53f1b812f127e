"""A decode step between the first product of a layer and its second, in few launches.

A cluster of at most 8 programs has the keys of a sequence and key head, each program a
block of them in its registers. Of a longer cache of one sequence as many programs as
fill the device leave shares, which a second launch merges. What fits neither, more
tokens, more sequences, wider heads or dtypes, is written by `qk_norm_rope_cache` and
read by `attention`, each by its own kernel.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu.cluster import (
    MAX_EXCHANGE,
    MAX_PROGRAMS,
    OLDEST_WITH_CLUSTERS,
    exchange_bytes,
)
from jaxkern.gpu.device import WARP, compute_capability, next_power_of_2, num_sms
from jaxkern.gpu.triton_call import like, sparse_call
from jaxkern.primitives.activation.sigmoid_gate import sigmoid_gate_p
from jaxkern.primitives.attention.attention import attention_p
from jaxkern.primitives.attention.qk_norm_rope_cache_attention import (
    ProjectedTokens,
    heads_and_gates,
    visible_operands,
)
from jaxkern.primitives.kv_cache.qk_norm_rope_cache import qk_norm_rope_cache_p
from jaxkern.triton.attention.decode.attention import AT_ONCE, FAR, FEW
from jaxkern.triton.attention.decode.decode_sizes import MAX_SPLITS, num_splits
from jaxkern.triton.attention.decode.decode_sizes import sizes_of as sizes_of_shares
from jaxkern.triton.attention.merge_shares import LOG2E, merged
from jaxkern.triton.attention.qk_norm_rope_cache_attention_kernel import (
    qk_norm_rope_cache_attention_kernel,
)
from jaxkern.triton.attention.qk_norm_rope_cache_shares_kernel import (
    qk_norm_rope_cache_shares_kernel,
)
from jaxkern.triton.kv_cache import qk_norm_rope_cache as writes
from jaxkern.triton.kv_cache.cache_slots import copy_tile

FEW_ROWS = 16  # query heads of a key head: the least that tensor cores multiply
MAX_HEAD_DIM = 256
MAX_WARPS = 8  # and 16 where heads of more dims than WIDE have more to load
WIDE = 128
HELD = 2048  # elements of the keys that a warp holds, and as many of the values
HELD_WARPS = 4  # of a program that holds a share of a long cache
HELD_DIM = 64  # of its heads: with others it would spill
REGISTERS = 65536  # of a multiprocessor


def unsupported(**named: Any) -> str | None:
    """A reason in words, or None."""
    attends = ("scale", "window", "softcap", "sinks", "gated")
    return writes.unsupported(**{n: x for n, x in named.items() if n not in attends})


def padded(d: int) -> int:
    """Dims of a tile: a power of 2, and enough for tensor cores."""
    return max(next_power_of_2(d), 16)


def sizes_of(b: int, s: int, k: int, h: int, hv: int) -> dict | None:
    """Programs of a cluster and their block, or None where these are too many."""
    dims = padded(h), padded(hv)
    most_warps = MAX_WARPS * (2 if max(dims) > WIDE else 1)
    least, most = (warps * HELD // max(dims) for warps in (4, most_warps))
    block = max(min(least, next_power_of_2(s)), 16)
    while block < most and s > MAX_PROGRAMS * block:
        block *= 2
    shares = -(-s // block)
    if shares > MAX_PROGRAMS or b * k * shares > AT_ONCE * num_sms():
        return None
    part = next_power_of_2(-(-dims[1] // shares))
    exchange = exchange_bytes(shares * FEW_ROWS * (part + 1)) if shares > 1 else 0
    if shares > 1 and compute_capability() < OLDEST_WITH_CLUSTERS:
        return None
    if exchange > MAX_EXCHANGE:
        return None
    return {
        "SPLITS": shares,
        "BLOCK": block,
        "EXCHANGE": exchange,
        "cluster": shares,
        "num_warps": min(max(block * max(dims) // HELD, 4), most_warps),
        "num_stages": 1,
    }


def in_one_launch(query: Any, *caches: Any) -> dict | None:
    """Sizes of the launch, or None where it does not fit one."""
    b, t, n, _ = query.shape
    s, k, hv = caches[1].shape[1:]
    h = caches[0].shape[-1]
    dtypes = {x.dtype for x in (query, *caches)}
    if t > 1 or n // k > FEW_ROWS or max(h, hv) > MAX_HEAD_DIM or len(dtypes) > 1:
        return None
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return None
    return sizes_of(b, s, k, h, hv)


def in_two_launches(query: Any, key_cache: Any, value_cache: Any) -> dict | None:
    """Sizes of the shares of one sequence's long cache, None of what is no such."""
    b, t, n, _ = query.shape
    s, k, hv = value_cache.shape[1:]
    h = key_cache.shape[-1]
    if b > 1 or t > 1 or n // k > FEW_ROWS or max(h, hv) > WIDE:
        return None
    if compute_capability() < OLDEST_WITH_CLUSTERS:  # not measured
        return None
    if not query.dtype == key_cache.dtype == value_cache.dtype:
        return None
    if query.dtype not in (jnp.bfloat16, jnp.float16) or k > num_sms() // FEW:
        return None
    dims = padded(h), padded(hv)
    block = max(HELD_WARPS * HELD // max(dims), 16)
    shares = -(-s // block)
    if shares <= min(AT_ONCE * num_sms() // k, MAX_SPLITS):
        if shares == 1 or not h == hv == HELD_DIM:
            return None
        return {
            "SPLITS": shares,
            "BLOCK": block,
            "HELD": True,
            "num_warps": HELD_WARPS,
            "num_stages": 1,
            "max_registers": REGISTERS // (AT_ONCE * HELD_WARPS * WARP),
        }
    sizes = sizes_of_shares(h, hv, query.dtype, FEW_ROWS, few=True)
    stage_bytes = sizes["BLOCK"] * sum(dims) * query.dtype.itemsize
    shares = num_splits(k, n, s, stage_bytes, False, sizes)
    del sizes["PER_SM"]
    return sizes | {"SPLITS": shares, "HELD": False} if shares > 1 else None


def qk_norm_rope_cache_attention(
    *operands: Any,
    gated: bool,
    scale: float,
    window: int | None,
    softcap: float | None,
    **turn: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`operands`: those of ProjectedTokens, the caches, and what is seen of them."""
    new = ProjectedTokens(*operands[:7])
    key_cache, value_cache, positions, new_lengths, sinks = operands[7:]
    query = new.query
    sizes = in_one_launch(query, key_cache, value_cache)
    shares = None
    if sizes is None and not gated and window is None:
        shares = in_two_launches(query, key_cache, value_cache)
    if sizes is None and shares is None:
        query, gate = heads_and_gates(query, new.key.shape[-1], gated)
        new = query, *new[1:]
        query, keys, values = qk_norm_rope_cache_p(
            *new, key_cache, value_cache, positions, new_lengths, ring=False, **turn
        )
        seen = visible_operands(query, keys, values, positions, new_lengths, sinks)
        options = dict(scale=scale, causal=True, window=window, softcap=softcap)
        out, _ = attention_p(*seen, **options)
        return out if gate is None else sigmoid_gate_p(out, gate), keys, values
    sizes = sizes or shares
    assert sizes is not None
    b, _, n, _ = query.shape
    s, k, hv = value_cache.shape[1:]
    h = new.key.shape[-1]
    apart = 0 if turn["pairing"] == "interleaved" else turn["pair_offset"]
    given = {f"{name}_ptr": x for name, x in new._asdict().items()} | {
        "old_key_cache_ptr": key_cache,
        "old_value_cache_ptr": value_cache,
        "positions_ptr": positions,
        "lengths_ptr": new_lengths,
    }
    caches = {"key_cache_ptr": like(key_cache), "value_cache_ptr": like(value_cache)}
    in_place = {f"old_{name}": name for name in caches}
    out = jax.ShapeDtypeStruct((b, 1, n, hv), query.dtype)
    programs = b * k * sizes["SPLITS"]
    constants = {
        "CALL": (b, 1, s, False, b * s),
        "K": k,
        "G": n // k,
        "HEAD": (h, padded(h), new.cos.shape[-1], apart, turn["eps"], turn["offset"]),
        "VALUE": (hv, padded(hv), turn["value_eps"]),
        "SCALE": scale,
        "SOFTCAP": softcap,
        "LOG2E": LOG2E,
        "ROWS": FEW_ROWS,
        "PROGRAMS": programs,
        "KEY_COPY": copy_tile(k * h),
        "VALUE_COPY": copy_tile(k * hv),
        **sizes,
    }
    if shares is None:
        y, keys, values = sparse_call(
            qk_norm_rope_cache_attention_kernel,
            (programs,),
            given | {"sinks_ptr": sinks},
            {"out_ptr": out, **caches},
            constants
            | {"GATE": hv if gated else 0}
            | {"WINDOW": None if window is None else min(window, FAR)},
            in_place=in_place,
        )
    else:
        parts = b, 1, n, sizes["SPLITS"]
        sums, lses, keys, values = sparse_call(
            qk_norm_rope_cache_shares_kernel,
            (programs,),
            given,
            {
                "out_ptr": jax.ShapeDtypeStruct((*parts, hv), jnp.float32),
                "lse_ptr": jax.ShapeDtypeStruct(parts, jnp.float32),
                **caches,
            },
            constants,
            in_place=in_place,
        )
        y, _ = merged(sums, lses, out, sinks)
    assert y is not None and keys is not None and values is not None
    return y, keys, values
