"""Recurrences over a sequence cut over devices, whose states are carried between them.

A shard maps the state before it to the one behind it by an affine map, S -> A S + B.
Each device finds A and B of its own shard, all exchange them, and each composes those
before it to the state that its shard begins with:

    S_i = A_{i-1} (... (A_0 S_0 + B_0) ...) + B_{i-1}

This is exact up to rounding, for any number of devices. The maps are those of the gated
delta rule (https://arxiv.org/abs/2412.06464) and of Mamba-2's layer
(https://arxiv.org/abs/2405.21060).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxkern.parallel.mesh_axis import AnyMesh, check_axis, from_before, over_axis
from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.delta_rule.gated_delta_rule import HeadOrder, gated_delta_rule
from jaxkern.primitives.delta_rule.state_space_dual import state_space_dual

Compose = Callable[[jax.Array, jax.Array], jax.Array]


@check_arguments
def sharded_gated_delta_rule(
    query: Float[Array, "b t k h"],
    key: Float[Array, "b t k h"],
    value: Float[Array, "b t k*g hv"],
    g: Float[Array, "b t k*g"],
    beta: Float[Array, "b t k*g"],
    initial_state: Float[Array, "b k*g h hv"] | None = None,
    *,
    axis_name: str,
    segment_ids: Int[Array, "b t"] | None = None,
    scale: float | None = None,
    gqa: HeadOrder = "block",
    mesh: AnyMesh | None = None,
) -> tuple[Float[Array, "b t k*g hv"], Float[Array, "b k*g h hv"]]:
    """`gated_delta_rule` over a sequence that the devices of an axis have in shards.

        out, final_state = gated_delta_rule(all tokens), shard by shard

    Inside `shard_map` the operands are this device's t tokens; elsewhere they are
    whole, and are cut over `axis_name`. A first pass finds what the shard does to a
    state: it carries the identity beside zeros, h + hv columns. Then the devices
    exchange b n h (h + hv) numbers each, and a second pass begins with the right state.
    So n devices take about three n-ths of the time of one.

    Args:
      query, key, value, g, beta: of this device, see `gated_delta_rule`.
      initial_state: `[b, n, h, hv]` before the first token of all, the same on each
        device, or None for zeros.
      axis_name: the mesh axis that cuts t.
      segment_ids: `[b, t]` int, cut as the tokens are: where the id changes, also
        from one device to the next, the state begins anew.
      scale: of the query, default h ** -0.5.
      gqa: which key head value head i reads, see `gated_delta_rule`.
      mesh: outside `shard_map`, the mesh; default the one of `jax.set_mesh`.

    Returns:
      out: `[b, t, n, hv]`, dtype of value.
      final_state: `[b, n, h, hv]` behind the last token of all, on each device; dtype
        of initial_state, else float32 (float64).

    Raises:
      TypeError: a dtype is not a float, or a dim differs between operands.
      ValueError: an option out of range, no such axis, or a t that it does not divide.

    Example:
      >>> mesh = jax.make_mesh((1,), ("x",))
      >>> one, gate = jnp.ones((1, 4, 1, 2)), jnp.zeros((1, 4, 1))
      >>> out, state = jaxkern.sharded_gated_delta_rule(
      ...     one, one, one, gate, gate + 0.5, axis_name="x", mesh=mesh
      ... )
      >>> whole, _ = jaxkern.gated_delta_rule(one, one, one, gate, gate + 0.5)
      >>> bool(jnp.allclose(out, whole))
      True
    """
    op = "sharded_gated_delta_rule"
    check_axis(op, axis_name)
    options: dict[str, Any] = dict(scale=scale, gqa=gqa)

    def run(query, key, value, g, beta, initial, ids):
        n, h, hv = value.shape[2], key.shape[3], value.shape[3]
        wide = jnp.result_type(jnp.float32, query, key, value, g, beta)
        tokens = dict(segment_ids=ids, **options)

        def shard():
            """Both maps at once: columns of B from zeros, columns of A from 1."""
            beside = jnp.zeros((*value.shape[:3], h), value.dtype)
            columns = jnp.concatenate([value, beside], axis=3)
            one = jnp.concatenate([jnp.zeros((h, hv), wide), jnp.eye(h, dtype=wide)], 1)
            begin = jnp.broadcast_to(one, (value.shape[0], n, h, hv + h))
            _, both = gated_delta_rule(query, key, columns, g, beta, begin, **tokens)
            return both[..., hv:], both[..., :hv]

        if initial is None:
            initial = jnp.zeros((value.shape[0], n, h, hv), wide)
        begins, final = carried(shard, initial.astype(wide), ids, axis_name, jnp.matmul)
        out, _ = gated_delta_rule(query, key, value, g, beta, begins, **tokens)
        return out, final.astype(initial.dtype)

    rows = P(None, axis_name)
    return over_axis(
        op,
        run,
        (query, key, value, g, beta, initial_state, segment_ids),
        axis_name=axis_name,
        mesh=mesh,
        in_specs=(*(rows,) * 5, P(), rows),
        out_specs=(rows, P()),
    )


@check_arguments
def sharded_state_space_dual(
    x: Float[Array, "r t k*g h"],
    step: Float[Array, "r t k*g"],
    a: Float[Array, " k*g"],
    b: Float[Array, "r t k state"],
    c: Float[Array, "r t k state"],
    initial_state: Float[Array, "r k*g h state"] | None = None,
    *,
    axis_name: str,
    segment_ids: Int[Array, "r t"] | None = None,
    mesh: AnyMesh | None = None,
) -> tuple[Float[Array, "r t k*g h"], Float[Array, "r k*g h state"]]:
    """`state_space_dual` over a sequence that the devices of an axis have in shards.

        y, final_state = state_space_dual(all tokens), shard by shard

    As `sharded_gated_delta_rule`; a shard's A is one number of each head, which is
    exp(a sum step), and the devices exchange r n (h state + 1) numbers each. n devices
    take about two n-ths of the time of one.

    Args:
      x, step, b, c: of this device, see `state_space_dual`.
      a: `[n]`, the same on each device.
      initial_state: `[r, n, h, state]` before the first token of all, the same on each
        device, or None for zeros.
      axis_name: the mesh axis that cuts t.
      segment_ids: `[r, t]` int, cut as the tokens are.
      mesh: outside `shard_map`, the mesh; default the one of `jax.set_mesh`.

    Returns:
      y: `[r, t, n, h]`, dtype of x.
      final_state: `[r, n, h, state]`, on each device; dtype of initial_state, else
        float32 (float64).

    Raises:
      TypeError: a dtype is not a float, or a dim differs between operands.
      ValueError: no such axis, or a t that it does not divide.

    Example:
      >>> mesh = jax.make_mesh((1,), ("x",))
      >>> x, step = jnp.ones((1, 3, 1, 2)), jnp.ones((1, 3, 1))
      >>> bc = jnp.ones((1, 3, 1, 1))
      >>> y, _ = jaxkern.sharded_state_space_dual(
      ...     x, step, -jnp.ones(1), bc, bc, axis_name="x", mesh=mesh
      ... )
      >>> y[0, :, 0, 0]
      Array([1.   , 1.368, 1.503], dtype=float32)
    """
    op = "sharded_state_space_dual"
    check_axis(op, axis_name)

    def run(x, step, a, b, c, initial, ids):
        wide = jnp.result_type(jnp.float32, x, step, a, b, c)

        def shard():
            total = jnp.sum(step.astype(wide), axis=1) * a.astype(wide)
            if ids is not None:  # what came before is forgotten within the shard
                changes = jnp.any(ids[:, 1:] != ids[:, :-1], axis=1)
                total = jnp.where(changes[:, None], -jnp.inf, total)
            _, state = state_space_dual(x, step, a, b, c, segment_ids=ids)
            return jnp.exp(total)[..., None, None], state

        if initial is None:
            sizes = x.shape[0], *x.shape[2:], b.shape[3]
            initial = jnp.zeros(sizes, wide)
        begins, final = carried(
            shard, initial.astype(wide), ids, axis_name, jnp.multiply
        )
        y, _ = state_space_dual(x, step, a, b, c, begins, segment_ids=ids)
        return y, final.astype(initial.dtype)

    rows = P(None, axis_name)
    return over_axis(
        op,
        run,
        (x, step, a, b, c, initial_state, segment_ids),
        axis_name=axis_name,
        mesh=mesh,
        in_specs=(rows, rows, P(), rows, rows, P(), rows),
        out_specs=(rows, P()),
    )


def carried(
    shard: Callable[[], tuple[jax.Array, jax.Array]],
    initial: jax.Array,
    segment_ids: jax.Array | None,
    axis_name: str,
    compose: Compose,
) -> tuple[jax.Array, jax.Array]:
    """(the state before this shard, the state behind the last), by one all-gather.

    Args:
      shard: gives A and B of this device.
      initial: the state before the first shard.
      segment_ids: of this device's tokens, or None.
      compose: A S of A and a state.
    """
    decay, written = shard()
    stays = jnp.ones(())
    if segment_ids is not None:
        last = from_before(segment_ids[:, -1], axis_name)
        same = (segment_ids[:, 0] == last) | (lax.axis_index(axis_name) == 0)
        stays = same.reshape(-1, *(1,) * (written.ndim - 1)).astype(written.dtype)
        decay = decay * stays
    maps = lax.all_gather((decay, written), axis_name)
    state, before = initial, []
    for i in range(lax.axis_size(axis_name)):
        before.append(state)
        state = compose(maps[0][i], state) + maps[1][i]
    i, n = lax.axis_index(axis_name), lax.axis_size(axis_name)
    begins = lax.dynamic_index_in_dim(jnp.stack(before), i, keepdims=False) * stays
    # all have it; the sum says so to shard_map
    final = lax.psum(jnp.where(i == n - 1, state, 0), axis_name)
    return begins, final
