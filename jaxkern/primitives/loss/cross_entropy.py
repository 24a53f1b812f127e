"""Cross entropy of a softmax: loss = lse(logits) - logits[label]  (https://arxiv.org/abs/1512.00567)."""

import math
from typing import Any, TypedDict, Unpack

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer

from jaxkern.primitives.activation.softcap import softcap_bwd_reference
from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.loss.cross_entropy_soft import (
    capped,
    log_sum_exp,
    soft_cross_entropy_p,
)


@check_arguments
def cross_entropy(
    logits: Float[Array, "... v"],
    labels: Integer[Array, "..."] | Float[Array, "... v"],
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    ignore_index: int | None = -100,
    class_weights: Float[Array, " v"] | None = None,
    reduction: str = "none",
    return_lse: bool = False,
) -> Float[Array, "..."] | tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Negative log likelihood of a class under softmax, one loss per token.

        z    = softcap * tanh(logits / softcap)                 (only with softcap)
        lse  = ln(sum_j exp(z_j))
        loss = lse - (1 - e) * z[label] - e * mean_j(z_j) + z_loss * lse**2

    with e = label_smoothing (https://arxiv.org/abs/1512.00567); the term in lse**2
    keeps the logits from drifting (PaLM, https://arxiv.org/abs/2204.02311, has 1e-4).
    Computed in float32 (float64 for float64 logits); the logits and the two results
    are kept for the backward pass

        dlogits = (dloss * (1 + 2 * z_loss * lse) + dlse) * exp(z - lse)
                  - dloss * ((1 - e) * one_hot(label) + e / v)

    Labels that are floats are the probabilities t_j of all classes (distillation,
    mixup), with gradients too; and with class_weights w, as in PyTorch,

        loss = sum_j w_j ((1 - e) * t_j + e / v) * (lse - z_j) + z_loss * lse**2

    where t is one_hot(label) for an integer. A class of probability zero whose target
    is zero adds nothing.

        cross_entropy(student, jax.nn.softmax(teacher))

    With a reduction and without `return_lse` the forward pass of a derivative makes the
    gradient too, from one read of the logits, and keeps it in the place of the logits
    (https://arxiv.org/abs/2410.10989). The backward pass multiplies it by the cotangent
    of the sum, which is 1 as a rule; a factor that is not costs another pass over the
    gradient, less so with "none". Not of float16 logits: a small gradient would be
    rounded before the factor of a scaled loss can save it. Nor of probabilities, nor of
    class weights with smoothing or z_loss.

    A token with `ignore_index` has zero loss and zero gradient. Logits of -inf are
    classes of probability zero: where the label is one of them the loss is inf, and so
    it is in a row of nothing else, whose gradient is zero. A label outside [0, v) that
    is not `ignore_index` gives a NaN loss, since traced values cannot raise (PyTorch
    raises, optax gives NaN).

    Args:
      logits: `[..., v]`, any float dtype.
      labels: `[...]`, any integer dtype; or `[..., v]`, probabilities of any float
        dtype, which are taken as they are.
      label_smoothing: share of the target spread over all v classes, in [0, 1].
      z_loss: weight of lse**2, at least 0.
      softcap: Gemma 2's cap of the logits; None for no cap.
      ignore_index: the label of tokens without a loss; None if there is none.
      class_weights: `[v]`, a factor for each class, or None for ones.
      reduction: "none", "sum", or "mean" over the tokens that are not ignored, 0 if all
        are (PyTorch gives NaN). With class_weights the mean is the sum divided by the
        sum of w[label], with probabilities by the number of tokens.
      return_lse: return (loss, lse); both are differentiable.

    Returns:
      loss: `[...]`, or a scalar with a reduction; float32.
      lse: `[...]` float32, of ignored tokens too; only with return_lse.

    Raises:
      TypeError: shapes or dtypes do not fit.
      ValueError: an option out of range.

    Example:
      >>> logits = jnp.array([[2.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
      >>> jaxkern.cross_entropy(logits, jnp.array([0, 2]))
      Array([0.408, 1.099], dtype=float32)
      >>> jaxkern.cross_entropy(logits, jnp.array([0, -100]))  # -100: no loss
      Array([0.408, 0.   ], dtype=float32)
    """
    check_options("cross_entropy", label_smoothing, z_loss, softcap, reduction)
    options: dict[str, Any] = dict(
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        ignore_index=ignore_index,
    )
    check_targets(logits, labels, class_weights)
    if jnp.issubdtype(labels.dtype, jnp.floating):
        targets = smoothed(labels, label_smoothing)
        soft = dict(z_loss=z_loss, softcap=softcap)
        loss, lse = soft_cross_entropy_p(logits, targets, class_weights, **soft)
        if reduction != "none":
            count = max(loss.size, 1) if reduction == "mean" else 1
            loss = jnp.sum(loss) / count
        return (loss, lse) if return_lse else loss
    of_labels = class_weights is None or not (label_smoothing or z_loss)
    in_sum = reduction != "none" and not return_lse and logits.dtype != jnp.float16
    if of_labels and in_sum:
        weight = reduced_weight(
            labels, ignore_index, reduction, logits.dtype, class_weights
        )
        return jnp.sum(weighted_cross_entropy_p(logits, labels, weight, **options))
    if class_weights is None:
        loss, lse = cross_entropy_p(logits, labels, **options)
        loss = reduced(loss, labels, ignore_index, reduction)
        return (loss, lse) if return_lse else loss
    loss, lse = weighted_by_class(logits, labels, class_weights, **options)
    if reduction != "none":
        share = reduced_weight(labels, ignore_index, "sum", loss.dtype, class_weights)
        loss = jnp.sum(loss) / (divisor(share) if reduction == "mean" else 1)
    return (loss, lse) if return_lse else loss


def check_targets(logits, labels, class_weights) -> None:
    soft = jnp.issubdtype(labels.dtype, jnp.floating)
    if soft and labels.shape != logits.shape:
        raise TypeError(
            "cross_entropy: `labels` must have a dtype of kind Integer, or be "
            f"probabilities of the shape of `logits`, {logits.shape}, got "
            f"{labels.dtype}{list(labels.shape)}."
        )
    if class_weights is not None and class_weights.shape != logits.shape[-1:]:
        raise TypeError(
            "cross_entropy: `class_weights` must have a number for each class, "
            f"{logits.shape[-1:]}, got shape {class_weights.shape}."
        )


def smoothed(targets, label_smoothing):
    if not label_smoothing:
        return targets
    spread = label_smoothing / max(targets.shape[-1], 1)
    return (1 - label_smoothing) * at_least_f32(targets) + spread


def weighted_by_class(
    logits, labels, class_weights, *, label_smoothing, z_loss, softcap, ignore_index
):
    """(loss, lse) of integers; without smoothing by what knows labels alone."""
    label, v = as_class(labels), logits.shape[-1]
    counted = is_counted(label, ignore_index)
    if label_smoothing:
        dtype = jnp.promote_types(logits.dtype, jnp.float32)
        one_hot = (label[..., None] == jnp.arange(v)).astype(dtype)
        targets, options = smoothed(one_hot, label_smoothing), dict(softcap=softcap)
        loss, lse = soft_cross_entropy_p(
            logits, targets, class_weights, z_loss=z_loss, **options
        )
        loss = jnp.where((label >= 0) & (label < v), loss, jnp.nan)
        return jnp.where(counted, loss, 0), lse
    loss, lse = cross_entropy_p(
        logits,
        labels,
        label_smoothing=0.0,
        z_loss=0.0,
        softcap=softcap,
        ignore_index=ignore_index,
    )
    loss = loss * weight_of_class(label, class_weights)
    if z_loss:
        finite_lse = jnp.where(counted & (lse > -jnp.inf), lse, 0)
        loss = loss + z_loss * finite_lse**2
    return loss, lse


def weight_of_class(label, class_weights):
    """The weight of each label, of the nearest class for one that is none."""
    if class_weights.shape[0] == 0:
        return jnp.zeros(label.shape, jnp.float32)
    return jnp.take(at_least_f32(class_weights), label, mode="clip")


def divisor(weight):
    """The sum of the weights of all tokens; 1 where that is 0."""
    total = jnp.sum(weight)
    return jnp.where(total == 0, 1, total)


def check_options(
    op: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
) -> None:
    if not 0 <= label_smoothing <= 1:
        raise ValueError(
            f"{op}: `label_smoothing` must lie in [0, 1], got {label_smoothing}."
        )
    if not 0 <= z_loss < math.inf:
        raise ValueError(
            f"{op}: `z_loss` must be finite and not negative, got {z_loss}."
        )
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(
            f"{op}: `softcap` must be positive and finite, got {softcap}. None means "
            "no cap."
        )
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(
            f"{op}: `reduction` must be 'none', 'sum' or 'mean', got {reduction!r}."
        )


def reduced(loss, labels, ignore_index, reduction):
    if reduction == "none":
        return loss
    total = jnp.sum(loss)
    if reduction == "sum":
        return total
    counted = jnp.sum(is_counted(as_class(labels), ignore_index))
    return total / jnp.maximum(counted, 1).astype(loss.dtype)


def reduced_weight(labels, ignore_index, reduction, dtype, class_weights=None):
    """The factor of each token's loss in the sum."""
    label = as_class(labels)
    counted = is_counted(label, ignore_index)
    weight = counted.astype(jnp.promote_types(dtype, jnp.float32))
    if class_weights is not None:
        weight = jnp.where(counted, weight_of_class(label, class_weights), 0)
        return weight / divisor(weight) if reduction == "mean" else weight
    if reduction == "mean":
        weight = weight / jnp.maximum(jnp.sum(counted), 1).astype(weight.dtype)
    return weight


def cross_entropy_reference(
    logits: Float[Array, "... v"],
    labels: Integer[Array, "..."],
    *,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    ignore_index: int | None,
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    v = logits.shape[-1]
    label = as_class(labels)
    z = capped(at_least_f32(logits), softcap)
    lse = log_sum_exp(z)
    picked = jnp.sum(jnp.where(label[..., None] == jnp.arange(v), z, 0), axis=-1)
    total = jnp.sum(z, axis=-1) if label_smoothing else None
    options = (label_smoothing, z_loss, ignore_index)
    return loss_of_sums(lse, picked, total, label, v, *options), lse


def cross_entropy_bwd_reference(
    logits: Float[Array, "... v"],
    labels: Integer[Array, "..."],
    loss: Float[Array, "..."],
    lse: Float[Array, "..."],
    dloss: Float[Array, "..."],
    dlse: Float[Array, "..."],
    *,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    ignore_index: int | None,
) -> Float[Array, "... v"]:
    del loss
    v = logits.shape[-1]
    label = as_class(labels)
    options = (label_smoothing, z_loss, ignore_index)
    dlogits = logits_gradient(
        at_least_f32(logits),
        label[..., None] == jnp.arange(v),
        *sums_gradient(lse, dloss, dlse, label, v, *options),
        softcap,
    )
    return dlogits.astype(logits.dtype)


# What linear_cross_entropy shares: there the sums run over blocks of the vocabulary.


def as_class(labels: Integer[Array, "..."]) -> Integer[Array, "..."]:
    """Labels in a dtype that holds any class and any ignore_index.

    What is too large for it is the lowest number, which is no class: it would wrap, and
    2**32 - 100 be -100.
    """
    dtype = jnp.int64 if labels.dtype.itemsize == 8 else jnp.int32
    bounds = jnp.iinfo(dtype)
    fits = int(jnp.iinfo(labels.dtype).max) <= bounds.max
    if fits:
        return labels.astype(dtype)
    inside = labels <= jnp.asarray(bounds.max, labels.dtype)
    return jnp.where(inside, labels.astype(dtype), jnp.asarray(bounds.min, dtype))


def is_counted(
    label: Integer[Array, "..."], ignore_index: int | None
) -> Bool[Array, "..."]:
    return (
        jnp.full(label.shape, True) if ignore_index is None else label != ignore_index
    )


def loss_of_sums(lse, picked, total, label, v, label_smoothing, z_loss, ignore_index):
    """The loss per token from lse, z[label] and sum_j(z_j); 0 where it is ignored."""
    none = lse == -jnp.inf
    lse = jnp.where(none, 0, lse)
    loss = lse - picked
    if label_smoothing:
        off_mean = lse - total / max(v, 1)
        loss = (1 - label_smoothing) * loss + label_smoothing * off_mean
    if z_loss:  # 0 * inf would be NaN
        loss = loss + z_loss * lse**2
    loss = jnp.where(none, jnp.inf, loss)
    loss = jnp.where((label >= 0) & (label < v), loss, jnp.nan)
    return jnp.where(is_counted(label, ignore_index), loss, 0)


def sums_gradient(lse, dloss, dlse, label, v, label_smoothing, z_loss, ignore_index):
    """(lse that is finite, and per token the factors of softmax, target and mean)."""
    dloss = jnp.where(is_counted(label, ignore_index), dloss, 0)
    none = lse == -jnp.inf
    lse = jnp.where(none, 0, lse)  # then exp(z - lse) = 0
    dloss = jnp.where(none | (label < 0) | (label >= v), 0, dloss)
    slope = dloss * (1 + 2 * z_loss * lse) + dlse
    return (
        lse,
        slope,
        dloss * (1 - label_smoothing),
        dloss * label_smoothing / max(v, 1),
    )


def logits_gradient(x, is_label, lse, slope, on_label, on_every, softcap):
    """Gradient of the logits `[..., v]` from factors per token."""
    p = jnp.exp(capped(x, softcap) - lse[..., None])
    dz = slope[..., None] * p - on_every[..., None]
    dz = dz - jnp.where(is_label, on_label[..., None], 0)
    if softcap is None:
        return dz
    return softcap_bwd_reference(x, dz, cap=softcap)


class TokenOptions(TypedDict):
    label_smoothing: float
    z_loss: float
    softcap: float | None
    ignore_index: int | None


def weighted_cross_entropy_reference(
    logits: Float[Array, "... v"],
    labels: Integer[Array, "..."],
    weight: Float[Array, "..."],
    **options: Unpack[TokenOptions],
) -> Float[Array, "..."]:
    """weight * loss, whose backward pass reads no logits."""
    loss, _ = cross_entropy_reference(logits, labels, **options)
    return loss * weight.astype(loss.dtype)


def weighted_cross_entropy_fwd_reference(
    logits: Float[Array, "... v"],
    labels: Integer[Array, "..."],
    weight: Float[Array, "..."],
    **options: Unpack[TokenOptions],
) -> tuple[Float[Array, "..."], Float[Array, "... v"], Float[Array, "..."]]:
    """(weight * loss, its gradient of the logits, loss)."""
    loss, lse = cross_entropy_reference(logits, labels, **options)
    weight = weight.astype(loss.dtype)
    gradient = cross_entropy_bwd_reference(
        logits, labels, loss, lse, weight, jnp.zeros_like(lse), **options
    )
    return loss * weight, gradient, loss


def weighted_cross_entropy_bwd_reference(
    weight: Float[Array, "..."],
    gradient: Float[Array, "... v"],
    loss: Float[Array, "..."],
    dweighted: Float[Array, "..."],
    **options: Unpack[TokenOptions],
) -> tuple[Float[Array, "... v"], Float[Array, "..."]]:
    del options  # in the gradient
    dlogits = gradient * dweighted[..., None]
    return dlogits.astype(gradient.dtype), (loss * dweighted).astype(weight.dtype)


cross_entropy_p = kernel_primitive(
    cross_entropy_reference,
    bwd=cross_entropy_bwd_reference,
    replicated=("v",),  # the sum runs over v: each device needs all of it
)
weighted_cross_entropy_p = kernel_primitive(
    weighted_cross_entropy_reference,
    fwd=weighted_cross_entropy_fwd_reference,
    bwd=weighted_cross_entropy_bwd_reference,
    replicated=("v",),
)
