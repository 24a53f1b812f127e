"""Weighted sum of a token's experts, with the shared expert and the residual."""

import jax
from jaxtyping import Array, Float

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive


@check_arguments
def moe_weighted_reduce(
    expert_out: Float[Array, "... k d"],
    weights: Float[Array, "... k"],
    shared: Float[Array, "... d"] | None = None,
    shared_gate: Float[Array, "..."] | None = None,
    residual: Float[Array, "... d"] | None = None,
) -> Float[Array, "... d"]:
    """Sums what the k experts of a token gave, with the shared expert and the residual.

        y = sum_k weights[k] * expert_out[k] + sigmoid(shared_gate) * shared + residual

    In float32 (float64 for float64 operands), slot after slot, rounded once.

    Args:
      expert_out: `[..., k, d]`, any float dtype.
      weights: `[..., k]`, from `route`.
      shared: `[..., d]`, the output of a shared expert, or None.
      shared_gate: `[...]`, logits of its gate (Qwen2-MoE, Qwen3-Next); None for a
        shared expert without a gate (DeepSeek).
      residual: `[..., d]`, or None.

    Returns:
      y: `[..., d]`, dtype of `residual` if there is one, else of `expert_out`.

    Raises:
      TypeError: a dtype is not a float, or a dim differs between operands.
      ValueError: `shared_gate` without `shared`.

    Example:
      >>> expert_out, weights = jnp.array([[[1.0], [3.0]]]), jnp.array([[0.75, 0.25]])
      >>> jaxkern.moe_weighted_reduce(expert_out, weights, residual=jnp.array([[10.0]]))
      Array([[11.5]], dtype=float32)
    """
    if shared is None and shared_gate is not None:
        raise ValueError("moe_weighted_reduce: `shared_gate` needs `shared`.")
    return moe_weighted_reduce_p(expert_out, weights, shared, shared_gate, residual)


def moe_weighted_reduce_reference(
    expert_out: Float[Array, "... slot d"],
    weights: Float[Array, "... slot"],
    shared: Float[Array, "... d"] | None,
    shared_gate: Float[Array, "..."] | None,
    residual: Float[Array, "... d"] | None,
) -> Float[Array, "... d"]:
    y = (at_least_f32(expert_out) * at_least_f32(weights)[..., None]).sum(axis=-2)
    if shared is not None:
        y = y + at_least_f32(shared) * openness(shared_gate)
    if residual is not None:
        y = y + at_least_f32(residual)
    return y.astype(expert_out.dtype if residual is None else residual.dtype)


def moe_weighted_reduce_bwd_reference(
    expert_out: Float[Array, "... slot d"],
    weights: Float[Array, "... slot"],
    shared: Float[Array, "... d"] | None,
    shared_gate: Float[Array, "..."] | None,
    residual: Float[Array, "... d"] | None,
    dy: Float[Array, "... d"],
) -> tuple[
    Float[Array, "... slot d"],
    Float[Array, "... slot"],
    Float[Array, "... d"] | None,
    Float[Array, "..."] | None,
    Float[Array, "... d"] | None,
]:
    dy32 = at_least_f32(dy)
    dslots = dy32[..., None, :]
    dexpert_out = dslots * at_least_f32(weights)[..., None]
    dweights = (dslots * at_least_f32(expert_out)).sum(axis=-1)
    dshared = dgate = None
    if shared is not None:
        dshared = (dy32 * openness(shared_gate)).astype(shared.dtype)
        if shared_gate is not None:
            gate = jax.nn.sigmoid(at_least_f32(shared_gate))
            dgate = gate * (1 - gate) * (dy32 * at_least_f32(shared)).sum(axis=-1)
            dgate = dgate.astype(shared_gate.dtype)
    return (
        dexpert_out.astype(expert_out.dtype),
        dweights.astype(weights.dtype),
        dshared,
        dgate,
        None if residual is None else dy.astype(residual.dtype),
    )


def openness(gate: Float[Array, "..."] | None) -> Float[Array, "... 1"] | float:
    """sigmoid(gate) beside a last dim; 1 without a gate."""
    return 1.0 if gate is None else jax.nn.sigmoid(at_least_f32(gate))[..., None]


moe_weighted_reduce_p = kernel_primitive(
    moe_weighted_reduce_reference,
    bwd=moe_weighted_reduce_bwd_reference,
    replicated=("slot",),  # what is added to their sum is added once
)
