"""The loss of language models: cross entropy of each next token."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxkern import cross_entropy, linear, linear_cross_entropy
from jaxkern.models.architecture import page_of
from jaxkern.models.llama import LlamaConfig
from jaxkern.models.products import FP8
from jaxkern.models.remat import Remat
from jaxkern.train.readable import output_of, readable

IGNORED = -100  # the label of what does not count
WHOLE = 2**31  # bytes of logits that are made at once


def next_token_loss(
    config: Any,
    *,
    remat: Remat = "none",
    product_dtype: Literal["float8_e4m3fn"] | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    whole_logits: bool | None = None,
) -> Callable[[Any, Any], tuple[Float[Array, ""], Float[Array, ""]]]:
    """The loss of a model of `jaxkern.models` for `train_step`.

        loss = mean over the counted tokens of -ln p(token[t + 1] | token[.. t])

    Whole logits lie in memory in the dtype of the weights, and their gradient takes
    their place in the forward pass: three products of their size. Otherwise, as in
    `linear_cross_entropy`, they never lie there as a whole: on NVIDIA GPUs an eighth of
    the tokens at a time, in the same dtype, for three products too, elsewhere a block
    of classes, in float32, for four. A batch is tokens `[b, t]`, or a mapping of these:

        tokens       [b, t] int32
        segment_ids  [b, t] int: several texts in a row; none sees or predicts another
        mask         [b, t] bool: whether this token is one to predict
        images       what placeholders among the tokens stand for, of a model that
                     reads images (`jaxkern.models.image_prompts.batch_of`)

    Placeholders are tokens as others are: mask them, for no model predicts them.

    Args:
      config: of `load(path, "train")`, whose weights are the parameters.
      remat: what is kept for the gradient; see `jaxkern.models.remat`.
      product_dtype: "float8_e4m3fn" makes the products of the layers, forward and
        backward, of 8-bit floats, as `linear(compute_dtype=)` says: on the llama page,
        but neither embedding nor output. None for those of the weights' dtype.
      label_smoothing, z_loss: see `linear_cross_entropy`.
      whole_logits: whether all logits are made at once; None where they take at most 2
        GiB.

    Returns:
      A function of weights and batch that returns the mean and how many tokens it is
      of; 0 and 0 of a batch in which none counts.

    Raises:
      ValueError: the page of this model has no such `remat` or `product_dtype`.

    Example:
      >>> from jaxkern.models.llama import LlamaConfig, LlamaWeights
      >>> sizes = dict(layers=0, d_model=4, heads=1, kv_heads=1, head_dim=4)
      >>> keys = dict(context=8, vocabulary=8, eps=1e-5, rotary_dim=4, theta=1e4)
      >>> config = LlamaConfig("llama", **sizes, **keys, pairing="neox", dtype="train")
      >>> weights = LlamaWeights(jnp.ones((8, 4)), (), jnp.ones(4), (), None)
      >>> loss = jaxkern.train.next_token_loss(config)  # of 8 tokens that are all alike
      >>> mean, count = loss(weights, jnp.zeros((1, 3), jnp.int32))
      >>> round(float(mean), 3), int(count)  # ln 8
      (2.079, 2)
    """
    kept = remat_options(config, remat)
    check_product_dtype(config, product_dtype)

    def loss(weights: Any, batch: Any) -> tuple[Float[Array, ""], Float[Array, ""]]:
        if getattr(weights, "rope_factors", None) is not None:
            raise ValueError(
                "next_token_loss: `weights.rope_factors` must be None, they are no "
                "weights to learn; load a folder, whose config has them as numbers."
            )
        found, own = readable(config, weights)
        if product_dtype is not None:
            found = replace(found, product_dtype=product_dtype)
        return mean_loss(
            found,
            own,
            output_of(weights),
            batch,
            hidden=kept,
            loss=dict(label_smoothing=label_smoothing, z_loss=z_loss),
            whole_logits=whole_logits,
        )

    return loss


def remat_options(config: Any, remat: Remat) -> dict[str, Any]:
    """What `hidden_states` of this config's page takes of `remat`.

    Raises:
      ValueError: the page has no such option.
    """
    page = page_of(replace(config, dtype="float32"))
    kept: dict = {} if remat == "none" else {"remat": remat}
    if kept and "remat" not in inspect.signature(page.hidden_states).parameters:
        raise ValueError(
            f"next_token_loss: `remat` must be 'none' for {config.architecture}, got "
            f"{remat!r}; put jax.checkpoint around the loss."
        )
    return kept


def check_product_dtype(config: Any, product_dtype: str | None) -> None:
    """Raises ValueError where products of this config have no such dtype."""
    if product_dtype is None:
        return
    if product_dtype != FP8:
        raise ValueError(
            f"next_token_loss: `product_dtype` must be {FP8!r} or None, got "
            f"{product_dtype!r}."
        )
    if not isinstance(config, LlamaConfig):
        raise ValueError(
            f"next_token_loss: `product_dtype` must be None for {config.architecture}: "
            "models of the llama page alone train with 8-bit products."
        )


def mean_loss(
    config: Any,
    weights: Any,
    output: Float[Array, "v d"],
    batch: Any,
    *,
    hidden: Mapping[str, Any],
    loss: Mapping[str, Any],
    whole_logits: bool | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The loss of weights as a page reads them, and of how many tokens it is the mean.

    Args:
      output: its rows, of what may be a packed table in `weights`.
      batch, whole_logits: see `next_token_loss`.
      hidden, loss: more options of `hidden_states` and of `linear_cross_entropy`.
    """
    if not isinstance(batch, Mapping):
        batch = {"tokens": batch}
    page, known = page_of(config), {"tokens", "segment_ids", "mask"}
    if "images" in inspect.signature(page.hidden_states).parameters:
        known.add("images")
    if "tokens" not in batch or not known.issuperset(batch):
        raise ValueError(
            "next_token_loss: `batch` must be tokens, or a mapping of tokens, "
            f"{', '.join(sorted(known - {'tokens'}))}, got {', '.join(sorted(batch))}."
        )
    tokens, segments = batch["tokens"], batch.get("segment_ids")
    labels = labels_of(tokens, segments, batch.get("mask"))
    seen = {"images": batch["images"]} if "images" in batch else {}
    x, _ = page.hidden_states(
        config, weights, tokens, segment_ids=segments, **seen, **hidden
    )
    scale = getattr(config, "logit_scale", 1.0)
    x = x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)
    options: dict = dict(
        softcap=getattr(config, "logit_softcap", None),
        ignore_index=IGNORED,
        reduction="mean",  # a factor outside would be a pass over the gradient
        **loss,
    )
    if fits_whole(x, output) if whole_logits is None else whole_logits:
        mean = cross_entropy(linear(x, output), labels, **options)
    else:
        mean = linear_cross_entropy(x, output, labels, **options)
    assert isinstance(mean, Array)  # no lse was asked for
    return mean, jnp.sum(labels != IGNORED).astype(jnp.float32)


def fits_whole(x: Float[Array, "b t d"], table: Float[Array, "v d"]) -> bool:
    """Whether the logits take at most WHOLE bytes; not where a size is symbolic."""
    b, t, _ = x.shape
    v = table.shape[0]
    if not all(isinstance(n, int) for n in (b, t, v)):
        return False
    return b * t * v * jnp.promote_types(x.dtype, table.dtype).itemsize <= WHOLE


def labels_of(
    tokens: Int32[Array, "b t"], segment_ids: Any, mask: Any
) -> Int32[Array, "b t"]:
    """The token behind each, IGNORED where none follows that counts."""

    def behind(x: Array) -> Array:
        return jnp.roll(x, -1, axis=1)

    counts = jnp.arange(tokens.shape[1]) < tokens.shape[1] - 1
    if segment_ids is not None:
        counts = counts & (segment_ids == behind(segment_ids))
    if mask is not None:
        counts = counts & behind(mask)
    return jnp.where(counts, behind(tokens), IGNORED)
