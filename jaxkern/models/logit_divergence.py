"""`logit_divergence`: how far two models' next tokens are apart on one text."""

import functools
from collections.abc import Sequence
from os import PathLike
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxkern.models.architecture import page_of
from jaxkern.models.loader import load

WINDOW = 128  # tokens that are read together, each window anew


class Divergence(NamedTuple):
    """Over all tokens of a text; each window begins without a past.

    Attributes:
      mean, largest: of KL(p || q) = sum p log(p / q), in nats.
      agree: share of the tokens where both take the same one for the likeliest.
      tokens: how many there are.
    """

    mean: float
    largest: float
    agree: float
    tokens: int


def logit_divergence(
    first: str | PathLike[str], second: str | PathLike[str], ids: Sequence[int]
) -> Divergence:
    """KL of the second model's next tokens from the first's, with exact activations.

    Args:
      first, second: models that `jaxkern.models.load` reads.
      ids: a text in tokens of both, two at least.

    Raises:
      ValueError: fewer tokens, or the models' vocabularies differ.
    """
    if len(ids) < 2:
        raise ValueError(
            f"quantize: the text has {len(ids)} tokens, expected 2 or more."
        )
    models = [load(path, "packed") for path in (first, second)]
    sizes = [config.vocabulary for config, _ in models]
    if sizes[0] != sizes[1]:
        raise ValueError(f"quantize: the models have {sizes[0]} and {sizes[1]} tokens.")
    found, same = [], []
    for start in range(0, len(ids), WINDOW):
        window = list(ids[start : start + WINDOW])
        padded = np.zeros((1, WINDOW), np.int32)
        padded[0, : len(window)] = window
        p, q = (_log_p(config, weights, padded) for config, weights in models)
        kl, equal = _divergence(p, q)
        found.append(np.asarray(kl)[: len(window)])
        same.append(np.asarray(equal)[: len(window)])
    kl = np.concatenate(found)
    return Divergence(
        float(kl.mean()), float(kl.max()), float(np.concatenate(same).mean()), len(kl)
    )


@functools.partial(jax.jit, static_argnums=0)
def _log_p(config, weights, tokens: Int32[Array, "1 t"]) -> Float[Array, "t v"]:
    page = page_of(config)
    cache = page.empty_cache(config, 1, tokens.shape[1])
    x, _ = page.hidden_states(config, weights, tokens, cache)
    return jax.nn.log_softmax(page.logits(config, weights, x)[0])


@jax.jit
def _divergence(p: Float[Array, "t v"], q: Float[Array, "t v"]):
    kl = jnp.sum(jnp.exp(p) * (p - q), axis=-1)
    return kl, jnp.argmax(p, -1) == jnp.argmax(q, -1)
