"""`upload`: a pytree of weights onto its devices, in the dtypes of a policy."""

import collections
import contextlib
import dataclasses
import functools
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxkern.primitives.linear.policy import Policy, current_policy, policy
from jaxkern.primitives.quant.dequantize import DEQUANTIZE
from jaxkern.primitives.quant.fp8 import quantize_fp8
from jaxkern.runtime.memory.memory_limit import check_request, default_device, is_tracer
from jaxkern.runtime.trace import events, fault_points


@dataclasses.dataclass(frozen=True)
class UploadReport:
    """What `upload` did.

    Attributes:
      bytes: of the leaves that it moved or converted, as they now are.
      skipped: leaves that were in place already.
      seconds: until everything was there.
      formats: what each leaf is now, by its path: "bfloat16", "FP8Tensor(e4m3fn ...".
    """

    bytes: int
    skipped: int
    seconds: float
    formats: Mapping[str, str]

    def __str__(self) -> str:
        kinds: dict[str, int] = {}
        for form in self.formats.values():
            kind = form.split("(")[0]
            kinds[kind] = kinds.get(kind, 0) + 1
        leaves = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
        return (
            f"{self.bytes:,} bytes in {self.seconds:.3f} s, {self.skipped} leaves in "
            f"place already; {leaves or 'no leaves'}"
        )


def upload(
    params: Any,
    *,
    policy: str | Policy | None = None,
    sharding: Any = None,
    progress: bool | None = None,
) -> tuple[Any, UploadReport]:
    """Puts weights where they are used, once: what is there already is left alone.

    Matrices (float arrays of two or more dims) take the policy's weight dtype; vectors,
    integers and quantised containers keep theirs. Under "fp8" a matrix becomes an
    `FP8Tensor`, its scale max|w| / 448 a matrix of the last two dims, saturating.

    Args:
      params: any pytree of arrays, NumPy arrays and quantised containers.
      policy: a name or a `Policy`; None for that of the `policy` block, else no
        conversion.
      sharding: a device or sharding, or a pytree prefix of them; None leaves arrays on
        the devices they are on and puts others on the default device. The arrays of a
        container are cut where the sharding divides them, else whole.
      progress: show a bar (by the `rich` package); None: where stderr is a terminal.

    Returns:
      params: the same tree with every leaf on its devices.
      report: an `UploadReport`.

    Raises:
      TypeError: called under a transformation.
      ImportError: `progress=True` without the `rich` package.
      MemoryLimitExceeded: it would not fit into the `memory_limit` in force; nothing
        has moved.

    Example:
      >>> from jaxkern import runtime
      >>> weights = {"w": np.ones((4, 4), "float32"), "norm": np.ones(4, "float32")}
      >>> placed, report = runtime.upload(weights, policy="bf16")
      >>> placed["w"].dtype, placed["norm"].dtype, report.bytes
      (dtype(bfloat16), dtype('float32'), 48)
    """
    start = time.perf_counter()
    chosen = named_policy(policy)
    paths, tree = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_container)
    leaves = [leaf for _, leaf in paths]
    if any(map(is_tracer, jax.tree.leaves(params))):
        raise TypeError("upload: called under a transformation; call it outside.")
    targets = spread(sharding, params)
    plans = [LeafPlan.of(*of, chosen) for of in zip(leaves, targets, strict=True)]
    check_memory(plans)
    num_bytes = sum(p.num_bytes for p in plans)
    skipped = sum(p.in_place for p in plans)
    moved: list = []
    with progress_bar(progress, num_bytes) as advance:
        for plan in plans:
            moved.append(jax.block_until_ready(plan.run()))
            advance(plan.num_bytes)
    formats = {
        jax.tree_util.keystr(path): format_of(y)
        for (path, _), y in zip(paths, moved, strict=True)
    }
    report = UploadReport(num_bytes, skipped, time.perf_counter() - start, formats)
    events.record_upload(report.bytes, report.seconds)
    return jax.tree.unflatten(tree, moved), report


def named_policy(chosen: str | Policy | None) -> Policy | None:
    if chosen is None:
        return current_policy()
    return policy(chosen) if isinstance(chosen, str) else chosen


def is_container(x: Any) -> bool:
    return type(x) in DEQUANTIZE


def format_of(x: Any) -> str:
    return repr(x) if is_container(x) else str(x.dtype)


def spread(sharding: Any, params: Any) -> list[Sharding | None]:
    """The target of each leaf; a container is one leaf."""

    def is_target(s: Any) -> bool:
        return s is None or isinstance(s, Sharding | jax.Device)

    def of_part(s: Any, part: Any) -> list:
        return [s] * len(jax.tree.leaves(part, is_leaf=is_container))

    each = jax.tree.map(of_part, sharding, params, is_leaf=is_target)
    return [
        jax.sharding.SingleDeviceSharding(s) if isinstance(s, jax.Device) else s
        for s in jax.tree.leaves(each, is_leaf=is_target)
    ]


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """What happens to one leaf.

    Attributes:
      leaf: an array or a container.
      target: its sharding, or None to leave it on its devices.
      dtype: what it is converted to, or None.
    """

    leaf: Any
    target: Sharding | None
    dtype: jnp.dtype | None

    @classmethod
    def of(cls, leaf: Any, target: Sharding | None, chosen: Policy | None) -> Self:
        if is_container(leaf):
            return cls(leaf, target, None)
        leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        is_matrix = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.ndim >= 2
        if chosen is None or not is_matrix or leaf.dtype == chosen.weights:
            return cls(leaf, target, None)
        return cls(leaf, target, chosen.weights)

    @property
    def in_place(self) -> bool:
        return self.dtype is None and not self.to_move

    @property
    def to_move(self) -> list:
        """The arrays of the leaf that are not on their devices."""
        return [a for a in jax.tree.leaves(self.leaf) if not self.is_there(a)]

    @functools.cached_property
    def becomes(self) -> list:
        """Shapes and dtypes of the arrays that the leaf becomes, none if it stays."""
        if self.in_place:
            return []
        f = functools.partial(converted, dtype=self.dtype)
        return jax.tree.leaves(jax.eval_shape(f, self.leaf))

    @property
    def num_bytes(self) -> int:
        return sum(a.size * a.dtype.itemsize for a in self.becomes)

    def sharding_of(self, a: Any) -> Sharding | None:
        """Of one array: as asked, but of packed weights only where it divides."""
        packed = is_container(self.leaf) or self.dtype == jnp.float8_e4m3fn
        return dividing(self.target, np.shape(a)) if packed else self.target

    def is_there(self, a: Any) -> bool:
        target = self.sharding_of(a)
        return isinstance(a, jax.Array) and (
            target is None or a.sharding.is_equivalent_to(target, a.ndim)
        )

    def run(self) -> Any:
        if self.in_place:
            return self.leaf
        fault_points.hit("upload")
        out = jax.tree.map(self.put, self.leaf)
        if self.dtype is not None:
            out = jax.tree.map(self.put, convert(out, dtype=self.dtype))
        return out

    def put(self, a: Any) -> jax.Array:
        return a if self.is_there(a) else jax.device_put(a, self.sharding_of(a))

    def bytes_by_device(self, arrays: list) -> collections.Counter:
        """What each device would hold of these arrays."""
        held: collections.Counter = collections.Counter()
        for a in arrays:
            target = self.sharding_of(a) or getattr(self.leaf, "sharding", None)
            shape = np.shape(a) if target is None else target.shard_shape(np.shape(a))
            devices = [default_device()] if target is None else target.device_set
            size = int(np.prod(shape)) * a.dtype.itemsize
            held.update(dict.fromkeys(devices, size))
        return held


def dividing(target: Sharding | None, shape: tuple[int, ...]) -> Sharding | None:
    """The sharding, each dim whole that it does not divide."""
    if not isinstance(target, NamedSharding):
        return target
    entries = list(target.spec)[: len(shape)]
    for i, entry in enumerate(entries):
        axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
        if shape[i] % math.prod(target.mesh.shape[a] for a in axes):
            entries[i] = None
    return NamedSharding(
        target.mesh, PartitionSpec(*entries), memory_kind=target.memory_kind
    )


def converted(x: Any, *, dtype: jnp.dtype | None) -> Any:
    if dtype is None:
        return x
    if dtype == jnp.float8_e4m3fn:
        return quantize_fp8(x)  # saturates; a plain astype makes NaN beyond 464
    return x.astype(dtype)


convert: Callable = jax.jit(converted, static_argnames="dtype")


def check_memory(plans: list[LeafPlan]) -> None:
    """Asks the `memory_limit` in force for all leaves and the largest conversion."""
    weights: collections.Counter = collections.Counter()
    conversion: collections.Counter = collections.Counter()
    for plan in plans:
        weights.update(plan.bytes_by_device(plan.becomes))
        if plan.dtype is not None:  # moved first, converted there
            conversion |= plan.bytes_by_device(plan.to_move)
    for device, size in weights.items():
        need = {"weights": size, "conversion": conversion[device]}
        check_request(need, frozenset([device]), "upload")


@contextlib.contextmanager
def progress_bar(asked: bool | None, total: int) -> Iterator[Callable[[int], None]]:
    """A function that advances the bar by bytes, or does nothing."""
    has_rich = importlib.util.find_spec("rich") is not None
    if asked is None:
        asked = has_rich and total > 0 and sys.stderr.isatty()
    if not asked:
        yield lambda _: None
        return
    if not has_rich:
        raise ImportError("upload: `progress` needs the package rich: pip install rich")
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    columns = "upload", BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("upload", total=total)
        yield lambda n: bar.advance(task, n)
