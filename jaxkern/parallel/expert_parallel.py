"""A mixture of experts whose experts are spread over the devices of a mesh axis."""

from typing import TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int32

from jaxkern.parallel.mesh_axis import AnyMesh, check_axis, over_axis
from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import at_least_f32
from jaxkern.primitives.moe.moe_ffn import expert_activation, moe_ffn
from jaxkern.primitives.quant.quantized_tensor import QuantizedTensor


class ExpertOptions(TypedDict, total=False):
    """Options of `moe_ffn`."""

    activation: str
    gated: bool
    weigh_input: bool
    alpha: float
    limit: float | None
    up_offset: float


@check_arguments
def sharded_moe_ffn(
    x: Float[Array, "... d"],
    ids: Int32[Array, "... k"],
    weights: Float[Array, "... k"],
    gate: Float[Array, "e f d"] | QuantizedTensor,
    up: Float[Array, "e f d"] | QuantizedTensor | None,
    down: Float[Array, "e d f"] | QuantizedTensor,
    gate_bias: Float[Array, "e f"] | None = None,
    up_bias: Float[Array, "e f"] | None = None,
    down_bias: Float[Array, "e d"] | None = None,
    *,
    axis_name: str,
    mesh: AnyMesh | None = None,
    **options: Unpack[ExpertOptions],
) -> Float[Array, "... d"]:
    """`moe_ffn` whose tokens and experts the devices of an axis have in shards.

        y = moe_ffn(all tokens, all experts), shard by shard

    Inside `shard_map` the operands are this device's tokens and this device's experts,
    and `ids` count all experts; elsewhere all are whole, and are cut over `axis_name`
    at their first dim. Each device sends its tokens to all, applies its experts to
    those that chose them, and sends back what it has of each token's sum. Of t tokens
    on each of n devices that is n t rows each way: room for any routing, so no token is
    dropped, and what is sent does not depend on the ids. Values and the gradient of `x`
    have the same bits in every run: parts are added up in the order of the devices, in
    float32 forward.

    Only all-to-alls move data: of x, ids and weights, and one back.

    Args:
      x: `[t, ..., d]`, any float dtype.
      ids: `[t, ..., k]` in all experts, from `route`; outside of them one contributes
        zero.
      weights: `[t, ..., k]`, from `route`.
      gate, up, down, gate_bias, up_bias, down_bias: of this device's experts, device i
        has the i-th run of them; see `moe_ffn`.
      axis_name: the mesh axis that cuts tokens and experts.
      mesh: outside `shard_map`, the mesh; default the one of `jax.set_mesh`.
      options: activation, gated, weigh_input, alpha, limit, up_offset of `moe_ffn`.

    Each device's part of a sum is rounded to x.dtype before it is sent.

    Returns:
      y: `[t, ..., d]`, dtype of x.

    Raises:
      TypeError: shapes or dtypes do not fit, or x has no dim of tokens.
      ValueError: an option that `moe_ffn` does not know, no such axis, or a number of
        tokens or experts that it does not divide.

    Example:
      >>> mesh = jax.make_mesh((1,), ("x",))
      >>> x, logits = jnp.ones((2, 4)), jnp.array([[1.0, 0.0, 2.0], [3.0, 0.0, 0.0]])
      >>> weights, ids = jaxkern.route(logits, 2)
      >>> gate, down = jnp.ones((3, 8, 4)), jnp.ones((3, 4, 8))
      >>> experts = ids, weights, gate, gate, down
      >>> y = jaxkern.sharded_moe_ffn(x, *experts, axis_name="x", mesh=mesh)
      >>> bool(jnp.allclose(y, jaxkern.moe_ffn(x, *experts)))
      True
    """
    op = "sharded_moe_ffn"
    check_axis(op, axis_name)
    check_options(op, options)
    if x.ndim < 2 or ids.shape[:-1] != x.shape[:-1] or ids.shape != weights.shape:
        raise TypeError(
            f"{op}: `x` must be [t, ..., d], `ids` and `weights` [t, ..., k], got "
            f"{x.shape}, {ids.shape} and {weights.shape}."
        )

    def run(x, ids, weights, *experts):
        first = lax.axis_index(axis_name) * experts[0].shape[0]
        tokens = (from_all(a, axis_name) for a in (x, ids, weights))
        x_of_all, ids_of_all, weights_of_all = tokens
        part = moe_ffn(
            x_of_all, ids_of_all - first, weights_of_all, *experts, **options
        )
        parts = lax.all_to_all(part, axis_name, 0, 0, tiled=True)
        total = at_least_f32(parts[0])
        for other in parts[1:]:
            total = total + at_least_f32(other)
        return total.astype(x.dtype)

    cut = P(axis_name)
    return over_axis(
        op,
        run,
        (x, ids, weights, gate, up, down, gate_bias, up_bias, down_bias),
        axis_name=axis_name,
        mesh=mesh,
        in_specs=(cut,) * 9,
        out_specs=cut,
    )


def check_options(op: str, options: ExpertOptions) -> None:
    if unknown := sorted(set(options) - set(ExpertOptions.__annotations__)):
        raise TypeError(f"{op}: no option {unknown[0]!r}; see `moe_ffn`.")
    expert_activation(
        options.get("activation", "swiglu"),
        options.get("gated", True),
        options.get("alpha", 1.0),
        options.get("limit"),
        options.get("up_offset", 0.0),
        op,
    )


def from_all(x: jax.Array, axis_name: str) -> jax.Array:
    """`[n, *x.shape]`, entry i from device i.

    An all-gather in the form of an all-to-all: its gradient adds up the devices' parts
    here, in their order, where that of an all-gather leaves the order to the network.
    """
    n = lax.axis_size(axis_name)
    return lax.all_to_all(
        jnp.broadcast_to(x, (n, *x.shape)), axis_name, 0, 0, tiled=True
    )
