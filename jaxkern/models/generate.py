"""Answers from two executables: one reads the prompts, one writes a chunk of tokens.

    generator = Generator(config, weights, batch=1, prompt_slots=64, max_tokens=128)
    for tokens in generator.stream([prompt], seed=0):
        ...                                       # int32 [b, up to `chunk`] on the host

Both are compiled before the first token. The second is a loop of fixed length, so the
device writes a chunk of tokens without the host; finished sequences stay as they are,
and between chunks the host asks if any is left. The cache is donated: there is one.
Prompts that come one by one, each with an answer of its own length, go to `submit`. A
GPU has the next chunk queued before the host reads the one before: it never waits for
the host, and writes one chunk for nobody where all answers end early.
"""

import collections
import contextlib
import functools
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jaxkern import explain
from jaxkern.lowering.explain import Explanation
from jaxkern.lowering.launches_ahead import compiled_ahead
from jaxkern.models.architecture import CacheForm, ModelConfig
from jaxkern.models.cache_kind import new_cache
from jaxkern.models.cached_steps import prefill
from jaxkern.models.continuous_batch import Answer, ContinuousBatch
from jaxkern.models.decode_loop import (
    NO_TOKEN,
    State,
    compiled_in_turn,
    is_stop,
    settle,
    write_chunk,
)
from jaxkern.models.drafts import (
    Drafted,
    check_drafts,
    read_for_drafts,
    write_drafted,
)
from jaxkern.models.image_prompts import Shown, expanded
from jaxkern.models.prompt_rows import (
    check_seed,
    check_sizes,
    longest_of,
    prompt_rows,
    prompt_shapes,
    stop_tokens,
)
from jaxkern.models.sampling import LIKELIEST, Sampling, Seen
from jaxkern.quick_import import no_collections
from jaxkern.runtime.plan.kept_calls import KeptCalls


def read_prompts(
    config: ModelConfig,
    weights: Any,
    prompts: Int32[Array, "b t"],
    lengths: Int32[Array, " b"],
    seed: Int32[Array, ""],
    images: Any = None,
    *,
    slots: int,
    sampling: Sampling,
    stop_ids: tuple[int, ...],
    kind: CacheForm | None = None,
) -> tuple[Int32[Array, " b"], State]:
    """Fills a new cache and draws the first token of each answer."""
    cache = new_cache(config, prompts.shape[0], slots, kind)
    logits, cache = prefill(config, weights, prompts, lengths, cache, images)
    key, key_now = jax.random.split(jax.random.key(seed))
    seen = None
    if sampling.counts:
        seen = Seen.of_prompts(prompts, lengths, logits.shape[-1])
    tokens = sampling(logits, key_now, seen)
    finished = is_stop(tokens, stop_ids)
    seen = seen and seen.after(tokens)
    return tokens, State(tokens, finished, cache, key, seen)


@dataclass(frozen=True)
class Timings:
    """Seconds and tokens of one `stream`, to which every chunk adds.

    A chunk that was queued ahead took the time since the tokens before it arrived.
    `tokens_a_step` are those of an answer that goes on, more than 1 with drafts.
    """

    prefill_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_seconds: float = 0.0
    decode_steps: int = 0
    tokens_a_step: float = 1.0


class Generator:
    """A model with its two executables, compiled for one shape of prompts and answers.

    Args:
      config, weights: of `jaxkern.models.load`.
      batch: number of prompts at a time.
      prompt_slots: tokens of the longest prompt; shorter ones are padded.
      max_tokens: longest answer.
      image_patches: most patches that the images of one prompt have together; 0 for
        text alone. A feature of an image is a token of the prompt.
      sampling: how tokens are drawn.
      stop_ids: tokens that end an answer.
      chunk: tokens between two looks of the host.
      cache: what keys and values are kept in, "f16", "int8", "turboquant4" ...; see
        `jaxkern.models.cache_kind`. Default float32, on a GPU the activations' dtype.
      drafts: tokens that are looked up in the text and read together with the one drawn
        last, up to 7; see `jaxkern.models.drafts`. `chunk` counts calls of the model.

    Raises:
      ValueError: prompt and answer do not fit the model's context, or no layer can keep
        such a `cache`, or one cannot take `drafts` back.

    Attributes:
      cache: shapes of what the layers keep.
      executables: compiled, by name: "prefill", and "decode" for more than one token.
      calls: what they were compiled from: function and arguments.
      compile_seconds: what tracing, lowering and compiling them took.
      timings: of the latest `stream`.
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
        drafts: int = 0,
    ):
        check_sizes(config, batch, prompt_slots, max_tokens, chunk)
        self.config, self.image_patches, self.drafts = config, image_patches, drafts
        self.weights, self.max_tokens, self.chunk = weights, max_tokens, chunk
        self.stop_ids = stop_tokens(stop_ids)
        self.batch, self.prompt_slots = batch, prompt_slots
        self.sampling, self._kind = sampling, cache
        # the first token comes with the prompt, the others in whole chunks
        chunks = -(-(max_tokens - 1) // chunk)
        slots = prompt_slots + chunks * chunk
        if drafts:  # a row ends at its limit, but for drafts that do not stay
            slots = prompt_slots + max_tokens + drafts
        self.cache = jax.eval_shape(lambda: new_cache(config, batch, slots, cache))
        static = {"sampling": sampling, "stop_ids": self.stop_ids}
        read: Any = functools.partial(
            read_prompts, config, slots=slots, kind=cache, **static
        )
        write: Any = functools.partial(write_chunk, config, steps=chunk, **static)
        if drafts:
            check_drafts(config, self.cache, drafts)
            sizes = {"drafts": drafts, "max_tokens": max_tokens}
            read = functools.partial(read_for_drafts, read, config, **sizes)
            write = functools.partial(
                write_drafted, config, steps=chunk, drafts=drafts, **static
            )
        read, write = jax.jit(read), jax.jit(write, donate_argnums=1)
        start = time.perf_counter()
        shapes = prompt_shapes(config, batch, prompt_slots, image_patches)
        seed = jax.ShapeDtypeStruct((), jnp.int32)
        arguments = (weights, *shapes[:2], seed, *shapes[2:])
        self.calls: dict[str, tuple[Any, tuple]] = {"prefill": (read, arguments)}
        # float32 means float32: the default of a GPU rounds the factors to tf32
        precision = "highest" if config.dtype == "float32" else None
        with (
            jax.default_matmul_precision(precision),
            contextlib.ExitStack() as begun,
        ):
            kept, ask = KeptCalls(), None
            with no_collections():
                # the process begins before tracing does
                if not kept.find(read, arguments):
                    ask = begun.enter_context(compiled_ahead())
                if chunks:
                    _, state = kept.shapes(read, arguments)
                    self.calls["decode"] = (write, (weights, state))
            self.executables = compiled_in_turn(self.calls, kept, ask)
        self._settle = weakref.finalize(self, settle, kept)  # once, and at the latest
        self.compile_seconds = time.perf_counter() - start
        self.timings = Timings()

    def explain(self) -> dict[str, Explanation]:
        """What each op runs on, for each executable; see `jaxkern.explain`."""
        return {
            name: explain(function, *arguments)
            for name, (function, arguments) in self.calls.items()
        }

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        images: Sequence[Sequence[Shown]] | None = None,
        seed: int = 0,
    ) -> Iterator[Int32[np.ndarray, "b n"]]:
        """Answers, chunk by chunk.

        Args:
          prompts: token ids, one list per sequence of the batch, none of them empty;
            each in [0, vocabulary).
          images: those of each prompt, in the order of its placeholders; see
            `jaxkern.models.image_prompts.with_images`.
          seed: of the draws.

        Yields:
          tokens: int32 `[b, n]` on the host, NO_TOKEN behind the end of a sequence. The
            stop token that ends it is still there. With drafts rows differ in length,
            NO_TOKEN behind each.
        """
        check_seed(seed)
        if len(prompts) != self.batch:
            raise ValueError(
                f"generate: this generator takes {self.batch} prompts at a time, got "
                f"{len(prompts)}."
            )
        tokens, lengths, *more = prompt_rows(
            self.config, prompts, images, self.prompt_slots, self.image_patches
        )
        start = time.perf_counter()
        first, state = self.executables["prefill"](
            self.weights, tokens, lengths, np.int32(seed), *more
        )
        left = self.max_tokens - 1
        chunks = -(-left // self.chunk)
        ahead = int(jax.default_backend() == "gpu")
        queued: collections.deque[Any] = collections.deque()

        def queue(state: State, most: int) -> State:
            """With more chunks queued, up to `most`."""
            nonlocal chunks
            while chunks and len(queued) < most:
                chunk, state = self.executables["decode"](self.weights, state)
                queued.append(chunk)
                chunks -= 1
            return state

        state = queue(state, ahead)
        tokens = np.asarray(first)[:, None]
        arrived = time.perf_counter()
        self.timings = Timings(arrived - start, int(lengths.sum()))
        yield tokens
        self._settle()
        ended, drafted = self.ended(tokens), Drafted()
        while left > 0 and not ended:
            start = arrived if queued else time.perf_counter()
            state = queue(state, 1 + ahead)
            chunk = queued.popleft()
            if self.drafts:
                tokens, drafted = drafted.with_chunk(chunk)
                ended = drafted.ended
            else:
                tokens = np.asarray(chunk)[:, :left]
                ended = self.ended(tokens)
            arrived = time.perf_counter()
            self.timings = Timings(
                self.timings.prefill_seconds,
                self.timings.prefill_tokens,
                self.timings.decode_seconds + arrived - start,
                self.timings.decode_steps + self.chunk,
                drafted.tokens_a_step,
            )
            yield tokens
            left -= self.chunk

    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int | None = None,
        images: Sequence[Shown] | None = None,
        seed: int = 0,
    ) -> Answer:
        """Asks for the answer to one prompt, which begins as soon as a row is free.

        Prompts come at any time, and a row whose answer has ended takes the next one:
        see `ContinuousBatch.submit`. A program that does nothing else makes a
        `ContinuousBatch` itself; this one compiles its two executables at the first
        call.

        Args:
          prompt, max_tokens, images, seed: of this answer; see there.

        Returns:
          The answer: iterate over its tokens, or wait for its `result()`.

        Raises:
          ValueError: the prompt or its images do not fit, an option is out of range, or
            the generator has `drafts`.
        """
        if self.drafts:
            raise ValueError(
                "generate: `submit` has no drafts. Make the generator without them."
            )
        return self.continuous.submit(
            prompt, max_tokens=max_tokens, images=images, seed=seed
        )

    @functools.cached_property
    def continuous(self) -> ContinuousBatch:
        """The batch that `submit` fills."""
        return ContinuousBatch(
            self.config,
            self.weights,
            batch=self.batch,
            prompt_slots=self.prompt_slots,
            max_tokens=self.max_tokens,
            image_patches=self.image_patches,
            sampling=self.sampling,
            stop_ids=self.stop_ids,
            chunk=self.chunk,
            cache=self._kind,
        )

    def ended(self, tokens: Int32[np.ndarray, "b n"]) -> bool:
        """Whether no sequence goes on behind these."""
        last = tokens[:, -1]
        return bool(np.isin(last, (NO_TOKEN, *self.stop_ids)).all())


def generate(
    config: ModelConfig,
    weights: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    images: Sequence[Sequence[Shown]] | None = None,
    sampling: Sampling = LIKELIEST,
    stop_ids: Sequence[int] = (),
    seed: int = 0,
    chunk: int = 16,
    cache: CacheForm | None = None,
    drafts: int = 0,
) -> list[list[int]]:
    """The whole answers to some prompts: a `Generator`, run to its end.

    It compiles at each call; keep a `Generator` to answer more than once. `images` are
    those of each prompt: of Pillow, names of files, or a `Picture` each; `cache` and
    `drafts` are the generator's.

    Returns:
      One list of token ids per prompt, of at most `max_tokens`, without the stop token.
    """
    if len(prompts) == 0:
        return []
    longest, patches = longest_of(prompts), 0
    if images is not None:
        shown = expanded(config, prompts, images)
        images = [prompt.pictures for prompt in shown]
        longest = max(len(prompt.tokens) for prompt in shown)
        patches = max(prompt.patches for prompt in shown)
    generator = Generator(
        config,
        weights,
        batch=len(prompts),
        prompt_slots=longest,
        max_tokens=max_tokens,
        image_patches=patches,
        sampling=sampling,
        stop_ids=stop_ids,
        chunk=chunk,
        cache=cache,
        drafts=drafts,
    )
    stream = generator.stream(prompts, images=images, seed=seed)
    rows = np.concatenate(list(stream), axis=1)
    ends = {NO_TOKEN, *stop_ids}
    return [[int(token) for token in row if token not in ends] for row in rows]
