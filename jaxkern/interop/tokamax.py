"""tokamax's operators, under its names and signatures (0.0.17), by these operators.

    from jaxkern.interop import tokamax

`implementation` takes "xla", "triton" and "mosaic"; of several the first, and XLA where
it refuses. Its quantised arrays (qwix) are refused. Its tuner, its benchmarks and what
is theirs have no counterpart under these names: `LACKING` says what does the same here.
"""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer

from jaxkern.interop.attending import attend_as_jax_nn
from jaxkern.interop.calling import as_asked, takes_holders
from jaxkern.interop.tokamax_ragged import (
    Activation,
    RaggedDotGroupSizes,
    generate_ragged_dot_group_sizes,
    ragged_dot,
    ragged_dot_general,
)
from jaxkern.lowering.exported_kernels import CHECKS as DISABLE_JAX_EXPORT_CHECKS
from jaxkern.primitives.activation.activations import Activation as ActivationName
from jaxkern.primitives.activation.glu import glu
from jaxkern.primitives.attention.plain_attention import SoftcapAfterBias
from jaxkern.primitives.declared_dims import unwrapped
from jaxkern.primitives.linear.linear import linear
from jaxkern.primitives.loss.linear_cross_entropy import linear_cross_entropy
from jaxkern.primitives.norm.layer_norm import layer_norm as own_layer_norm
from jaxkern.primitives.norm.rms_norm import rms_norm

__all__ = [
    "DISABLE_JAX_EXPORT_CHECKS",
    "DotProductAttentionImplementation",
    "RaggedDotGroupSizes",
    "dot_product_attention",
    "gated_linear_unit",
    "generate_ragged_dot_group_sizes",
    "layer_norm",
    "linear_softmax_cross_entropy_loss",
    "ragged_dot",
    "ragged_dot_general",
    "triangle_multiplication",
]

DotProductAttentionImplementation = Literal["mosaic", "triton", "xla", "xla_chunked"]
# What theirs tunes, measures and inspects itself with, and what does that here.
LACKING = {
    "autotune": "jaxkern.testing.autotune",
    "autotuning": "jaxkern.testing.autotune",
    "AutotuningResult": "jaxkern.testing.Tuning",
    "benchmark": "jaxkern.testing.benchmark",
    "BenchmarkData": "jaxkern.testing.Measurement",
    "benchmarking": "jaxkern.testing.benchmark",
    "BatchedShapeDtype": "jax.vmap of any operator",
    "BoundArguments": "jaxkern.explain, which says what runs",
    "config": "jaxkern.backend and jaxkern.tuned",
    "Op": "jaxkern.primitives.kernel_primitive.kernel_primitive",
    "ops": "jaxkern, whose names docs/operators.md has",
    "snake_case_name": "the name of an operator's function",
    "standardize_function": "jaxkern.testing.benchmark",
}
# What `glu` has in one launch; other functions are applied to the product.
GATES: dict[Activation | None, ActivationName] = {
    None: "none",
    jax.nn.sigmoid: "sigmoid",
    jax.nn.silu: "silu",
    jax.nn.relu: "relu",
    jax.nn.gelu: "gelu_tanh",
    jnp.tanh: "tanh",
}


def __getattr__(name: str) -> Any:
    """The refusal of a name of tokamax's that has its counterpart elsewhere."""
    if name in LACKING:
        raise AttributeError(
            f"jaxkern.interop.tokamax has no `{name}`. Here it is {LACKING[name]}."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@takes_holders
def dot_product_attention(
    query: Float[Array, "*b t n h"],
    key: Float[Array, "*b s k h"],
    value: Float[Array, "*b s k hv"],
    bias: Float[Array, "*#b #n #t #s"] | None = None,
    mask: Bool[Array, "*#b #n #t #s"] | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, "*#b"] | None = None,
    key_value_seq_lengths: Int[Array, "*#b"] | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: str | Sequence[str] | None = None,
    q_sharding: jax.sharding.NamedSharding | None = None,
) -> Float[Array, "*b t n hv"]:
    """Attention over any batch dims, the cap after the bias, as tokamax has it.

        out = softmax(cap tanh((scale q k^T + bias) / cap)) v

    Causal and windows count from the first query and the first key. A query that sees
    no key gives zeros.

    Raises:
      NotImplementedError: a `q_sharding`: operands carry their own.
      ValueError: an unknown implementation or precision.

    Example:
      >>> from jaxkern.interop import tokamax
      >>> x = jnp.ones((2, 3, 5, 4, 8))  # two batch dims
      >>> tokamax.dot_product_attention(x, x, x, is_causal=True).shape
      (2, 3, 5, 4, 8)
    """
    op = "dot_product_attention"
    if q_sharding is not None:
        raise NotImplementedError(
            f"{op}: `q_sharding` is not supported. Leave it out: operands carry theirs."
        )
    cap = None if logits_soft_cap is None else SoftcapAfterBias(logits_soft_cap)
    with as_asked(op, implementation, precision):
        out, _ = attend_as_jax_nn(
            op,
            *(query, key, value, bias, mask),
            is_causal=is_causal,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            local_window_size=local_window_size,
            scale=scale,
            softcap=cap,
        )
    return out


@takes_holders
def layer_norm(
    x: Float[Array, "..."],
    scale: Float[Array, " d"] | None,
    offset: Float[Array, " d"] | None,
    *,
    axis: int = -1,
    epsilon: float = 1e-06,
    scale_offset: float = 0.0,
    subtract_mean: bool = True,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "..."]:
    """Layer norm over one axis; RMS norm without `subtract_mean`.

        y = (x - mean) / sqrt(var + epsilon) * (scale + scale_offset) + offset

    Without a scale its offset has nothing to be added to.

    Example:
      >>> from jaxkern.interop import tokamax
      >>> tokamax.layer_norm(jnp.array([[1.0], [3.0]]), None, None, axis=0)[:, 0]
      Array([-1.,  1.], dtype=float32)
    """
    norm = own_layer_norm if subtract_mean else rms_norm
    x = jnp.moveaxis(x, axis, -1)
    with as_asked("layer_norm", implementation):
        y = norm(x, scale, offset, eps=epsilon, offset=scale_offset)
    return jnp.moveaxis(y, -1, axis)


@takes_holders
def gated_linear_unit(
    x: Float[Array, "*b m k"],
    weights: Float[Array, "k 2 n"] | tuple[Float[Array, "k n"], Float[Array, "k n"]],
    *,
    activation: Activation | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "*b m n"]:
    """activation(x gate) * (x up), the weights one array or two.

    Products of 16 bits are rounded before the gate, unless `activation` is a function
    of its own. JAX's sigmoid, silu, gelu, relu and tanh run in the gate's kernel, as
    does a gate without one.

    Example:
      >>> from jaxkern.interop import tokamax
      >>> tokamax.gated_linear_unit(jnp.ones((1, 3)), jnp.ones((3, 2, 1)))
      Array([[9.]], dtype=float32)
    """
    if isinstance(weights, tuple | list):
        gate_weight, up_weight = map(unwrapped, weights)
    else:
        gate_weight, up_weight = weights[:, 0], weights[:, 1]
    with as_asked("gated_linear_unit", implementation, precision):
        gate, up = linear(x, gate_weight.T), linear(x, up_weight.T)
        if activation is None or activation in GATES:
            return glu(gate, up, activation=GATES[activation])
        return (activation(gate) * up).astype(x.dtype)


@takes_holders
def linear_softmax_cross_entropy_loss(
    x: Float[Array, "b h"],
    labels: Integer[Array, " b"],
    weights: Float[Array, "h v"],
    *,
    reduction: Literal["sum", "mean", "none"] = "sum",
    precision: jax.lax.PrecisionLike = None,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, ""] | Float[Array, " b"]:
    """Cross entropy of x weights, of which no more than blocks are in memory.

    Every label counts: one that is no class, -100 too, has NaN as its loss. `reduction`
    "none" gives the loss of each row.

    Example:
      >>> from jaxkern.interop import tokamax
      >>> x, labels = jnp.ones((3, 2)), jnp.array([0, 1, 2])
      >>> tokamax.linear_softmax_cross_entropy_loss(
      ...     x, labels, jnp.ones((2, 4)), reduction="mean")
      Array(1.386, dtype=float32)
    """
    if reduction not in ("sum", "mean", "none"):
        raise ValueError(
            f"linear_softmax_cross_entropy_loss: `reduction` must be 'sum', 'mean' or "
            f"'none', got {reduction!r}."
        )
    with as_asked("linear_softmax_cross_entropy_loss", implementation, precision):
        loss = linear_cross_entropy(
            x, weights.T, labels, ignore_index=None, reduction=reduction
        )
    assert isinstance(loss, jax.Array)  # no lse was asked for
    return loss


@takes_holders
def triangle_multiplication(
    x: Float[Array, "r r c"],
    mask: Bool[Array, "r r"],
    projection_in_weights: Float[Array, "c 2 h"],
    gate_in_weights: Float[Array, "c 2 h"],
    projection_out_weights: Float[Array, "h d"],
    gate_out_weights: Float[Array, "c d"],
    layernorm_in_scale: Float[Array, " c"],
    layernorm_in_offset: Float[Array, " c"],
    layernorm_out_scale: Float[Array, " h"],
    layernorm_out_offset: Float[Array, " h"],
    triangle_type: Literal["incoming", "outgoing"],
    *,
    precision: jax.lax.PrecisionLike = None,
    epsilon: float = 1e-6,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "r r d"]:
    """AlphaFold 2's triangle update (https://doi.org/10.1038/s41586-021-03819-2).

        z = norm(x);  a, b = mask sigmoid(z gate) (z projection), two halves
        outgoing: s_ij = sum_k a_ik b_jk      incoming: s_ij = sum_k a_kj b_ki
        out = sigmoid(z gate_out) (norm(s) projection_out)

    Its algorithms 11 and 12. Norms and gates are kernels, the sum over k is XLA's.

    Raises:
      ValueError: another `triangle_type`.

    Example:
      >>> from jaxkern.interop import tokamax
      >>> w = [jnp.ones(s) for s in [(4, 2, 3), (4, 2, 3), (3, 5), (4, 5)]]
      >>> norms = [jnp.ones(n) for n in [4, 4, 3, 3]]
      >>> x, mask = jnp.ones((2, 2, 4)), jnp.ones((2, 2), bool)
      >>> tokamax.triangle_multiplication(x, mask, *w, *norms, "outgoing").shape
      (2, 2, 5)
    """
    op = "triangle_multiplication"
    sums = {"outgoing": "ikc,jkc->ijc", "incoming": "kjc,kic->ijc"}
    if triangle_type not in sums:
        raise ValueError(
            f"{op}: `triangle_type` must be 'incoming' or 'outgoing', got "
            f"{triangle_type!r}."
        )
    with as_asked(op, implementation, precision):
        z = own_layer_norm(x, layernorm_in_scale, layernorm_in_offset, eps=epsilon)
        a, b = (
            glu(linear(z, gate_in_weights[:, i].T), linear(z, projection.T))
            * mask[..., None].astype(z.dtype)
            for i, projection in enumerate(projection_in_weights.swapaxes(0, 1))
        )
        s = jnp.einsum(sums[triangle_type], a, b)
        s = own_layer_norm(s, layernorm_out_scale, layernorm_out_offset, eps=epsilon)
        return glu(linear(z, gate_out_weights.T), linear(s, projection_out_weights.T))
