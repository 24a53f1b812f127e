"""Expert choice of a mixture of experts: the k best of e scores, and their weights
(https://arxiv.org/abs/2101.03961; groups and bias: https://arxiv.org/abs/2412.19437)."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.index.top_k import top_k_reference
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive


@check_arguments
def route(
    logits: Float[Array, "... e"],
    k: int,
    *,
    score: str = "softmax",
    normalize: bool = True,
    per_expert_scale: Float[Array, " e"] | None = None,
    scale_then_renorm: bool = False,
    correction_bias: Float[Array, " e"] | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score: str = "max",
    scaling_factor: float = 1.0,
) -> tuple[Float[Array, "... k"], Int32[Array, "... k"]]:
    """Chooses k of e experts for each token and weighs them.

        s = softmax(logits), sigmoid(logits) or logits
        ids = the k largest of s + correction_bias, within the best groups
        weights = s[ids];  normalize: weights / sum(weights);  * per_expert_scale[ids]
        weights * scaling_factor

    In descending order; of equal scores the smaller id comes first. Normalised weights
    are a softmax over the chosen logits (or log sigmoids), so scores that underflow
    keep their ratio. A row of `-inf` gets zero weights. The gradient reaches `logits`
    and `per_expert_scale` through the weights; `correction_bias` chooses only.

    With score="given" the logits are the scores, made by any function: sqrt of a
    softplus, a softmax over other experts too. They are divided by their sum as they
    are, and -inf is an expert that may not be chosen.

    | model | arguments |
    |---|---|
    | Mixtral, GPT-OSS, Qwen3 | the defaults |
    | OLMoE, Qwen2 (`norm_topk_prob=False`) | `normalize=False` |
    | DeepSeek-V3 | `score="sigmoid", correction_bias=b, num_groups=8, top_groups=4,` |
    | | `group_score="top2", scaling_factor=2.5` |
    | Llama 4 | `k=1, score="sigmoid", normalize=False`, |
    | | and `moe_ffn(..., weigh_input=True)` |

    Source: https://arxiv.org/abs/2101.03961, https://arxiv.org/abs/2412.19437.

    Args:
      logits: `[..., e]`, any float dtype.
      k: experts per token.
      score: "softmax" over all experts, "sigmoid" of each, or "given" for scores.
      normalize: make the k weights sum to 1 (`norm_topk_prob`).
      per_expert_scale: `[e]`, factors of the weights, or None.
      scale_then_renorm: normalise after the scale instead of before it.
      correction_bias: `[e]`, added to s for the choice alone, or None.
      num_groups: the experts are `num_groups` runs of `e / num_groups`.
      top_groups: how many groups may be chosen from.
      group_score: a group counts by its "max", or the sum of its "top2".
      scaling_factor: factor of all weights (`routed_scaling_factor`).

    Returns:
      weights: `[..., k]`, dtype of logits.
      ids: `[..., k]`, int32.

    Raises:
      ValueError: an option is not one of its values, or the sizes do not fit.

    Example:
      >>> weights, ids = jaxkern.route(jnp.array([[1.0, 0.0, 2.0]]), 2)
      >>> weights, ids
      (Array([[0.731, 0.269]], dtype=float32), Array([[2, 0]], dtype=int32))
    """
    if score not in ("softmax", "sigmoid", "given"):
        raise ValueError(
            f"route: `score` must be 'softmax' or 'sigmoid', got {score!r}. Or 'given' "
            "for logits that are scores."
        )
    if group_score not in ("max", "top2"):
        raise ValueError(
            f"route: `group_score` must be 'max' or 'top2', got {group_score!r}."
        )
    if scale_then_renorm and not normalize:
        raise ValueError("route: `scale_then_renorm` needs `normalize=True`.")
    return route_p(
        logits,
        per_expert_scale,
        correction_bias,
        k=int(k),
        score=score,
        normalize=normalize,
        scale_then_renorm=scale_then_renorm,
        num_groups=num_groups,
        top_groups=top_groups,
        group_score=group_score,
        scaling_factor=float(scaling_factor),
    )


def route_reference(
    logits: Float[Array, "... e"],
    per_expert_scale: Float[Array, " e"] | None,
    correction_bias: Float[Array, " e"] | None,
    *,
    k: int,
    score: str,
    normalize: bool,
    scale_then_renorm: bool,
    num_groups: int,
    top_groups: int,
    group_score: str,
    scaling_factor: float,
) -> tuple[Float[Array, "... top"], Int32[Array, "... top"]]:
    check_sizes(logits.shape[-1], k, num_groups, top_groups)
    logits32 = at_least_f32(logits)
    rank = lax.stop_gradient(logits32)  # rises with s, and never ties by rounding
    if score == "given":
        weighed = logits32
    else:
        weighed = (log_softmax if score == "softmax" else jax.nn.log_sigmoid)(logits32)
        if correction_bias is not None or group_score == "top2":
            rank = jnp.exp(lax.stop_gradient(weighed))
    if correction_bias is not None:
        rank = rank + lax.stop_gradient(at_least_f32(correction_bias))
    if top_groups < num_groups:
        kept = in_best_groups(rank, num_groups, top_groups, group_score)
        rank = jnp.where(kept, rank, -jnp.inf)
        weighed = jnp.where(kept, weighed, -jnp.inf)
    _, ids = top_k_reference(rank, k=k)
    chosen = jnp.take_along_axis(weighed, ids, axis=-1, mode="clip")
    if score == "given":
        weights = jnp.where(chosen == -jnp.inf, 0, chosen)
        weights = over_sum(weights) if normalize else weights
    else:
        weights = softmax_or_zeros(chosen) if normalize else jnp.exp(chosen)
    if per_expert_scale is not None:
        chosen = ids[..., None] == jnp.arange(logits.shape[-1])
        scale = jnp.where(chosen, at_least_f32(per_expert_scale), 0).sum(axis=-1)
        weights = weights * scale
    if scale_then_renorm:
        weights = over_sum(weights)
    return (weights * scaling_factor).astype(logits.dtype), ids


def check_sizes(
    e: int, k: int, num_groups: int, top_groups: int, op: str = "route"
) -> None:
    if num_groups < 1 or e % num_groups:
        raise ValueError(
            f"{op}: `num_groups` must divide the {e} experts, got {num_groups}."
        )
    if not 1 <= top_groups <= num_groups:
        raise ValueError(
            f"{op}: `top_groups` must lie between 1 and the {num_groups} groups, "
            f"got {top_groups}."
        )
    if not 0 <= k <= e // num_groups * top_groups:
        raise ValueError(
            f"{op}: `k` must lie between 0 and the {e // num_groups * top_groups} "
            f"experts of {top_groups} of {num_groups} groups, got {k}."
        )


def log_softmax(x: Float[Array, "... e"]) -> Float[Array, "... e"]:
    """`-inf` stays `-inf`, also where a whole row is."""
    shifted = x - finite_max(x)
    total = jnp.exp(shifted).sum(axis=-1, keepdims=True)
    return shifted - jnp.log(jnp.where(total == 0, 1, total))


def softmax_or_zeros(x: Float[Array, "... k"]) -> Float[Array, "... k"]:
    """Softmax; zeros where all of a row is `-inf`."""
    weights = jnp.exp(x - finite_max(x))
    total = weights.sum(axis=-1, keepdims=True)
    return weights / jnp.where(total == 0, 1, total)


def over_sum(weights: Float[Array, "... k"]) -> Float[Array, "... k"]:
    """Weights that sum to 1; as they are where their sum is 0."""
    total = weights.sum(axis=-1, keepdims=True)
    return weights / jnp.where(total == 0, 1, total)


def finite_max(x: Float[Array, "... e"]) -> Float[Array, "... 1"]:
    """The maximum of each row, 0 where it is `-inf`; constant in differentiation."""
    top = jnp.max(lax.stop_gradient(x), axis=-1, keepdims=True, initial=-jnp.inf)
    return jnp.where(top == -jnp.inf, 0, top)


def in_best_groups(
    rank: Float[Array, "... e"], num_groups: int, top_groups: int, group_score: str
) -> Bool[Array, "... e"]:
    """Which experts belong to the `top_groups` best of their groups."""
    size = rank.shape[-1] // num_groups
    groups = rank.reshape(*rank.shape[:-1], num_groups, size)
    best = 1 if group_score == "max" else min(2, size)
    scores = top_k_reference(groups, k=best)[0].sum(axis=-1)
    _, chosen = top_k_reference(scores, k=top_groups)
    kept = (chosen[..., None] == jnp.arange(num_groups)).any(axis=-2)
    return jnp.repeat(kept, size, axis=-1)


route_p = kernel_primitive(
    route_reference,
    replicated=("e",),  # any expert may be the best
)
