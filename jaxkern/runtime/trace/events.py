"""What happens in the runtime: told to subscribers, and counted.

| kind | when | name | seconds | bytes |
|---|---|---|---|---|
| compile | XLA compiled a program | of the program | yes | - |
| cache_hit | it came from a cache on disk instead | of the program | yes | - |
| upload | `upload` moved weights | "upload" | yes | moved |
| fallback | `with_oom_fallback` ran elsewhere | of the function | - | - |
| budget | `memory_limit` refused a call | of the function | - | requested |

Nothing listens to JAX before the first subscription nor after the last.
"""

import collections
import contextlib
import dataclasses
import threading
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax.monitoring

KINDS = ("compile", "cache_hit", "upload", "fallback", "budget")
# Strings that jax.monitoring hands to its listeners; a test asks for each of them.
COMPILED = "/jax/core/compile/backend_compile_duration"  # also after a cache hit
FOUND_IN_CACHE = "/jax/compilation_cache/cache_hits"
FOUND_UNTRACED = "/jaxkern/traced_calls/found_seconds"  # `plan/kept_files.py` tells it


@dataclasses.dataclass(frozen=True)
class Event:
    """One fact.

    Attributes:
      kind: one of `KINDS`.
      name: of the program or function.
      seconds: that it took, or None.
      bytes: moved or asked for, or None.
      reason: in words, or "".
    """

    kind: str
    name: str
    seconds: float | None = None
    bytes: int | None = None
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counts since the process began, or since `reset_stats`.

    Attributes:
      oom_fallbacks: calls that ran out of memory and fell back, by (name of the
        function, reason), the reason "RESOURCE_EXHAUSTED" or "MemoryLimitExceeded".
      budget_refusals: calls refused by `memory_limit`, by name of the function.
      uploads: calls of `upload`.
      uploaded_bytes: what they moved.
    """

    oom_fallbacks: Mapping[tuple[str, str], int]
    budget_refusals: Mapping[str, int]
    uploads: int
    uploaded_bytes: int


class Subscription(contextlib.AbstractContextManager):
    """Ends with `close()` or with its `with` block."""

    def __init__(self, fn: Callable[[Event], Any], kinds: tuple[str, ...]):
        self.fn, self.kinds = fn, kinds

    def close(self) -> None:
        """No more events; closing twice does nothing."""
        global _subscriptions
        with _lock:
            if self not in _subscriptions:
                return
            _subscriptions = tuple(s for s in _subscriptions if s is not self)
            if not _subscriptions:
                _stop_listening()

    def __exit__(self, *_: object) -> None:
        self.close()


_lock = threading.RLock()  # a subscriber may subscribe
_subscriptions: tuple[Subscription, ...] = ()  # replaced, never changed in place
_counts: collections.Counter = collections.Counter()
_thread = threading.local()  # did this thread's program come from the cache?


def subscribe(
    fn: Callable[[Event], Any], *, kinds: tuple[str, ...] = KINDS
) -> Subscription:
    """Calls `fn(event)` for every event, in the thread in which it happens.

    A subscriber that raises is warned about and does not disturb what it observes.

    Args:
      fn: takes an `Event`.
      kinds: the kinds it wants, of `KINDS`.

    Returns:
      A handle: `close()` it, or use it as a context.

    Raises:
      ValueError: no such kind.
    """
    if unknown := set(kinds) - set(KINDS):
        raise ValueError(
            f"subscribe: `kinds` must be among {KINDS}, got {sorted(unknown)}."
        )
    global _subscriptions
    subscription = Subscription(fn, tuple(kinds))
    with _lock:
        if not _subscriptions:
            jax.monitoring.register_event_listener(_on_event)
            jax.monitoring.register_event_duration_secs_listener(_on_duration)
        _subscriptions = (*_subscriptions, subscription)
    return subscription


def stats() -> Stats:
    """The counts, as they stand now.

    Example:
      >>> from jaxkern import runtime
      >>> runtime.reset_stats()
      >>> _ = runtime.upload({"w": np.ones((2, 2), "float32")})
      >>> runtime.stats().uploaded_bytes
      16
    """
    with _lock:
        counts = dict(_counts)
    of_kind: dict[str, dict] = {kind: {} for kind in KINDS}
    for (kind, key), n in counts.items():
        of_kind[kind][key] = n
    uploads = of_kind["upload"]
    return Stats(
        MappingProxyType(of_kind["fallback"]),
        MappingProxyType(of_kind["budget"]),
        uploads.get("calls", 0),
        uploads.get("bytes", 0),
    )


def reset_stats() -> None:
    """All counts to zero.

    Example:
      >>> from jaxkern import runtime
      >>> runtime.reset_stats()
      >>> runtime.stats().uploads
      0
    """
    with _lock:
        _counts.clear()


def record_upload(num_bytes: int, seconds: float) -> None:
    with _lock:
        _counts["upload", "calls"] += 1
        _counts["upload", "bytes"] += num_bytes
    _emit(Event("upload", "upload", seconds, num_bytes))


def record_fallback(name: str, cause: str, reason: str) -> None:
    with _lock:
        _counts["fallback", (name, cause)] += 1
    _emit(Event("fallback", name, reason=reason))


def record_refusal(name: str, requested: int, reason: str) -> None:
    with _lock:
        _counts["budget", name] += 1
    _emit(Event("budget", name, bytes=requested, reason=reason))


def _emit(event: Event) -> None:
    for subscription in _subscriptions:
        if event.kind in subscription.kinds:
            try:
                subscription.fn(event)
            except Exception as error:
                warnings.warn(
                    f"events: a subscriber raised {error!r} at {event}.", stacklevel=2
                )


def _on_event(event: str, **_: Any) -> None:
    if event == FOUND_IN_CACHE:
        _thread.from_cache = True


def _on_duration(event: str, duration_secs: float, **facts: Any) -> None:
    name = str(facts.get("fun_name", ""))
    if event == FOUND_UNTRACED:
        _emit(Event("cache_hit", name, duration_secs))
    elif event == COMPILED:
        kind = "cache_hit" if getattr(_thread, "from_cache", False) else "compile"
        _thread.from_cache = False
        _emit(Event(kind, name, duration_secs))


def _stop_listening() -> None:
    # Another user of jax.monitoring may have cleared every listener: JAX then asserts.
    with contextlib.suppress(AssertionError, ValueError):
        jax.monitoring.unregister_event_listener(_on_event)
    with contextlib.suppress(AssertionError, ValueError):
        jax.monitoring.unregister_event_duration_listener(_on_duration)
