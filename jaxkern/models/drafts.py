"""Speculative decoding without a second model: drafts are looked up in the text so far.

The likeliest continuation of a text that repeats itself, as code, summaries and answers
about a document do, stands in it already: behind the last place where its last tokens
stood before (https://arxiv.org/abs/2304.04487). One call of the model reads the token
that was drawn last and `drafts` such tokens, and draws one behind each of them: a draft
stays if it is what was drawn, and the first one drawn otherwise ends the call. So every
token is drawn from what it would be drawn from without drafts, with the same random
number: drafts change how many calls an answer takes, and no token of it.

What a call leaves of drafts that do not stay is no part of the text: the next one
writes over keys and values behind the lengths, and a `DraftedState` takes up only those
that stayed.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, PRNGKeyArray

from jaxkern import DynamicScaling, KVCache, LongRopeScaling
from jaxkern.lowering.chained import chained
from jaxkern.models.architecture import Cache, ModelConfig, page_of
from jaxkern.models.decode_loop import NO_TOKEN, State, is_stop
from jaxkern.models.mixers.delta_net import DeltaNet
from jaxkern.models.mixers.latent import LatentCache
from jaxkern.models.mixers.recurrent_state import (
    DraftedState,
    RecurrentState,
    TokenCount,
)
from jaxkern.models.sampling import Sampling, Seen

MOST = 7  # drafts of a call: with the token before them what kernels take
LONGEST_MATCH = 3  # tokens that are looked up in the text


class Drafting(NamedTuple):
    """What goes from one chunk to the next, as `decode_loop.State`.

    Attributes:
      text: prompt and answer so far; the token drawn last is its last.
      known: tokens of the text.
      limit: tokens of the text with which it ends.
      finished: an end token was drawn, or the limit is reached.
      stayed: of the tokens that the last call has read.
      keys: of the next draw of each sequence.
      seen: for the penalties, None where there are none.
    """

    text: Int32[Array, "b s"]
    known: Int32[Array, " b"]
    limit: Int32[Array, " b"]
    finished: Bool[Array, " b"]
    stayed: Int32[Array, " b"]
    cache: Cache
    keys: PRNGKeyArray
    seen: Seen | None


class Written(NamedTuple):
    """What a chunk has written.

    Attributes:
      tokens: NO_TOKEN behind those of a row, of which each has another number.
      finished: whether the answer of a row ends with them.
      calls: of the model while a row's answer went on, of all rows together.
    """

    tokens: Int32[Array, "b n"]
    finished: Bool[Array, " b"]
    calls: Int32[Array, ""]


class Drafted(NamedTuple):
    """What the chunks so far have written, on the host.

    Attributes:
      tokens, calls: of all rows together; a row counts while its answer goes on.
      ended: no answer goes on.
    """

    tokens: int = 0
    calls: int = 0
    ended: bool = False

    @property
    def tokens_a_step(self) -> float:
        return self.tokens / self.calls if self.calls else 1.0

    def with_chunk(
        self, written: Written
    ) -> tuple[Int32[np.ndarray, "b n"], "Drafted"]:
        """The tokens of one more, as far as its longest row, when it is done."""
        tokens = np.asarray(written.tokens)
        there = tokens != NO_TOKEN
        calls, ended = int(written.calls), bool(np.asarray(written.finished).all())
        after = Drafted(self.tokens + int(there.sum()), self.calls + calls, ended)
        return tokens[:, : there.sum(axis=1).max()], after


def check_drafts(config: ModelConfig, cache: Cache, drafts: int) -> None:
    """Whether this model can take back what it has read of drafts.

    Raises:
      ValueError: it has a layer whose state cannot be taken back, or its positions
        depend on the length of the text, or there are no so many drafts.
    """
    if not 0 <= drafts <= MOST:
        raise ValueError(f"generate: `drafts` must be 0 to {MOST}, got {drafts}.")
    for i, (own, mixer) in enumerate(zip(cache, mixers_of(config, cache), strict=True)):
        linear = type(own) is KVCache and not own.ring
        if not (
            linear
            or isinstance(own, LatentCache | TokenCount)
            or isinstance(mixer, DeltaNet)
        ):
            named = mixer if isinstance(own, RecurrentState) else own
            raise ValueError(
                f"generate: `drafts` needs layers that take back what they have read; "
                f"layer {i} of this {config.architecture} has {type(named).__name__}, "
                "which does not."
            )
    rotating = config, getattr(config, "local", None), *mixers_of(config, cache)
    for rotation in rotating:
        scaling = getattr(getattr(rotation, "rotation", rotation), "scaling", None)
        if isinstance(scaling, DynamicScaling | LongRopeScaling):
            raise ValueError(
                f"generate: `drafts` would count as the length of the text, by which "
                f"positions of this {config.architecture} turn: it has "
                f"{type(scaling).__name__}."
            )


def mixers_of(config: ModelConfig, cache: Cache) -> tuple[Any, ...]:
    """Of each layer, None where all are attention."""
    return getattr(config, "mixers", (None,) * len(cache))


def read_for_drafts(
    read: Callable[..., tuple[Int32[Array, " b"], State]],
    config: ModelConfig,
    weights: Any,
    prompts: Int32[Array, "b t"],
    lengths: Int32[Array, " b"],
    *rest: Any,
    drafts: int,
    max_tokens: int,
) -> tuple[Int32[Array, " b"], Drafting]:
    """`read` of `read_prompts`, and the state that `write_drafted` goes on with."""
    first, state = read(weights, prompts, lengths, *rest)
    b = len(lengths)
    text = jnp.pad(prompts, ((0, 0), (0, max_tokens)))
    text = text.at[jnp.arange(b), lengths].set(state.tokens)
    cache = tuple(
        mixer.with_drafts(own, drafts + 1) if isinstance(own, RecurrentState) else own
        for own, mixer in zip(state.cache, mixers_of(config, state.cache), strict=True)
    )
    keys = jnp.broadcast_to(state.key, (b,))
    known, limit, stayed = lengths + 1, lengths + max_tokens, jnp.zeros_like(lengths)
    ends = known, limit, state.finished, stayed
    return first, Drafting(text, *ends, cache, keys, state.seen)


def look_up(
    text: Int32[Array, "b s"], known: Int32[Array, " b"], drafts: int
) -> Int32[Array, "b drafts"]:
    """What followed the last tokens of each text when they stood in it before.

    The place where the most of them stood, up to LONGEST_MATCH, and of these the last.
    Where the text ends before there are `drafts` tokens they begin again: a period goes
    on. Where not even the last token stood before it is repeated.
    """
    b, s = text.shape
    at = jnp.arange(s)
    alike, matched = jnp.ones((b, s), bool), jnp.zeros((b, s), jnp.int32)
    for back in range(1, min(LONGEST_MATCH, s) + 1):
        last = jnp.take_along_axis(text, jnp.maximum(known - back, 0)[:, None], axis=1)
        before = jnp.pad(text, ((0, 0), (back, 0)))[:, :s]
        alike &= (before == last) & (at >= back) & (back <= known[:, None])
        matched += alike
    stood = (matched > 0) & (at < known[:, None])
    rank = jnp.where(stood, matched * s + at, -1)
    start = jnp.where(stood.any(axis=1), jnp.argmax(rank, axis=1), known - 1)
    places = start[:, None] + jnp.arange(drafts) % (known - start)[:, None]
    return jnp.take_along_axis(text, places, axis=1)


def write_drafted(
    config: ModelConfig,
    weights: Any,
    state: Drafting,
    *,
    steps: int,
    drafts: int,
    sampling: Sampling,
    stop_ids: tuple[int, ...],
) -> tuple[Written, Drafting]:
    """`steps` calls of the model, each for 1 to drafts + 1 tokens of every answer."""
    page = page_of(config)

    def add_tokens(weights, tokens, cache, counts):
        x, after = page.hidden_states(config, weights, tokens, cache, counts)
        assert after is not None  # as it went in
        logits = page.logits(config, weights, x)
        return sampling.likeliest(logits) if sampling.is_likeliest else logits, after

    if jax.default_backend() == "gpu":  # as in `write_chunk`
        add_tokens = chained(add_tokens)

    def step(state: Drafting, _):
        rows = jnp.arange(len(state.known))
        guess = look_up(state.text, state.known, drafts)
        last = state.text[rows, state.known - 1]
        tokens = jnp.concatenate([last[:, None], guess], axis=1)
        counts = jnp.where(state.finished, 0, drafts + 1)
        lengths = state.cache[0].lengths
        cache = with_stayed(state.cache, lengths, state.stayed)
        found, cache = add_tokens(weights, tokens, cache, counts)
        drawn, stays, after = draw(state, found, guess, sampling, stop_ids)
        stayed = stays.sum(axis=1, dtype=jnp.int32)
        places = state.known[:, None] + jnp.arange(drafts + 1)
        places = jnp.where(stays, places, state.text.shape[1])  # dropped
        text = state.text.at[rows[:, None], places].set(drawn, mode="drop")
        cache = with_stayed(cache, lengths + stayed, stayed)
        known = state.known + stayed
        after = after._replace(text=text, known=known, stayed=stayed, cache=cache)
        return after, (jnp.where(stays, drawn, NO_TOKEN), ~state.finished)

    state, (tokens, going) = lax.scan(step, state, length=steps)
    cache = with_stayed(state.cache, state.cache[0].lengths, state.stayed)
    state = state._replace(cache=cache)
    tokens = jnp.moveaxis(tokens, 0, 1).reshape(len(state.known), -1)
    order = jnp.argsort(tokens == NO_TOKEN, axis=1, stable=True)
    tokens = jnp.take_along_axis(tokens, order, axis=1)
    return Written(tokens, state.finished, going.sum(dtype=jnp.int32)), state


def draw(
    state: Drafting,
    found: Float[Array, "b t v"] | Int32[Array, "b t"],
    guess: Int32[Array, "b drafts"],
    sampling: Sampling,
    stop_ids: tuple[int, ...],
) -> tuple[Int32[Array, "b t"], Bool[Array, "b t"], Drafting]:
    """A token behind each that was read, whether it stays, and the state of the draws.

    `found` are the likeliest tokens or, where draws need them, logits.
    """
    going, finished = ~state.finished, state.finished
    keys, seen = state.keys, state.seen
    drawn, stays = [], []
    for i in range(guess.shape[1] + 1):
        token, after = found[:, i], keys
        if not sampling.is_likeliest:
            token, after = sampling.by_row(found[:, i], keys, seen)
        keys = jnp.where(going, after, keys)
        seen = seen and seen.after(token, going.astype(jnp.int32))
        ends = is_stop(token, stop_ids) | (state.known + i + 1 >= state.limit)
        drawn.append(token)
        stays.append(going)
        finished |= going & ends
        if i < guess.shape[1]:
            going &= ~ends & (token == guess[:, i])
    after = state._replace(finished=finished, keys=keys, seen=seen)
    return jnp.stack(drawn, axis=1), jnp.stack(stays, axis=1), after


def with_stayed(
    cache: Cache, lengths: Int32[Array, " b"], stayed: Int32[Array, " b"]
) -> Cache:
    """The cache with one array of each, so that a loop carries only these."""
    return tuple(
        replace(own, lengths=lengths, accepted=stayed)
        if isinstance(own, DraftedState)
        else replace(own, lengths=lengths)
        for own in cache
    )
