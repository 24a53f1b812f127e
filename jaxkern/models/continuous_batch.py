"""Answers that begin and end one by one: a row that is done takes the next prompt.

    batch = ContinuousBatch(config, weights, batch=8, prompt_slots=512, max_tokens=256)
    answers = [batch.submit(prompt, max_tokens=n) for prompt, n in requests]
    for token in answers[0]:        # runs the batch until there is one
        ...
    answers[1].result()             # all of them

Two executables, as in generate.py: one reads a prompt into a cache of one row and lays
it over a row of the batch, the other writes a chunk of tokens in all rows. What a row
holds is its own: an answer does not depend on the row, on the other rows, or on when it
was submitted, but for the last bits of products whose batch has another size.
"""

import collections
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32

from jaxkern.models.architecture import CacheForm, ModelConfig
from jaxkern.models.cache_kind import new_cache
from jaxkern.models.cached_steps import prefill
from jaxkern.models.decode_loop import (
    NO_TOKEN,
    Progress,
    State,
    compiled_in_turn,
    is_stop,
    write_chunk,
)
from jaxkern.models.image_prompts import Shown
from jaxkern.models.prompt_rows import (
    check_seed,
    check_sizes,
    prompt_rows,
    prompt_shapes,
    stop_tokens,
)
from jaxkern.models.sampling import LIKELIEST, Sampling, Seen

End = Literal["stop", "length", "cancelled"]


class Answer:
    """The tokens that follow a prompt, as they are written; `submit` gives it.

    Attributes:
      tokens: so far, without the stop token.
      end: why there will be no more: "stop" for a stop token, "length" for
        `max_tokens`, "cancelled"; None while there may be.
    """

    def __init__(self, batch: "ContinuousBatch", limit: int):
        self.tokens: list[int] = []
        self.end: End | None = None
        self._batch, self._limit = batch, limit

    def __iter__(self) -> Iterator[int]:
        """Every token, from the first on; waits for those that are not written yet."""
        at = 0
        while at < len(self.tokens) or self.end is None:
            while at < len(self.tokens):
                yield self.tokens[at]
                at += 1
            self._batch.run_until(lambda at=at: len(self.tokens) > at or self.end)

    def result(self) -> list[int]:
        """All tokens; waits for the last one."""
        self._batch.run_until(lambda: self.end)
        return self.tokens

    def cancel(self) -> None:
        """No more tokens; its row takes the next prompt. Nothing if it has ended."""
        with self._batch.lock:
            self.end = self.end or "cancelled"

    def add(self, tokens: Int32[np.ndarray, " n"], stop_ids: Sequence[int]) -> None:
        """What a chunk wrote, NO_TOKEN behind the end."""
        for token in tokens:
            if self.end or token == NO_TOKEN:
                return
            if token in stop_ids:
                self.end = "stop"
                return
            self.tokens.append(int(token))
            if len(self.tokens) == self._limit:
                self.end = "length"


class Written(NamedTuple):
    """What the device has been asked for, and whose rows they are."""

    first: list[tuple[Answer, jax.Array]]  # tokens that came with prompts
    chunk: jax.Array
    rows: list[Answer | None]


class ContinuousBatch:
    """A model that answers prompts as they come, `batch` of them at a time.

    Args:
      config, weights: of `jaxkern.models.load`.
      batch: rows, each with one answer at a time.
      prompt_slots: tokens of the longest prompt; shorter ones are padded.
      max_tokens: longest answer.
      image_patches: most patches that the images of one prompt have together.
      sampling: how tokens are drawn.
      stop_ids: tokens that end an answer.
      chunk: tokens between two looks of the host: how long a row that is done may wait.
      cache: what keys and values are kept in; see `jaxkern.models.cache_kind`.

    Any thread may submit, cancel and wait for answers. One at a time of those that wait
    runs the batch for all; there is no thread of its own.

    Raises:
      ValueError: prompt and answer do not fit the model's context, or no layer can keep
        such a `cache`.

    Attributes:
      executables: compiled, by name: "prefill" and "decode".
      calls: what they were compiled from: function and arguments.
      lock: who has it runs the batch.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Any,
        *,
        batch: int,
        prompt_slots: int,
        max_tokens: int,
        image_patches: int = 0,
        sampling: Sampling = LIKELIEST,
        stop_ids: Sequence[int] = (),
        chunk: int = 16,
        cache: CacheForm | None = None,
    ):
        check_sizes(config, batch, prompt_slots, max_tokens, chunk)
        self.config, self.weights = config, weights
        self.prompt_slots, self.max_tokens = prompt_slots, max_tokens
        self.image_patches, self.stop_ids = image_patches, stop_tokens(stop_ids)
        slots = prompt_slots + max_tokens
        kinds = {"slots": slots, "sampling": sampling, "kind": cache}
        empty = functools.partial(empty_rows, config, **kinds)
        static = {"sampling": sampling, "stop_ids": self.stop_ids}
        read = functools.partial(
            read_into_row, config, slots=slots, kind=cache, **static
        )
        write = functools.partial(write_chunk, config, steps=chunk, **static)
        state = jax.eval_shape(lambda: empty(batch))
        tokens, lengths, *images = prompt_shapes(config, 1, prompt_slots, image_patches)
        number = jax.ShapeDtypeStruct((), jnp.int32)
        self.calls: dict[str, tuple[Any, tuple]] = {
            "prefill": (
                jax.jit(read, donate_argnums=1),
                (weights, state, number, number, number, tokens, lengths, *images),
            ),
            "decode": (jax.jit(write, donate_argnums=1), (weights, state)),
        }
        precision = "highest" if config.dtype == "float32" else None
        with jax.default_matmul_precision(precision):
            self.executables = compiled_in_turn(self.calls)
        self.lock = threading.RLock()
        self._state = jax.jit(lambda: empty(batch))()
        self._rows: list[Answer | None] = [None] * batch
        self._waiting: collections.deque[tuple] = collections.deque()
        self._written: collections.deque[Written] = collections.deque()

    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int | None = None,
        images: Sequence[Shown] | None = None,
        seed: int = 0,
    ) -> Answer:
        """Asks for an answer, which begins as soon as a row is free.

        Args:
          prompt: token ids, at least one, each in [0, vocabulary).
          max_tokens: of this answer; default and most: those of the batch.
          images: in the order of the prompt's placeholders.
          seed: of its draws. The same prompt and seed have the same answer.

        Raises:
          ValueError: the prompt or its images do not fit, or an option is out of range.
        """
        limit = self.max_tokens if max_tokens is None else max_tokens
        if not 1 <= limit <= self.max_tokens:
            raise ValueError(
                f"generate: `max_tokens` must be 1 to {self.max_tokens}, those of the "
                f"batch, got {max_tokens}."
            )
        check_seed(seed)
        tokens, lengths, *more = prompt_rows(
            self.config,
            [prompt],
            None if images is None else [images],
            self.prompt_slots,
            self.image_patches,
        )
        answer = Answer(self, limit)
        request = np.int32(seed), np.int32(limit), tokens, lengths, *more
        with self.lock:
            self._waiting.append((answer, request))
        return answer

    def run_until(self, done: Callable[[], Any]) -> None:
        """Takes steps until `done()` is true."""
        while not done():
            with self.lock:  # another thread may have come first
                if not done() and not self.step() and not done():
                    raise RuntimeError(
                        "generate: the answer was lost, since an error has ended a "
                        "step of the batch. Make a new one."
                    )

    def step(self) -> bool:
        """Reads prompts into free rows and writes a chunk; whether more is to be done.

        Answers wait by it: call it yourself to run the batch ahead of them.
        """
        with self.lock:
            ahead = int(jax.default_backend() == "gpu")
            if asked := self._ask():
                self._written.append(asked)
            while self._written and (not asked or len(self._written) > ahead):
                self._take(self._written[0])
                self._written.popleft()
            return bool(self._written or self._waiting or any(self._live()))

    def _live(self) -> list[bool]:
        return [answer is not None and answer.end is None for answer in self._rows]

    def _ask(self) -> Written | None:
        """Has the device read prompts and write a chunk, without waiting for either."""
        first = []
        for row, live in enumerate(self._live()):
            while not live and self._waiting:
                answer, request = self._waiting.popleft()
                if answer.end:  # cancelled before it began
                    continue
                token, self._state = self.executables["prefill"](
                    self.weights, self._state, np.int32(row), *request
                )
                self._rows[row], live = answer, True
                first.append((answer, token))
        if not any(self._live()):
            return None
        chunk, self._state = self.executables["decode"](self.weights, self._state)
        return Written(first, chunk, list(self._rows))

    def _take(self, written: Written) -> None:
        """Gives the answers what was written."""
        firsts = [np.asarray(token) for _, token in written.first]
        chunk = np.asarray(written.chunk)
        for (answer, _), token in zip(written.first, firsts, strict=True):
            answer.add(token, self.stop_ids)
        for answer, tokens in zip(written.rows, chunk, strict=True):
            if answer is not None:
                answer.add(tokens, self.stop_ids)


def empty_rows(
    config: ModelConfig,
    batch: int,
    *,
    slots: int,
    sampling: Sampling,
    kind: CacheForm | None,
) -> State:
    """Rows without a text."""
    cache = new_cache(config, batch, slots, kind)
    seen, zeros = None, jnp.zeros(batch, jnp.int32)
    if sampling.counts:
        seen = Seen.of_prompts(zeros[:, None], zeros, config.vocabulary)
    keys = jax.vmap(jax.random.key)(zeros)
    finished = jnp.ones(batch, bool)
    return State(zeros, finished, cache, keys, seen, Progress(zeros, zeros))


def read_into_row(
    config: ModelConfig,
    weights: Any,
    state: State,
    row: Int32[Array, ""],
    seed: Int32[Array, ""],
    limit: Int32[Array, ""],
    tokens: Int32[Array, "1 t"],
    lengths: Int32[Array, "1"],
    images: Any = None,
    *,
    slots: int,
    sampling: Sampling,
    stop_ids: tuple[int, ...],
    kind: CacheForm | None,
) -> tuple[Int32[Array, "1"], State]:
    """Reads a prompt alone, draws its first token, and puts both into the row."""
    kinds = {"slots": slots, "sampling": sampling, "kind": kind}
    empty = functools.partial(empty_rows, config, **kinds)
    logits, cache = prefill(config, weights, tokens, lengths, empty(1).cache, images)
    keys = jax.random.key(seed)[None]
    seen = None
    if sampling.counts:
        seen = Seen.of_prompts(tokens, lengths, logits.shape[-1])
    drawn = sampling(
        logits, jax.vmap(jax.random.fold_in)(keys, jnp.zeros(1, int)), seen
    )
    progress = Progress(jnp.ones(1, jnp.int32), limit[None])
    finished = is_stop(drawn, stop_ids) | progress.ended
    own = State(drawn, finished, cache, keys, seen and seen.after(drawn), progress)

    def put(whole, part, axis):
        if axis is None:  # shared by all rows
            return whole
        return lax.dynamic_update_slice_in_dim(whole, part, row, axis)

    shapes = [jax.eval_shape(lambda n=n: empty(n)) for n in (2, 3)]
    axes = map(batch_axis, *map(jax.tree.leaves, shapes))
    leaves, structure = jax.tree.flatten(state)
    parts = jax.tree.leaves(own)
    return drawn, structure.unflatten(map(put, leaves, parts, axes))


def batch_axis(two: jax.ShapeDtypeStruct, three: jax.ShapeDtypeStruct) -> int | None:
    """The axis that grows with the batch, of the same array for 2 and for 3 rows."""
    pairs = zip(two.shape, three.shape, strict=True)
    grown = [axis for axis, (a, b) in enumerate(pairs) if a != b]
    assert len(grown) <= 1
    return grown[0] if grown else None
