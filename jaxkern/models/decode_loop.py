"""The loop that writes tokens: what it carries, a chunk of its steps."""

import contextlib
import ctypes
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from jaxkern.lowering.calls_ahead import calls_compiled_ahead
from jaxkern.lowering.chained import chained
from jaxkern.lowering.launches_ahead import compiled_ahead
from jaxkern.models.architecture import Cache, ModelConfig
from jaxkern.models.cached_steps import decode, with_lengths
from jaxkern.models.sampling import Sampling, Seen
from jaxkern.quick_import import no_collections
from jaxkern.runtime.plan.kept_calls import KeptCalls, writer
from jaxkern.runtime.plan.made import Made, made

NO_TOKEN = -1  # of a sequence that is finished
UNKNOWN = "No such compile option"  # what XLA says of one

GPU_OPTIONS = {"xla_gpu_enable_triton_gemm": False}
"""How XLA compiles a model on a GPU.

The products that have no kernel of ours go to cuBLAS: before XLA times its own Triton
products beside it, it compiles a hundred of them.
"""


class Progress(NamedTuple):
    """How far answers are: tokens drawn of each, and with how many it ends."""

    drawn: Int32[Array, " b"]
    limit: Int32[Array, " b"]

    @property
    def ended(self) -> Bool[Array, " b"]:
        return self.drawn >= self.limit


class State(NamedTuple):
    """What goes from one chunk to the next; it stays on the device.

    Attributes:
      tokens: drawn but not yet read.
      finished: an end token was drawn, or the sequence was never there.
      key: of the draws of all sequences, or `[b]`, one of each, with `progress`.
      seen: for the penalties, None where there are none.
      progress: of answers that begin one by one and have a length each; else None.
    """

    tokens: Int32[Array, " b"]
    finished: Bool[Array, " b"]
    cache: Cache
    key: jax.Array
    seen: Seen | None = None
    progress: Progress | None = None

    def keys(self) -> tuple[jax.Array, jax.Array]:
        """The key of what is drawn now, and that of the next state."""
        if self.progress is None:
            key, key_now = jax.random.split(self.key)
            return key_now, key
        return jax.vmap(jax.random.fold_in)(self.key, self.progress.drawn), self.key


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
            key_now, key = state.keys()
        drawn = found
        if not sampling.is_likeliest:
            drawn = sampling(found, key_now, state.seen)
        tokens = jnp.where(state.finished, state.tokens, drawn)
        finished = state.finished | is_stop(tokens, stop_ids)
        shown = jnp.where(state.finished, NO_TOKEN, drawn)
        seen, progress = state.seen and state.seen.after(drawn), state.progress
        if progress is not None:
            progress = progress._replace(drawn=progress.drawn + 1)
            finished |= progress.ended
        return State(tokens, finished, cache, key, seen, progress), shown

    state, tokens = lax.scan(step, state, length=steps)
    # one array again: the loop need not carry one for each layer
    cache = with_lengths(state.cache, state.cache[0].lengths)
    return tokens.T, state._replace(cache=cache)


def is_stop(tokens: Int32[Array, " b"], stop_ids: tuple[int, ...]) -> Bool[Array, " b"]:
    stops = jnp.array(stop_ids, jnp.int32)
    return jnp.any(tokens[:, None] == stops, axis=-1)


def compiled(function: Any, arguments: tuple) -> jax.stages.Compiled:
    """The executable; see `compiled_in_turn`."""
    return compiled_in_turn({"": (function, arguments)})[""]


def compiled_in_turn(
    calls: Mapping[str, tuple[Any, tuple]],
    kept: KeptCalls | None = None,
    ask: Callable[[Any], None] | None = None,
) -> dict[str, jax.stages.Compiled]:
    """Executables by name, from disk or compiled, one while the next is lowered.

    Those that a start before has left on disk are not traced (`KeptCalls`). Where a GPU
    will run them their kernels compile beside each other before that, and XLA compiles
    them at once, with `GPU_OPTIONS`.

    Args:
      calls: a jitted function and its arguments, by name.
      kept: where some were looked for. Who gives it calls `settle` some time later.
      ask: of `compiled_ahead`, where that has begun.
    """
    found = kept or KeptCalls()
    executables = found.load_all(calls)
    missing = {name: call for name, call in calls.items() if name not in executables}
    if missing:
        made = all_made(missing, found, ask)
        for name, one in made.items():
            found.keep(missing[name][0], *one)
            executables[name] = one[0].executable
        if kept is None:
            settle(found)
    return {name: executables[name] for name in calls}


def settle(kept: KeptCalls) -> None:
    """What a start leaves for later: its calls are written, its memory goes back."""
    kept.write()
    with contextlib.suppress(RuntimeError):  # the program ends
        writer.submit(give_back)


def give_back() -> None:
    """Memory that compiling took: glibc keeps 20 to 30 MB of 30 layers for later."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def all_made(
    calls: Mapping[str, tuple[Any, tuple]],
    kept: KeptCalls,
    ask: Callable[[Any], None] | None,
) -> dict[str, tuple[Made, Any]]:
    """Executables that are on no disk, and the shapes of their results."""
    on_gpu = jax.default_backend() == "gpu"
    options = GPU_OPTIONS if on_gpu else {}
    functions = [function for function, _ in calls.values()]
    with (
        kept.instead_of_jax(functions) if on_gpu else contextlib.nullcontext(),
        calls_compiled_ahead() as calls_ahead,
        ThreadPoolExecutor(len(calls) if on_gpu else 1) as worker,
    ):
        with no_collections(), asked(ask) as ask:
            traced, began = {}, {}
            for name, (function, arguments) in calls.items():
                began[name] = time.perf_counter()
                traced[name] = function.trace(*arguments)
                ask(traced[name].jaxpr)
                calls_ahead.lower_mosaic(traced[name].jaxpr)  # while others compile
            compiling = {
                name: worker.submit(
                    made_with,
                    options,
                    calls_ahead.begin(one.lower()),
                    began=began[name],
                    anew=kept.has_file(calls[name][0]),  # it could not be loaded
                )
                for name, one in traced.items()
            }
        return {
            name: (result.result(), traced[name].out_info)
            for name, result in compiling.items()
        }


def asked(
    ask: Callable[[Any], None] | None,
) -> contextlib.AbstractContextManager[Callable[[Any], None]]:
    return contextlib.nullcontext(ask) if ask else compiled_ahead()


def made_with(options: dict[str, Any], lowered: jax.stages.Lowered, **how: Any) -> Made:
    """`made` with options of XLA, or without where this XLA does not know one."""
    try:
        return made(lowered, options, **how)
    except jax.errors.JaxRuntimeError as error:
        if not options or UNKNOWN not in str(error):
            raise
        return made(lowered, **how)
