"""`Conversation`: one text that grows turn by turn, and a cache that follows it.

    chat = Conversation(config, weights, slots=4096)
    for tokens in chat.answer(ids):            # of the whole text so far
        ...
    for tokens in chat.answer([*chat.ids, *more]):  # reads only what is new
        ...
    for tokens in chat.answer(ids, images=[image]):  # where a placeholder in ids stands

A text that goes on where the last one ended is read from there; any other is read anew.
Prompts are read in pieces of a few fixed sizes, each of which is one executable. The
tower sees an image once, by an executable of its own.
"""

import functools
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jaxkern.models.architecture import CacheForm, ModelConfig
from jaxkern.models.cache_kind import new_cache
from jaxkern.models.cached_steps import prefill
from jaxkern.models.decode_loop import (
    NO_TOKEN,
    State,
    compiled,
    is_stop,
    write_chunk,
)
from jaxkern.models.generate import Timings
from jaxkern.models.image_prompts import (
    Prompt,
    Shown,
    patches_of,
    piece_of,
    reads_images,
    with_images,
)
from jaxkern.models.image_rule import Picture, vision_of
from jaxkern.models.prompt_rows import check_seed, stop_tokens
from jaxkern.models.sampling import LIKELIEST, Sampling, Seen
from jaxkern.models.vision_tower import Features, Patches, image_features

PIECES = (32, 128, 512)  # tokens that are read at once; shorter ones are padded
FEWEST_PATCHES = 256  # the tower sees so many at once, or twice, four times ... of it


class Conversation:
    """A model with one cache.

    Args:
      config, weights: of `jaxkern.models.load`.
      slots: tokens that prompt and answers may have together.
      sampling: how tokens are drawn; may be replaced between two answers.
      stop_ids: tokens that end an answer.
      chunk: tokens between two looks of the host.
      cache: what keys and values are kept in; see `jaxkern.models.cache_kind`.

    Raises:
      ValueError: more slots than the model's context, or fewer than 2, or no layer can
        keep such a `cache`.

    Attributes:
      ids: of the text so far: all prompts and answers, without the last stop token; an
        image is one placeholder.
      pictures: of the text so far.
      kept: how many tokens, with features of images, the latest answer found in its
        cache.
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
        cache: CacheForm | None = None,
    ):
        if not 2 <= slots <= config.context:
            raise ValueError(
                f"chat: the cache must have 2 to {config.context} slots, the model's "
                f"context, got {slots}."
            )
        self.config, self.weights, self.slots = config, weights, slots
        self.sampling, self.chunk, self.cache = sampling, chunk, cache
        jax.eval_shape(lambda: new_cache(config, 1, slots, cache))  # or a refusal
        self.stop_ids = stop_tokens(stop_ids, "chat")
        self.ids: list[int] = []
        self.pictures: tuple[Picture, ...] = ()
        self.kept = self._features = 0
        self.timings, self.compile_seconds = Timings(), 0.0
        self.tell: Callable[[str], None] = lambda words: None
        self._state: State | None = None
        self._read = 0  # how many of `ids` are in the cache
        self._executables: dict[tuple, jax.stages.Compiled] = {}

    @property
    def filled(self) -> int:
        """Slots that the text takes: its tokens, and features for its placeholders."""
        return len(self.ids) + self._features

    def answer(
        self,
        ids: Sequence[int],
        *,
        images: Sequence[Shown] = (),
        max_tokens: int | None = None,
        seed: int = 0,
    ) -> Iterator[list[int]]:
        """The tokens that follow a text, chunk by chunk, the stop token included.

        A caller may leave the loop at any time: what it got is part of the text.

        Args:
          ids: the whole text, at least one token, each in [0, vocabulary).
          images: of the whole text, one for each placeholder; see `with_images`. A
            `Picture` of the text before is known again, so that it is not read anew.
          max_tokens: of the answer, default until the slots are full.
          seed: of the draws, together with the number of tokens before.

        Raises:
          ValueError: the text leaves no slot for an answer, or an option is out of
            range.
        """
        check_seed(seed, "chat")
        ids = [int(i) for i in ids]
        if not ids or min(ids) < 0 or max(ids) >= self.config.vocabulary:
            raise ValueError(
                "chat: the text must be tokens in [0, "
                f"{self.config.vocabulary}), at least one."
            )
        shown = None
        tokens = ids
        if images or reads_images(self.config):
            shown = with_images(self.config, ids, images)
            tokens = shown.tokens
        room = self.slots - len(tokens)
        if room < 1:
            raise ValueError(
                f"chat: the text has {len(tokens)} tokens, the cache {self.slots} "
                "slots. Begin anew with /clear, or start with more --slots."
            )
        left = room if max_tokens is None else min(max_tokens, room)
        if left < 1:
            raise ValueError(f"chat: `max_tokens` must be at least 1, got {left}.")
        self.tell("reading")
        pictures = shown.pictures if shown else ()
        state = self._kept_state(ids, pictures, len(tokens))
        self.kept, start = self._read, time.perf_counter()
        compiled_before = self.compile_seconds
        features = self._seen(shown) if shown else None
        for begin in range(self._read, len(tokens), PIECES[-1]):
            piece = slice(begin, min(begin + PIECES[-1], len(tokens)))
            size = next(p for p in PIECES if p >= piece.stop - begin)
            padded = np.zeros((1, size), np.int32)
            padded[0, : piece.stop - begin] = tokens[piece]
            count = np.array([piece.stop - begin], np.int32)
            last = np.int32(piece.stop == len(tokens))
            more, kind = (), 0
            if shown is not None and features is not None:
                seen, first = features
                more = (piece_of(shown, seen, piece, first, size),)
                kind = seen.rows.shape[1]
            drawn, state = self._run(
                ("read", size, kind),
                (padded, count, last, np.int32(seed), state, *more),
            )
        self._read, self._features = len(tokens), len(tokens) - len(ids)
        tokens = [int(np.asarray(drawn)[0])]
        waited = self.compile_seconds - compiled_before
        seconds = time.perf_counter() - start - waited
        self.timings = Timings(seconds, self._read - self.kept)
        self.ids, self.pictures = [*ids, *tokens], pictures
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
        self.ids, self.pictures, self._state = [], (), None
        self._read = self._features = 0

    def _seen(self, shown: Prompt) -> tuple[Features, int] | None:
        """What the tower sees of the images that are new, and their first feature."""
        new = shown.feature[self._read :]
        if not (new >= 0).any():
            return None
        merge = vision_of(self.config).merge ** 2
        ends = np.cumsum([len(p.numbers) // merge for p in shown.pictures])
        skipped = int(np.searchsorted(ends, new[new >= 0].min(), side="right"))
        own = shown._replace(pictures=shown.pictures[skipped:])
        size = FEWEST_PATCHES
        while size < own.patches:
            size *= 2
        self.tell("seeing")
        patches = patches_of(self.config, [own], size)
        first = int(ends[skipped - 1]) if skipped else 0
        seen: Any = self._run(("see", size), (patches,))
        return seen, first

    def _kept_state(
        self, ids: list[int], pictures: tuple[Picture, ...], length: int
    ) -> State:
        """The state from which `ids` go on: the last one, or a new one."""
        state, self._state = self._state, None
        goes_on = length > self._read and ids[: len(self.ids)] == self.ids
        known = pictures[: len(self.pictures)]
        goes_on = goes_on and len(known) == len(self.pictures)
        goes_on = goes_on and all(map(operator.is_, known, self.pictures))
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
                counts = self.sampling.counts
                function = functools.partial(
                    empty_state, config, self.slots, counts, self.cache
                )
            elif kind == "see":
                function = functools.partial(seen_by_tower, config)
            elif kind == "read":
                function = functools.partial(read_more, config, **static)
            else:
                function = functools.partial(
                    write_chunk, config, steps=name[1], **static
                )
            donated = {"empty": (), "see": (), "read": (5,), "write": (1,)}[kind]
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


def seen_by_tower(config: Any, weights: Any, patches: Patches) -> Features:
    return image_features(config.vision, config, weights.vision, patches)


def empty_state(
    config: ModelConfig, slots: int, counts: bool, kind: CacheForm | None = None
) -> State:
    """Before the first token of one sequence."""
    seen = None
    if counts:
        one = (1, config.vocabulary)
        seen = Seen(jnp.zeros(one, bool), jnp.zeros(one, jnp.int32))
    cache = new_cache(config, 1, slots, kind)
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
    images: Any = None,
    *,
    sampling: Sampling,
    stop_ids: tuple[int, ...],
) -> tuple[Int32[Array, "1"], State]:
    """Reads further tokens behind the cache and draws the one that follows.

    It is a token of the answer where `last` is 1; where it is 0 there is more to read.
    """
    logits, cache = prefill(config, weights, tokens, lengths, state.cache, images)
    place = cache[0].lengths[0]
    key, key_now = jax.random.split(jax.random.fold_in(jax.random.key(seed), place))
    seen = state.seen and state.seen.with_prompt(tokens, lengths)
    drawn = sampling(logits, key_now, seen)
    finished = is_stop(drawn, stop_ids)
    return drawn, State(drawn, finished, cache, key, seen and seen.after(drawn, last))
