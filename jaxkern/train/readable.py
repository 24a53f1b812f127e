"""Weights as training keeps them, and as the pages of `jaxkern.models` read them."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import SequenceKey
from jaxtyping import Array, Float


def readable(config: Any, weights: Any) -> tuple[Any, Any]:
    """Those of `load(path, "train")`, trained or not, for `prefill` and `generate`.

    Training keeps every matrix output-major, as files do, and a tied table once. Pages
    read a square matrix of float32 the other way round (`jaxkern.models.products`) and
    want an output.

    Args:
      config: of the same call of `load`.
      weights: of a page, arrays in the layout of the "train" policy, of one dtype.

    Returns:
      config: with the dtype of the weights.
      weights: the same type; inside a compiled function this costs nothing.

    Example:
      >>> from jaxkern.models.llama import LlamaConfig, LlamaWeights
      >>> sizes = dict(layers=0, d_model=4, heads=1, kv_heads=1, head_dim=4)
      >>> keys = dict(context=8, vocabulary=8, eps=1e-5, rotary_dim=4, theta=1e4)
      >>> config = LlamaConfig("llama", **sizes, **keys, pairing="neox", dtype="train")
      >>> weights = LlamaWeights(jnp.ones((8, 4)), (), jnp.ones(4), (), None)
      >>> config, weights = jaxkern.train.readable(config, weights)
      >>> config.dtype, weights.output[0].shape
      ('float32', (8, 4))
    """
    if not weights.output:
        weights = weights._replace(output=(weights.embedding,))

    def turned(path: tuple, w: Array) -> Array:
        is_matrix = isinstance(path[-1], SequenceKey) and w.ndim == 2
        square = is_matrix and w.shape[0] == w.shape[1]
        return w.T if square and w.dtype == jnp.float32 else w

    config = replace(config, dtype=weights.embedding.dtype.name)
    return config, jax.tree_util.tree_map_with_path(turned, weights)


def output_of(weights: Any) -> Float[Array, "v d"]:
    """The output's rows, those of the table where it is tied."""
    return weights.output[0] if weights.output else weights.embedding
