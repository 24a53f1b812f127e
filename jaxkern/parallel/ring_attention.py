"""Attention over a sequence cut over devices  (https://arxiv.org/abs/2310.01889).

    (out_r, lse_r) = attention(q, k_r, v_r)            of the shard r devices before
    lse = ln(sum_r exp(lse_r)),   out = sum_r exp(lse_r - lse) out_r

Each device keeps its queries; keys and values come by collective-permute, one shard at
a time. A pair of shards is `attention` itself, with its kernels and its gradients.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxkern.parallel.mesh_axis import AnyMesh, check_axis, from_before, over_axis
from jaxkern.parallel.zigzag import Order, check_order
from jaxkern.primitives.attention.attention import attention
from jaxkern.primitives.attention.mask import as_causal, check_softcap
from jaxkern.primitives.attention.merge_partials import merge_partials
from jaxkern.primitives.attention.scale import with_static_scale
from jaxkern.primitives.call import (
    Backend,
    backend_context,
    matmul_precision,
    same_manual_axes,
)
from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import at_least_f32


@check_arguments
def ring_attention(
    query: Float[Array, "b t k*g h"],
    key: Float[Array, "b s k h"],
    value: Float[Array, "b s k hv"],
    *,
    axis_name: str,
    segment_ids: Int[Array, "b t"]
    | tuple[Int[Array, "b t"], Int[Array, "b s"]]
    | None = None,
    sinks: Float[Array, " k*g"] | None = None,
    scale: float | Float[Array, ""] | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    order: Order = "contiguous",
    mesh: AnyMesh | None = None,
    return_lse: bool = False,
) -> (
    Float[Array, "b t k*g hv"]
    | tuple[Float[Array, "b t k*g hv"], Float[Array, "b t k*g"]]
):
    """`attention` over a sequence that the devices of a mesh axis have in shards.

        out, lse = attention(all queries, all keys, all values), shard by shard

    Inside `shard_map` the operands are this device's shards of t queries and s keys;
    elsewhere they are whole, and are cut over `axis_name`. Device i of n takes the keys
    of device i - r in step r of n, while those of the next step are on their way, and
    merges the results by their log-sum-exp in float32. With `causal` it skips shards
    that its queries do not see; with `window` too steps that reach no key.

    Of the queries, scores and results a device holds its own shard in both passes: the
    backward pass fetches keys and values again, computes a pair of shards again, and
    sends each shard's gradients home. XLA decides how many steps ahead keys and values
    are fetched; at most it holds those of the whole sequence, and their gradients. Only
    collective-permutes move data, 2 for each step, 4 backward.

    In contiguous order the last device of a causal sequence has n times the work of the
    first, and all wait for it. order="zigzag" is for rows reordered by `zigzag`: every
    device then has the same work, half of that. Rotate queries and keys by
    `sequence_positions` before.

    Source: https://arxiv.org/abs/2310.01889.

    Args:
      query: `[b, t, n, h]`, any float dtype, n = k*g heads.
      key: `[b, s, k, h]`, may differ from query in dtype.
      value: `[b, s, k, hv]`.
      axis_name: the mesh axis that cuts t and s.
      segment_ids: `[b, t]` for queries and keys (t = s), or one array for each; cut as
        they are.
      sinks: `[n]`, one more logit per head; see `attention`. The same on each device.
      scale: of the scores, default h ** -0.5; a traced one is differentiable.
      causal: queries see no key after their own position; t = s.
      window: a number or (left, right), as in `attention`; t = s, and not with zigzag.
      softcap: cap of the scores.
      order: how the rows lie over the devices, "contiguous" or "zigzag".
      mesh: outside `shard_map`, the mesh; default the one of `jax.set_mesh`.
      return_lse: return (out, lse); both are differentiable.

    Each pair's result is rounded to query.dtype before it is merged, and the sum once
    more.

    Returns:
      out: `[b, t, n, hv]`, dtype of query.
      lse: `[b, t, n]`, natural logarithm, float32; only with return_lse.

    Raises:
      TypeError: a shape or dtype does not fit.
      ValueError: an option out of range, no such axis, or dims that it does not divide.

    Example:
      >>> mesh = jax.make_mesh((1,), ("x",))
      >>> x = jnp.eye(4)[None, :, None, :2]  # [b, t, heads, h]
      >>> out = jaxkern.ring_attention(x, x, x, axis_name="x", mesh=mesh, causal=True)
      >>> bool(jnp.allclose(out, jaxkern.attention(x, x, x, causal=True)))
      True
    """
    op = "ring_attention"
    check_axis(op, axis_name)
    check_order(op, order)
    check_softcap(op, softcap)
    check_shards(query, key, value, causal, window, order)
    as_causal(op, window, causal)
    query, scale = with_static_scale(op, query, scale)
    options = Ring(
        axis_name=axis_name,
        scale=scale,
        causal=bool(causal),
        window=window,
        softcap=softcap,
        zigzag=order == "zigzag" and bool(causal),
        backend=backend_context.value,
        precision=matmul_precision(),
    )
    paired = isinstance(segment_ids, tuple)
    ids = segment_ids if paired else (segment_ids,) * 2
    rows = P(None, axis_name)
    out, lse = over_axis(
        op,
        lambda *operands: ring(Shards(*operands), options),
        (query, key, value, *ids, sinks),
        axis_name=axis_name,
        mesh=mesh,
        in_specs=(*(rows,) * 5, P()),
        out_specs=(rows, rows),
    )
    out = out.astype(query.dtype)
    return (out, lse) if return_lse else out


class Shards(NamedTuple):
    """The operands of one device."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    q_segment_ids: jax.Array | None
    kv_segment_ids: jax.Array | None
    sinks: jax.Array | None


class Ring(NamedTuple):
    """The options; `zigzag` only where it makes a difference.

    Backend and precision are those of the call: gradients may be traced after it.
    """

    axis_name: str
    scale: float
    causal: bool
    window: Any
    softcap: float | None
    zigzag: bool
    backend: Backend
    precision: str | None


def check_shards(query, key, value, causal, window, order) -> None:
    op = "ring_attention"
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 4:
            raise TypeError(
                f"{op}: `{name}` must have dims [b, rows, heads, head dim], got shape "
                f"{x.shape}."
            )
    t, s = query.shape[1], key.shape[1]
    if (causal or window is not None) and t != s:
        raise ValueError(
            f"{op}: {t} queries and {s} keys. With causal or window each device must "
            "have as many of one as of the other, at the same positions."
        )
    if order == "zigzag" and window is not None:
        raise ValueError(
            f"{op}: window with order='zigzag'. A window's work is balanced without "
            "it: leave the rows contiguous."
        )
    if order == "zigzag" and t % 2:
        raise ValueError(f"{op}: {t} rows are not two blocks, as `zigzag` has.")


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def ring(o: Shards, options: Ring) -> tuple[jax.Array, jax.Array]:
    """(out, lse) of this device's queries over the keys of all, out in float32."""
    out, lse = attended(o, 0, options)
    out = at_least_f32(out)
    for r in range(1, steps(o, options)):
        part, part_lse = attended(with_keys_of(o, r, options), r, options)
        outs = jnp.stack([out, part.astype(out.dtype)])
        out, lse = merge_partials(outs, jnp.stack([lse, part_lse]))
    return out, lse


@ring.defjvp
def ring_jvp(options: Ring, primals, tangents):
    """With w_r = exp(lse_r - lse), from the tangents of each pair of shards:

        dlse = sum_r w_r dlse_r
        dout = sum_r w_r (dout_r + (out_r - out) dlse_r)

    A term needs only this device's shards and the results. `checkpoint` keeps nothing
    else of it, so the transpose does not hold what each pair computed.
    """
    [o], [do] = primals, tangents
    out, lse = ring(o, options)
    dout, dlse = jnp.zeros_like(out), jnp.zeros_like(lse)
    for r in range(steps(o, options)):
        f = jax.checkpoint(functools.partial(tangent_of_pair, r=r, options=options))
        part = f(o, do, out, lse)
        dout, dlse = dout + part[0], dlse + part[1]
    return (out, lse), (dout, dlse)


def tangent_of_pair(o: Shards, do: Shards, out, lse, *, r: int, options: Ring):
    names = [name for name, x in o._asdict().items() if is_float(x)]
    of_floats = [{n: getattr(x, n) for n in names} for x in (o, do)]

    def pair(floats):
        given = o._replace(**floats)
        return attended(with_keys_of(given, r, options), r, options)

    of_pair, of_tangents = jax.jvp(pair, of_floats[:1], of_floats[1:])
    part, dpart = (at_least_f32(x[0]) for x in (of_pair, of_tangents))
    # 0 where the pair has seen nothing, also where no pair has seen anything
    weight = jnp.exp(of_pair[1] - jnp.where(lse == -jnp.inf, 0, lse))
    dlse = weight * of_tangents[1]
    return weight[..., None] * dpart + (part - out) * dlse[..., None], dlse


def is_float(x) -> bool:
    return x is not None and jnp.issubdtype(x.dtype, jnp.floating)


def steps(o: Shards, options: Ring) -> int:
    """How many shards of keys a device may see: its own and those before it."""
    n, t = lax.axis_size(options.axis_name), o.query.shape[1]
    causal, window, shift = as_causal("ring_attention", options.window, options.causal)
    if not causal or window is None or shift:
        return n
    # the first query of a shard is r t - t + 1 behind the last key of r shards before
    return min(n, (window + t - 2) // max(t, 1) + 1)


def with_keys_of(o: Shards, r: int, options: Ring) -> Shards:
    """With the keys of the device r before this one; sinks count once, with its own."""
    if r == 0:
        return o
    names = "key", "value", "kv_segment_ids"
    given = {name: getattr(o, name) for name in names}
    return o._replace(**from_before(given, options.axis_name, r), sinks=None)


def attended(o: Shards, r: int, options: Ring) -> tuple[jax.Array, jax.Array]:
    """(out, lse) of the queries over the keys of the device r before."""
    if r == 0:
        return attend(o, options)
    if options.zigzag:
        return attended_zigzag(o, r, options)
    op, t = "ring_attention", o.query.shape[1]
    causal, window, shift = as_causal(op, options.window, options.causal)
    i, n = lax.axis_index(options.axis_name), lax.axis_size(options.axis_name)
    if not causal and window is None:
        return attend(o, options)
    if options.causal and window is None:
        whole = options._replace(causal=False)
        return where_seen(i >= r, lambda o: attend(o, whole), o)
    # rows between the first query and the first key; a pair has t - 1 more, and less
    apart = jnp.where(i >= r, r, r - n) * t
    seen = jnp.array(True)
    if causal:
        seen = seen & (apart + shift + t - 1 >= 0)
    if window is not None:
        seen = seen & (apart + shift - (t - 1) < window)
    return where_seen(seen, lambda o, apart: attend(o, options, apart), o, apart)


def attended_zigzag(o: Shards, r: int, options: Ring) -> tuple[jax.Array, jax.Array]:
    """Of an earlier device all queries see the first block of keys, and no other.

    Of a later device the second block of queries sees both blocks of keys, and the
    first sees none.
    """
    half, whole = o.query.shape[1] // 2, options._replace(causal=False)

    def rows(x, part):
        return None if x is None else x[:, part]

    first, second = slice(0, half), slice(half, None)

    def earlier(o):
        names = "key", "value", "kv_segment_ids"
        cut = {name: rows(getattr(o, name), first) for name in names}
        return attend(o._replace(**cut), whole)

    def later(o):
        cut = {n: rows(getattr(o, n), second) for n in ("query", "q_segment_ids")}
        found = attend(o._replace(**cut), whole)
        unseen = (jnp.zeros_like(found[0]), jnp.full_like(found[1], -jnp.inf))
        both = zip(unseen, found, strict=True)
        return tuple(jnp.concatenate(pair, axis=1) for pair in both)

    i = lax.axis_index(options.axis_name)
    return lax.cond(i >= r, earlier, later, o)


def where_seen(seen: jax.Array, f, o: Shards, *more: jax.Array):
    """`f(o, *more)` on devices whose queries see these keys; elsewhere nothing runs."""

    def nothing(o, *more):
        shape = (*o.query.shape[:3], o.value.shape[3])
        # cut as the queries are on an explicit mesh
        out = jnp.broadcast_to(jnp.zeros_like(o.query[..., :1]), shape)
        wide = jnp.result_type(o.query, jnp.float32)
        lse = jnp.full_like(o.query[..., 0], -jnp.inf, wide)
        every = [x for x in o if x is not None]
        return tuple(same_manual_axes([out, lse, *every, *more])[:2])

    return lax.cond(seen, f, nothing, o, *more)


def attend(o: Shards, options: Ring, q_offset=None) -> tuple[jax.Array, jax.Array]:
    ids = None
    if o.q_segment_ids is not None and o.kv_segment_ids is not None:
        ids = o.q_segment_ids, o.kv_segment_ids
    with (
        backend_context(options.backend),
        jax.default_matmul_precision(options.precision),
    ):
        found = attention(
            o.query,
            o.key,
            o.value,
            segment_ids=ids,
            q_offset=q_offset,
            sinks=o.sinks,
            scale=options.scale,
            causal=options.causal,
            window=options.window,
            softcap=options.softcap,
            return_lse=True,
        )
    assert isinstance(found, tuple)  # with lse
    return found
