"""Runs kernels written in Gluon with NumPy: Triton's interpreter knows no layouts.

Layouts count for nothing here. Time does: a copy arrives in shared memory when its
group or its bar is waited for, and a product reads shared memory when it is, not when
it was started; what was never written is NaN. Warps with work of their own are threads
of Python, which meet at bars alone. A program runs by itself, so a missing barrier
shows nothing.
"""

import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxkern.gpu import triton_call as bridge
from jaxkern.triton.delta_rule.gated_delta_rule import block_products, ready_chunks
from jaxkern.triton.quant import fragments

PATIENCE = 60.0  # seconds at a bar


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

    def reshape(self, shape: list[int]) -> "Pointer":
        return Pointer(self.array, self.at.reshape(shape))

    def to(self, dtype: Any) -> "Pointer":
        words = self.array.view(dtype)
        return Pointer(words, self.at * self.array.itemsize // words.itemsize)

    def load(self, mask: Any = True, other: Any = 0) -> Tile:
        at, mask = np.broadcast_arrays(self.at, mask)
        found = np.where(mask, self.array[np.where(mask, at, 0)], other)
        return tile(found.astype(self.array.dtype))

    def store(self, value: Any, mask: Any = True) -> None:
        at, mask, value = np.broadcast_arrays(self.at, mask, value)
        self.array[at[mask]] = value[mask]


class Shared:
    def __init__(self, array: np.ndarray):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def index(self, i: Any) -> "Shared":
        return Shared(self.array[int(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        part = slice(int(start), int(start) + length)
        return Shared(self.array[(*[slice(None)] * int(dim), part)])

    def permute(self, order: list[int]) -> "Shared":
        return Shared(self.array.transpose(order))

    def load(self, layout: Any = None) -> Tile:
        return tile(self.array.copy())

    def store(self, value: Any) -> None:
        self.array[...] = value


def reinterpreted(of: Shared, dtype: Any, shape: list[int], layout: Any) -> Shared:
    return Shared(of.array.view(dtype).reshape(shape))


class Product:
    """A sum of products that are under way."""

    def __init__(self, start: Callable[[], Tile]):
        self.start = start
        self.value: Tile | None = None

    def done(self) -> Tile:
        assert self.value is not None, "the product was used before it was waited for"
        return self.value


class Bar:
    """A place to wait at, until so many have arrived; again and again."""

    def __init__(self, count: int):
        self.count = self.missing = count
        self.turns = 0
        self.copies: list[Callable] = []
        self.changed = threading.Condition()

    def arrive(self, count: int, copies: Sequence[Callable] = ()) -> None:
        with self.changed:
            self.copies += copies
            self.missing -= count
            assert self.missing >= 0, "more arrived than were to come"
            if not self.missing:
                self.turns, self.missing = self.turns + 1, self.count
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            came = self.changed.wait_for(lambda: self.turns % 2 != parity, PATIENCE)
            assert came, "nobody came"
            while self.copies:
                self.copies.pop(0)()


class UnderWay(threading.local):
    """What a thread has started."""

    def __init__(self) -> None:
        self.copies: list[Callable] = []
        self.groups: list[list[Callable]] = []
        self.products: list[Product] = []


class Program:
    """The program that runs."""

    def __init__(self) -> None:
        self.id: tuple[int, ...] = ()
        self.grid: tuple[int, ...] = ()
        self.bars: dict[int, Bar] = {}
        self.mine = UnderWay()

    def async_load(self, to: Shared, ptr: Pointer, mask: Any = True) -> None:
        self.mine.copies.append(lambda: to.store(ptr.load(mask)))

    def commit_group(self) -> None:
        self.mine.groups.append(self.mine.copies)
        self.mine.copies = []

    def wait_group(self, others: int) -> None:
        while len(self.mine.groups) > others:
            for arrive in self.mine.groups.pop(0):
                arrive()

    def bar(self, at: Shared) -> Bar:
        return self.bars[at.array.ctypes.data]

    def init(self, at: Shared, count: int) -> None:
        self.bars[at.array.ctypes.data] = Bar(count)

    def copies_arrive(self, at: Shared, increment_count: bool) -> None:
        """Of all threads that copy, each by itself."""
        assert not increment_count
        bar = self.bar(at)
        bar.arrive(bar.count, self.mine.copies)
        self.mine.copies = []

    def side_by_side(self, parts: list, warps: list[int], registers: list) -> None:
        (first, given), *others = parts
        with ThreadPoolExecutor(len(others)) as pool:
            running = [pool.submit(f, *args) for f, args in others]
            first(*given)
            for other in running:
                other.result()

    def mma(self, a, b: Shared, acc, use_acc=True, is_async=False) -> Any:
        def sums() -> Tile:
            before = acc.done() if isinstance(acc, Product) else acc
            left = a.array if isinstance(a, Shared) else a
            y = left.astype(np.float32) @ b.array.astype(np.float32)
            return tile(y + before if use_acc else y)

        started = Product(sums)
        self.mine.products.append(started)
        return started if is_async else self.wait(0, [started])

    def wait(self, others: int, deps: list) -> Any:
        while len(self.mine.products) > others:
            first = self.mine.products.pop(0)
            first.value = first.start()
        values = [x.done() if isinstance(x, Product) else x for x in deps]
        return values[0] if len(values) == 1 else values


def running_sums(x: Tile, axis: int, add: Callable, reverse: bool = False) -> Tile:
    """Whatever `add` is: kernels have no other scans."""
    along = np.flip(x, axis) if reverse else x
    sums = np.cumsum(along, axis, dtype=x.dtype)
    return tile(np.flip(sums, axis) if reverse else sums)


def numbers(*bounds: Any) -> Iterator[Tile]:
    return (tile(np.int32(i)) for i in range(*map(int, bounds)))


def shared_memory(dtype, shape, layout, value=None) -> Shared:
    if value is None:
        value = 0 if np.dtype(dtype).kind == "i" else np.nan
    return Shared(np.full(shape, value, dtype))


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
        int32=np.int32,
        int64=np.int64,
        pointer_type=lambda of: of,
        arange=lambda start, end, layout=None: tile(np.arange(start, end, dtype="i4")),
        zeros=lambda shape, dtype, layout=None: tile(np.zeros(shape, dtype)),
        where=lambda *given: tile(np.where(*given)),
        load=lambda ptr, *mask: ptr.load(*mask),
        store=lambda ptr, value, *mask: ptr.store(value, *mask),
        max_contiguous=lambda x, sizes: x,
        multiple_of=lambda x, sizes: x,
        convert_layout=lambda x, layout, assert_trivial=False: x,
        reshape=lambda x, shape: x.reshape(shape),
        permute=lambda x, order: x.transpose(order),
        join=lambda x, y: tile(np.stack([x, y], -1)),
        expand_dims=lambda x, axis: tile(np.expand_dims(x, axis)),
        broadcast=lambda *given: tuple(map(tile, np.broadcast_arrays(*given))),
        allocate_shared_memory=shared_memory,
        program_id=lambda axis: tile(np.int32(program.id[axis])),
        num_programs=lambda axis: tile(np.int32(program.grid[axis])),
        num_warps=lambda: 4,
        exp=lambda x: tile(np.exp(x)),
        exp2=lambda x: tile(np.exp2(x)),
        minimum=lambda x, y: tile(np.minimum(x, y)),
        sum=lambda x, axis: tile(x.sum(axis)),
        reduce=lambda xs, axis, add: tuple(tile(x.sum(axis)) for x in xs),
        associative_scan=running_sums,
        maximum=lambda x, y: tile(np.maximum(x, y)),
        static_range=range,
        to_tensor=tile,
    )


def tf32(x: Any) -> np.ndarray:
    """As matrix units read float32."""
    return (np.asarray(x, np.float32).view("i4") & -(1 << 13)).view("f4")


def subtract_product(x: Tile, y: Tile, sums: Tile, parts: str | None = None) -> Tile:
    """Of block_products.py, which says what `parts` leave out."""
    left, right, result = tf32(x), tf32(y).swapaxes(1, 2), sums.copy()
    for n, s in block_products.PARTS[parts]:
        columns, terms = (slice(8 * half, 8 * half + 8) for half in (n, s))
        result[..., columns] -= left[..., terms] @ right[:, terms, columns]
    return tile(result)


def negative_product(x: Tile, y: Tile, *parts: str | None) -> Tile:
    return subtract_product(x, y, tile(np.zeros(x.shape, "f4")), *parts)


def subtract_words(x: Tile, y: Tile, sums: Tile, dtype: Any) -> Tile:
    left, right = (np.ascontiguousarray(of).view(dtype).astype("f4") for of in (x, y))
    return tile(sums - left @ right.swapaxes(1, 2))


def say_ready(ptr: Pointer, warps: int, chunks: int) -> None:
    for warp in range(warps):
        (ptr + warp * chunks).store(1)


def wait_until_ready(ptr: Pointer, chunk: int, together: int, chunks: int) -> None:
    """Programs run one after the other."""
    there = [(ptr + i).load() for i in range(int(chunk), chunks)[:together]]
    assert all(there), "who makes what is waited for has a later number"


class Kernel:
    """Called as a kernel of Triton is by `interpreted`."""

    def __init__(self, f: Callable, program: Program):
        self.f, self.program = f, program
        self.arg_names = list(inspect.signature(f).parameters)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        def run(**given: Any) -> None:
            for id in np.ndindex(*grid):
                self.program.__init__()
                self.program.id, self.program.grid = id, grid
                pointers = {
                    n: Pointer(x.array) if hasattr(x, "array") else x
                    for n, x in given.items()
                }
                self.f(**pointers)

        return run


def loaded(module: ModuleType) -> ModuleType:
    """The file once more, with what its imports are now."""
    spec = importlib.util.find_spec(module.__name__)
    assert spec and spec.loader
    copy: Any = importlib.util.module_from_spec(spec)
    copy.range = numbers
    spec.loader.exec_module(copy)
    return copy


@contextmanager
def gluon_on_host(
    module: ModuleType, *kernels: str, imports: Sequence[ModuleType] = ()
) -> Iterator[SimpleNamespace]:
    """A file whose kernels are as `interpreted` calls them; Gluon files it imports."""
    program = Program()
    groups = SimpleNamespace(
        commit_group=program.commit_group,
        wait_group=program.wait_group,
        mbarrier_arrive=program.copies_arrive,
    )
    bars = SimpleNamespace(
        MBarrierLayout=layout,
        init=program.init,
        arrive=lambda at, count: program.bar(at).arrive(count),
        wait=lambda at, parity: program.bar(at).wait(int(parity)),
    )
    patched: dict[str, Any] = dict(
        gl=language(program),
        gluon_jit=lambda f: f,
        async_copy=groups,
        mbarrier=bars,
        warp_specialize=program.side_by_side,
        async_load=program.async_load,
        fence_async_shared=lambda: None,
        reinterpreted=reinterpreted,
        mma_v2=lambda a, b, sums: sums + tile(a.astype("f4") @ b.astype("f4")),
        warpgroup_mma=program.mma,
        warpgroup_mma_wait=lambda others, deps: program.wait(others, deps),
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, stand_in in patched.items():
            patch.setattr(bridge, name, stand_in)
        patch.setattr(fragments, "barrier", lambda: None)
        patch.setattr(ready_chunks, "say_ready", say_ready)
        patch.setattr(ready_chunks, "wait_until_ready", wait_until_ready)
        patch.setattr(block_products, "negative_product", negative_product)
        patch.setattr(block_products, "subtract_product", subtract_product)
        patch.setattr(block_products, "subtract_product_of_words", subtract_words)
        for other in imports:
            patch.setitem(sys.modules, other.__name__, loaded(other))
        copy = loaded(module)
    called = {n: Kernel(getattr(copy, n), program) for n in kernels}
    yield SimpleNamespace(**(vars(copy) | called))
