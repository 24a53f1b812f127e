"""`Conversation`: one text that grows turn by turn, and a cache that follows it.

    chat = Conversation(config, weights, slots=4096)
    for tokens in chat.answer(ids):            # of the whole text so far
        ...
    for tokens in chat.answer([*chat.ids, *more]):  # reads only what is new

A text that goes on where the last one ended is read from there; any other is read anew.
Prompts are read in pieces of a few fixed sizes, each of which is one executable.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jaxkern.models.architecture import ModelConfig, page_of
from jaxkern.models.cached_steps import prefill
from jaxkern.models.generate import (
    NO_TOKEN,
    State,
    Timings,
    cache_dtype,
    compiled,
    is_stop,
    write_chunk,
)
from jaxkern.models.sampling import LIKELIEST, Sampling, Seen

PIECES = (32, 128, 512)  # tokens that are read at once; shorter ones are padded


class Conversation:
    """A model with one cache.

    Args:
      config, weights: of `jaxkern.models.load`.
      slots: tokens that prompt and answers may have together.
      sampling: how tokens are drawn; may be replaced between two answers.
      stop_ids: tokens that end an answer.
      chunk: tokens between two looks of the host.

    Raises:
      ValueError: more slots than the model's context, or fewer than 2.

    Attributes:
      ids: of the text so far: all prompts and answers, without the last stop token.
      kept: how many of them the latest answer found in its cache.
      timings: of the latest answer.
      compile_seconds: of all executables so far.
      tell: is called with what is being done until there is a token.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Any,
        *,
        slots: int,
        sampling: Sampling = LIKELIEST,
        stop_ids: Sequence[int] = (),
        chunk: int = 4,
    ):
        if not 2 <= slots <= config.context:
            raise ValueError(
                f"chat: the cache must have 2 to {config.context} slots, the model's "
                f"context, got {slots}."
            )
        self.config, self.weights, self.slots = config, weights, slots
        self.sampling, self.chunk = sampling, chunk
        self.stop_ids = tuple(sorted(stop_ids))
        self.ids: list[int] = []
        self.kept = 0
        self.timings, self.compile_seconds = Timings(), 0.0
        self.tell: Callable[[str], None] = lambda words: None
        self._state: State | None = None
        self._read = 0  # how many of `ids` are in the cache
        self._executables: dict[tuple, jax.stages.Compiled] = {}

    def answer(
        self, ids: Sequence[int], *, max_tokens: int | None = None, seed: int = 0
    ) -> Iterator[list[int]]:
        """The tokens that follow a text, chunk by chunk, the stop token included.

        A caller may leave the loop at any time: what it got is part of the text.

        Args:
          ids: the whole text, at least one token, each in [0, vocabulary).
          max_tokens: of the answer, default until the slots are full.
          seed: of the draws, together with the number of tokens before.

        Raises:
          ValueError: the text leaves no slot for an answer.
        """
        ids = [int(i) for i in ids]
        if not ids or min(ids) < 0 or max(ids) >= self.config.vocabulary:
            raise ValueError(
                "chat: the text must be tokens in [0, "
                f"{self.config.vocabulary}), at least one."
            )
        room = self.slots - len(ids)
        if room < 1:
            raise ValueError(
                f"chat: the text has {len(ids)} tokens, the cache {self.slots} slots. "
                "Begin anew with /clear, or start with more --slots."
            )
        left = room if max_tokens is None else min(max_tokens, room)
        if left < 1:
            raise ValueError(f"chat: `max_tokens` must be at least 1, got {left}.")
        self.tell("reading")
        state = self._kept_state(ids)
        self.kept, start = self._read, time.perf_counter()
        compiled_before = self.compile_seconds
        new = ids[self._read :]
        while new:
            piece, new = new[: PIECES[-1]], new[PIECES[-1] :]
            size = next(p for p in PIECES if p >= len(piece))
            padded = np.zeros((1, size), np.int32)
            padded[0, : len(piece)] = piece
            count, last = np.array([len(piece)], np.int32), np.int32(not new)
            drawn, state = self._run(
                ("read", size), (padded, count, last, np.int32(seed), state)
            )
        tokens = [int(np.asarray(drawn)[0])]
        waited = self.compile_seconds - compiled_before
        seconds = time.perf_counter() - start - waited
        self.timings = Timings(seconds, len(ids) - self._read)
        self.ids, self._read = [*ids, *tokens], len(ids)
        while True:
            self._state = state
            left -= len(tokens)
            if tokens[-1] in self.stop_ids:
                self.ids.pop()  # drawn, and never read
                yield tokens
                return
            yield tokens
            if left < 1:
                return
            self._state = None  # an interrupt leaves it half way
            compiled_before, start = self.compile_seconds, time.perf_counter()
            # single steps at the end: the cache holds no more than is shown
            steps = self.chunk if left >= self.chunk else 1
            shown, state = self._run(("write", steps), (state,))
            tokens = [int(t) for t in np.asarray(shown)[0] if t != NO_TOKEN]
            seconds = time.perf_counter() - start
            seconds -= self.compile_seconds - compiled_before
            self.timings = Timings(
                self.timings.prefill_seconds,
                self.timings.prefill_tokens,
                self.timings.decode_seconds + seconds,
                self.timings.decode_steps + steps,
            )
            self.ids += tokens
            self._read += len(tokens)

    def forget(self) -> None:
        """Gives the cache back; the next text is read from its beginning."""
        self.ids, self._state, self._read = [], None, 0

    def _kept_state(self, ids: list[int]) -> State:
        """The state from which `ids` go on: the last one, or a new one."""
        state, self._state = self._state, None
        goes_on = len(ids) > self._read and ids[: len(self.ids)] == self.ids
        counts = state is not None and (state.seen is not None)
        if state is not None and goes_on and counts == self.sampling.counts:
            return state
        self._read = 0
        del state  # before there is another one
        return self._executable(("empty",), ())()

    def _run(self, name: tuple, arguments: tuple) -> tuple:
        weighted = (self.weights, *arguments)
        return self._executable(name, weighted)(*weighted)

    def _executable(self, name: tuple, arguments: tuple) -> jax.stages.Compiled:
        """Compiled at the first use with this sampling."""
        key = (*name, self.sampling)
        if key not in self._executables:
            static = {"sampling": self.sampling, "stop_ids": self.stop_ids}
            config, kind = self.config, name[0]
            if kind == "empty":
                function = functools.partial(
                    empty_state, config, self.slots, self.sampling.counts
                )
            elif kind == "read":
                function = functools.partial(read_more, config, **static)
            else:
                function = functools.partial(
                    write_chunk, config, steps=name[1], **static
                )
            donated = {"empty": (), "read": (5,), "write": (1,)}[kind]
            self.tell("compiling")
            start = time.perf_counter()
            # float32 means float32: the default of a GPU rounds the factors to tf32
            precision = "highest" if config.dtype == "float32" else None
            with jax.default_matmul_precision(precision):
                step = jax.jit(function, donate_argnums=donated)
                self._executables[key] = compiled(step, arguments)
            self.compile_seconds += time.perf_counter() - start
            self.tell("reading")
        return self._executables[key]


def empty_state(config: ModelConfig, slots: int, counts: bool) -> State:
    """Before the first token of one sequence."""
    seen = None
    if counts:
        one = (1, config.vocabulary)
        seen = Seen(jnp.zeros(one, bool), jnp.zeros(one, jnp.int32))
    cache = page_of(config).empty_cache(config, 1, slots, cache_dtype(config))
    nothing = jnp.zeros(1, jnp.int32)
    return State(nothing, jnp.zeros(1, bool), cache, jax.random.key(0), seen)


def read_more(
    config: ModelConfig,
    weights: Any,
    tokens: Int32[Array, "1 t"],
    lengths: Int32[Array, "1"],
    last: Int32[Array, ""],
    seed: Int32[Array, ""],
    state: State,
    *,
    sampling: Sampling,
    stop_ids: tuple[int, ...],
) -> tuple[Int32[Array, "1"], State]:
    """Reads further tokens behind the cache and draws the one that follows.

    It is a token of the answer where `last` is 1; where it is 0 there is more to read.
    """
    logits, cache = prefill(config, weights, tokens, lengths, state.cache)
    place = cache[0].lengths[0]
    key, key_now = jax.random.split(jax.random.fold_in(jax.random.key(seed), place))
    seen = state.seen and state.seen.with_prompt(tokens, lengths)
    drawn = sampling(logits, key_now, seen)
    finished = is_stop(drawn, stop_ids)
    return drawn, State(drawn, finished, cache, key, seen and seen.after(drawn, last))
