"""Runs kernels written in Gluon with NumPy: Triton's interpreter knows no layouts.

Layouts count for nothing here. Time does: a copy arrives in shared memory when its
group is waited for, and a product reads shared memory when it is, not when it was
started; what was never written is NaN. A program runs by itself, so a missing barrier
shows nothing.
"""

import importlib.util
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from jaxkern.gpu import triton_call as bridge
from jaxkern.triton.quant import fragments


class Tile(np.ndarray):
    """A tensor, or a number that is one."""

    def to(self, dtype: Any, bitcast: bool = False) -> "Tile":
        return tile(self.view(dtype) if bitcast else self.astype(dtype))


def tile(x: Any) -> Tile:
    return np.asarray(x).view(Tile)


class Pointer:
    """An array in memory, and places in it."""

    def __init__(self, array: np.ndarray, at: Any = 0):
        self.array, self.at = array.reshape(-1), tile(at)
        self.dtype = SimpleNamespace(element_ty=array.dtype)

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.array, self.at + other)

    def load(self, mask: Any = True, other: Any = 0) -> Tile:
        at, mask = np.broadcast_arrays(self.at, mask)
        found = np.where(mask, self.array[np.where(mask, at, 0)], other)
        return tile(found.astype(self.array.dtype))

    def store(self, value: Any, mask: Any = True) -> None:
        at, mask, value = np.broadcast_arrays(self.at, mask, value)
        self.array[at[mask]] = value[mask]


class Shared:
    def __init__(self, array: np.ndarray):
        self.array, self.shape = array, array.shape

    def index(self, i: Any) -> "Shared":
        return Shared(self.array[int(i)])

    def slice(self, start: int, length: int) -> "Shared":
        return Shared(self.array[start : start + length])

    def permute(self, order: list[int]) -> "Shared":
        return Shared(self.array.transpose(order))

    def load(self, layout: Any = None) -> Tile:
        return tile(self.array.copy())

    def store(self, value: Any) -> None:
        self.array[...] = value


class Product:
    """A sum of products that are under way."""

    def __init__(self, start: Callable[[], Tile]):
        self.start = start
        self.value: Tile | None = None

    def done(self) -> Tile:
        assert self.value is not None, "the product was used before it was waited for"
        return self.value


class Program:
    """What is under way in the program that runs."""

    def __init__(self) -> None:
        self.id: tuple[int, ...] = ()
        self.copies: list[Callable] = []
        self.groups: list[list[Callable]] = []
        self.products: list[Product] = []

    def async_load(self, to: Shared, ptr: Pointer, mask: Any = True) -> None:
        self.copies.append(lambda: to.store(ptr.load(mask)))

    def commit_group(self) -> None:
        self.groups.append(self.copies)
        self.copies = []

    def wait_group(self, others: int) -> None:
        while len(self.groups) > others:
            for arrive in self.groups.pop(0):
                arrive()

    def mma(self, a, b: Shared, acc, use_acc=True, is_async=False) -> Any:
        def sums() -> Tile:
            before = acc.done() if isinstance(acc, Product) else acc
            left = a.array if isinstance(a, Shared) else a
            y = left.astype(np.float32) @ b.array.astype(np.float32)
            return tile(y + before if use_acc else y)

        self.products.append(Product(sums))
        started = self.products[-1]
        return started if is_async else self.wait(0, [started])

    def wait(self, others: int, deps: list) -> Any:
        while len(self.products) > others:
            first = self.products.pop(0)
            first.value = first.start()
        values = [x.done() if isinstance(x, Product) else x for x in deps]
        return values[0] if len(values) == 1 else values


def numbers(*bounds: Any) -> Iterator[Tile]:
    return (tile(np.int32(i)) for i in range(*map(int, bounds)))


def shared_memory(dtype, shape, layout, value=None) -> Shared:
    return Shared(np.full(shape, np.nan, dtype) if value is None else value.copy())


def layout(*parts: Any, **named: Any) -> Any:
    return SimpleNamespace(instr_shape=parts[2] if len(parts) == 3 else None)


def language(program: Program) -> SimpleNamespace:
    kinds = ("BlockedLayout", "SliceLayout", "DotOperandLayout", "NVMMASharedLayout")
    kinds += ("NVMMADistributedLayout", "SwizzledSharedLayout")
    return SimpleNamespace(
        **dict.fromkeys(kinds, layout),
        constexpr=None,
        float32=np.float32,
        bfloat16=ml_dtypes.bfloat16,
        int64=np.int64,
        arange=lambda start, end, layout=None: tile(np.arange(start, end, dtype="i4")),
        zeros=lambda shape, dtype, layout=None: tile(np.zeros(shape, dtype)),
        where=lambda *given: tile(np.where(*given)),
        load=lambda ptr, *mask: ptr.load(*mask),
        store=lambda ptr, value, *mask: ptr.store(value, *mask),
        convert_layout=lambda x, layout: x,
        allocate_shared_memory=shared_memory,
        program_id=lambda axis: tile(np.int32(program.id[axis])),
        static_range=numbers,
        to_tensor=tile,
    )


class Kernel:
    """Called as a kernel of Triton is by `interpreted`."""

    def __init__(self, f: Callable, program: Program):
        self.f, self.program = f, program
        self.arg_names = list(inspect.signature(f).parameters)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        def run(**given: Any) -> None:
            for id in np.ndindex(*grid):
                self.program.__init__()
                self.program.id = id
                pointers = {
                    n: Pointer(x.array) if hasattr(x, "array") else x
                    for n, x in given.items()
                }
                self.f(**pointers)

        return run


@contextmanager
def gluon_on_host(module: ModuleType, *kernels: str) -> Iterator[SimpleNamespace]:
    """A file whose kernels are as `interpreted` calls them."""
    program = Program()
    wait = SimpleNamespace(
        commit_group=program.commit_group, wait_group=program.wait_group
    )
    patched: dict[str, Any] = dict(
        gl=language(program),
        gluon_jit=lambda f: f,
        async_copy=wait,
        async_load=program.async_load,
        warpgroup_mma=program.mma,
        warpgroup_mma_wait=lambda others, deps: program.wait(others, deps),
    )
    kept = {name: getattr(bridge, name) for name in patched}
    barrier = fragments.barrier
    spec = importlib.util.find_spec(module.__name__)
    assert spec and spec.loader
    copy: Any = importlib.util.module_from_spec(spec)
    copy.range = numbers
    try:
        bridge.__dict__.update(patched)
        fragments.barrier = lambda: None
        spec.loader.exec_module(copy)
    finally:
        bridge.__dict__.update(kept)
        fragments.barrier = barrier
    called = {n: Kernel(getattr(copy, n), program) for n in kernels}
    yield SimpleNamespace(**(vars(copy) | called))
