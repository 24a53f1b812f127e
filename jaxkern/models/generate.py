"""Answers from two executables: one reads the prompts, one writes a chunk of tokens.

    generator = Generator(config, weights, batch=1, prompt_slots=64, max_tokens=128)
    for tokens in generator.stream([prompt], seed=0):
        ...                                       # int32 [b, up to `chunk`] on the host

Both are compiled before the first token. The second is a loop of fixed length, so the
device writes a chunk of tokens without the host; finished sequences stay as they are,
and between chunks the host asks if any is left. The cache is donated: there is one. A
GPU has the next chunk queued before the host reads the one before: it never waits for
the host, and writes one chunk for nobody where all answers end early.
"""

import collections
import contextlib
import ctypes
import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32

from jaxkern import explain
from jaxkern.lowering.chained import chained
from jaxkern.lowering.explain import Explanation
from jaxkern.models.architecture import Cache, CacheForm, ModelConfig
from jaxkern.models.cache_kind import new_cache
from jaxkern.models.cached_steps import decode, prefill, with_lengths
from jaxkern.models.image_prompts import (
    Shown,
    batch_of,
    expanded,
    reads_images,
    with_images,
)
from jaxkern.models.sampling import LIKELIEST, Sampling, Seen

NO_TOKEN = -1  # of a sequence that is finished


class State(NamedTuple):
    """What goes from one chunk to the next; it stays on the device.

    Attributes:
      tokens: drawn but not yet read.
      finished: an end token was drawn, or the sequence was never there.
      seen: for the penalties, None where there are none.
    """

    tokens: Int32[Array, " b"]
    finished: Bool[Array, " b"]
    cache: Cache
    key: jax.Array
    seen: Seen | None = None


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


def write_chunk(
    config: ModelConfig,
    weights: Any,
    state: State,
    *,
    steps: int,
    sampling: Sampling,
    stop_ids: tuple[int, ...],
) -> tuple[Int32[Array, "b steps"], State]:
    """Draws `steps` more tokens of each answer, NO_TOKEN behind its end."""

    def add_token(weights, tokens, cache, goes_on):
        logits, cache = decode(config, weights, tokens, cache, goes_on)
        return sampling.likeliest(logits) if sampling.is_likeliest else logits, cache

    if jax.default_backend() == "gpu":  # whose launches take as long as small kernels
        add_token = chained(add_token)

    def step(state: State, _):
        goes_on = jnp.where(state.finished, 0, 1)  # a finished sequence reads nothing
        found, cache = add_token(weights, state.tokens, state.cache, goes_on)
        cache = with_lengths(cache, cache[0].lengths)
        key = key_now = state.key
        if sampling.temperature:  # the likeliest token needs no key
            key, key_now = jax.random.split(state.key)
        drawn = found
        if not sampling.is_likeliest:
            drawn = sampling(found, key_now, state.seen)
        tokens = jnp.where(state.finished, state.tokens, drawn)
        finished = state.finished | is_stop(tokens, stop_ids)
        shown = jnp.where(state.finished, NO_TOKEN, drawn)
        seen = state.seen and state.seen.after(drawn)
        return State(tokens, finished, cache, key, seen), shown

    state, tokens = lax.scan(step, state, length=steps)
    # one array again: the loop need not carry one for each layer
    cache = with_lengths(state.cache, state.cache[0].lengths)
    return tokens.T, state._replace(cache=cache)


def is_stop(tokens: Int32[Array, " b"], stop_ids: tuple[int, ...]) -> Bool[Array, " b"]:
    stops = jnp.array(stop_ids, jnp.int32)
    return jnp.any(tokens[:, None] == stops, axis=-1)


@dataclass(frozen=True)
class Timings:
    """Seconds and tokens of one `stream`, to which every chunk adds.

    A chunk that was queued ahead took the time since the tokens before it arrived.
    """

    prefill_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_seconds: float = 0.0
    decode_steps: int = 0


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

    Raises:
      ValueError: prompt and answer do not fit the model's context, or no layer can keep
        such a `cache`.

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
    ):
        if min(batch, prompt_slots, max_tokens, chunk) < 1:
            raise ValueError(
                "generate: `batch`, `prompt_slots`, `max_tokens` and `chunk` must be "
                f"at least 1, got {batch}, {prompt_slots}, {max_tokens} and {chunk}."
            )
        if prompt_slots + max_tokens > config.context:
            raise ValueError(
                f"generate: {prompt_slots} tokens of prompt and {max_tokens} of answer "
                f"are more than the model's context of {config.context}."
            )
        self.config, self.image_patches = config, image_patches
        self.weights, self.max_tokens, self.chunk = weights, max_tokens, chunk
        self.stop_ids = tuple(sorted(stop_ids))
        self.prompt_slots, self.vocabulary = prompt_slots, config.vocabulary
        # the first token comes with the prompt, the others in whole chunks
        chunks = -(-(max_tokens - 1) // chunk)
        slots = prompt_slots + chunks * chunk
        self.cache = jax.eval_shape(lambda: new_cache(config, batch, slots, cache))
        static = {"sampling": sampling, "stop_ids": self.stop_ids}
        read = jax.jit(
            functools.partial(read_prompts, config, slots=slots, kind=cache, **static)
        )
        write = jax.jit(
            functools.partial(write_chunk, config, steps=chunk, **static),
            donate_argnums=1,
        )
        start = time.perf_counter()
        arguments: tuple = (
            weights,
            jax.ShapeDtypeStruct((batch, prompt_slots), jnp.int32),
            jax.ShapeDtypeStruct((batch,), jnp.int32),
            jax.ShapeDtypeStruct((), jnp.int32),
        )
        if image_patches:
            none = [with_images(config, [], [])] * batch
            shown = batch_of(config, none, prompt_slots, image_patches)
            arguments += (jax.eval_shape(lambda: shown),)
        self.calls: dict[str, tuple[Any, tuple]] = {"prefill": (read, arguments)}
        if chunks:
            _, state = jax.eval_shape(read, *arguments)
            self.calls["decode"] = (write, (weights, state))
        # float32 means float32: the default of a GPU rounds the factors to tf32
        precision = "highest" if config.dtype == "float32" else None
        with jax.default_matmul_precision(precision):
            self.executables = {
                name: compiled(function, arguments)
                for name, (function, arguments) in self.calls.items()
            }
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
            stop token that ends it is still there.
        """
        shown, more = None, ()
        if reads_images(self.config) or images is not None:
            shown = expanded(self.config, prompts, images)
            prompts = [prompt.tokens for prompt in shown]
        lengths = [len(prompt) for prompt in prompts]
        batch = self.calls["prefill"][1][2].shape[0]
        if len(prompts) != batch:
            raise ValueError(
                f"generate: this generator takes {batch} prompts at a time, got "
                f"{len(prompts)}."
            )
        if not -(2**31) <= seed < 2**31:
            raise ValueError(f"generate: `seed` must be 32 bits wide, got {seed}.")
        if not all(1 <= n <= self.prompt_slots for n in lengths):
            raise ValueError(
                f"generate: prompts must have 1 to {self.prompt_slots} tokens, got "
                f"{lengths}."
            )
        if shown and max(p.patches for p in shown) > self.image_patches:
            raise ValueError(
                f"generate: images may have {self.image_patches} patches a prompt, got "
                f"{[p.patches for p in shown]}. Give a larger `image_patches`."
            )
        if shown and self.image_patches:
            more = (
                batch_of(self.config, shown, self.prompt_slots, self.image_patches),
            )
        vocabulary = self.vocabulary
        padded = np.zeros((len(prompts), self.prompt_slots), np.int32)
        for row, prompt in zip(padded, prompts, strict=True):
            ids = np.asarray(prompt)
            if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= vocabulary:
                raise ValueError(
                    f"generate: prompts must be integers below {vocabulary}, the "
                    f"number of tokens, got {list(prompt)}."
                )
            row[: len(prompt)] = ids
        start = time.perf_counter()
        first, state = self.executables["prefill"](
            self.weights, padded, np.array(lengths, np.int32), np.int32(seed), *more
        )
        left = self.max_tokens - 1
        chunks = -(-left // self.chunk)
        ahead = int(jax.default_backend() == "gpu")
        queued: collections.deque[jax.Array] = collections.deque()

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
        self.timings = Timings(arrived - start, sum(lengths))
        yield tokens
        while left > 0 and not self.ended(tokens):
            start = arrived if queued else time.perf_counter()
            state = queue(state, 1 + ahead)
            tokens = np.asarray(queued.popleft())
            arrived = time.perf_counter()
            self.timings = Timings(
                self.timings.prefill_seconds,
                self.timings.prefill_tokens,
                self.timings.decode_seconds + arrived - start,
                self.timings.decode_steps + self.chunk,
            )
            yield tokens[:, :left]
            left -= self.chunk

    def ended(self, tokens: Int32[np.ndarray, "b n"]) -> bool:
        """Whether no sequence goes on behind these."""
        last = tokens[:, -1]
        return bool(np.isin(last, (NO_TOKEN, *self.stop_ids)).all())


def compiled(function: Any, arguments: tuple) -> jax.stages.Compiled:
    """The executable; the memory that compiling took goes back to the system.

    glibc would keep it for later: 20 to 30 MB for a model of 30 layers.
    """
    executable = function.lower(*arguments).compile()
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
    return executable


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
) -> list[list[int]]:
    """The whole answers to some prompts: a `Generator`, run to its end.

    It compiles at each call; keep a `Generator` to answer more than once. `images` are
    those of each prompt: of Pillow, names of files, or a `Picture` each; `cache` is
    the generator's.

    Returns:
      One list of token ids per prompt, of at most `max_tokens`, without the stop token.
    """
    if not prompts:
        return []
    longest, patches = max(map(len, prompts)), 0
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
    )
    stream = generator.stream(prompts, images=images, seed=seed)
    rows = np.concatenate(list(stream), axis=1)
    ends = {NO_TOKEN, *stop_ids}
    return [[int(token) for token in row if token not in ends] for row in rows]
