"""Runs the Gluon kernels of packed rows as plain Python over arrays of lanes.

Triton's interpreter takes no Gluon and no instruction of ours. Here a kernel's file is
read again with a `gl` of numpy in place of Triton's: a tensor is an array, each lane an
element, and of the assembler each line that the kernels have does what PTX says. What
warps do to each other is not looked at, nor whether it compiles.
"""

import builtins
import importlib.util
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

BRIDGE = "jaxkern.gpu.triton_call"
KERNELS = ("jaxkern.triton.quant.", "jaxkern.gpu.bulk_ring")
shared = np.zeros(1 << 18, np.uint8)


class DType:
    def __init__(self, numpy: Any):
        self.numpy = np.dtype(numpy)


class PointerType(DType):
    def __init__(self, of: DType):
        super().__init__(np.int64)
        self.of, self.element_ty = of, of


BYTE = DType(np.int8)
INT16, INT32, INT64 = DType(np.int16), DType(np.int32), DType(np.int64)
FLOAT16, FLOAT32 = DType(np.float16), DType(np.float32)
BFLOAT16 = DType(ml_dtypes.bfloat16)
BY_NUMPY = {d.numpy: d for d in (INT16, INT32, INT64, FLOAT16, FLOAT32, BFLOAT16)}
BY_NUMPY[np.dtype(bool)] = DType(bool)
BY_NUMPY[np.dtype(np.uint8)] = DType(np.uint8)


class Tensor:
    """An array; integers wrap round as registers do."""

    def __init__(self, data: Any, memory: Any = None, of: Any = None):
        self.data, self.memory, self.of = np.asarray(data), memory, of
        self.shape = list(self.data.shape)
        self.type = SimpleNamespace(layout=None)

    @property
    def dtype(self) -> DType:
        if self.memory is not None:
            assert self.of is not None
            return PointerType(self.of)
        return BY_NUMPY[self.data.dtype]

    def like(self, data: Any) -> "Tensor":
        return Tensor(data, self.memory, self.of)

    def to(self, dtype: DType, bitcast: bool = False) -> "Tensor":
        if isinstance(dtype, PointerType):
            return Tensor(self.data, self.memory, dtype.of)
        if self.memory is not None:  # an address counts bytes
            return Tensor(self.data, self.memory, BYTE)
        if bitcast:
            return Tensor(np.ascontiguousarray(self.data).view(dtype.numpy))
        with np.errstate(over="ignore", invalid="ignore"):
            return Tensor(self.data.astype(dtype.numpy))

    def __getitem__(self, at: Any) -> "Tensor":
        return self.like(self.data[at])

    def __neg__(self) -> "Tensor":
        return Tensor(-self.data)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)


def raw(x: Any) -> Any:
    return x.data if isinstance(x, Tensor) else x


def operation(f: Any, swap: bool = False) -> Any:
    def run(a: Tensor, b: Any) -> Tensor:
        if a.memory is not None and f is logical_shift:  # bits of an address
            return Tensor(f(a.data, b))
        if a.memory is not None:  # elements into bytes
            assert a.of is not None
            return a.like(f(a.data, raw(b) * a.of.numpy.itemsize))
        if isinstance(b, Tensor) and b.memory is not None:
            return run(b, a)
        x, y = (raw(b), a.data) if swap else (a.data, raw(b))
        for number, other in ((x, y), (y, x)):
            if isinstance(number, int | float) and other.dtype != bool:
                as_register = np.array(number).astype(other.dtype)
                x, y = (as_register, y) if number is x else (x, as_register)
        with np.errstate(over="ignore", invalid="ignore"):
            return Tensor(f(x, y))

    return run


def divided(x: Any, y: Any) -> Any:
    return np.divide(x, y, dtype=np.float32)


def logical_shift(x: Any, y: Any) -> Any:
    return np.right_shift(x, y)


for name, f in {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": divided,
    "floordiv": np.floor_divide,
    "mod": np.remainder,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "lshift": np.left_shift,
    "rshift": logical_shift,
}.items():
    setattr(Tensor, f"__{name}__", operation(f))
    setattr(Tensor, f"__r{name}__", operation(f, swap=True))
for name, f in {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}.items():
    setattr(Tensor, f"__{name}__", operation(f))


def load(at: Tensor, mask: Any = True, other: Any = 0, eviction_policy: str = ""):
    size = at.of.numpy.itemsize
    places, mask = np.broadcast_arrays(at.data, raw(mask))
    bytes_ = at.memory.reshape(-1).view(np.uint8)
    where = np.where(mask, places, 0)[..., None] + np.arange(size)
    assert where.min() >= 0 and where.max() < bytes_.size, "reads outside of an array"
    found = bytes_[where].view(at.of.numpy)[..., 0]
    return Tensor(np.where(mask, found, np.array(raw(other)).astype(found.dtype)))


def store(at: Tensor, value: Tensor, mask: Any = True) -> None:
    places, mask, data = np.broadcast_arrays(at.data, raw(mask), value.data)
    flat = at.memory.reshape(-1).view(at.of.numpy)
    flat[places[mask] // at.of.numpy.itemsize] = data[mask]


def words(x: Any) -> np.ndarray:
    return np.ascontiguousarray(raw(x)).view(np.uint32)


def permuted(a: Any, b: Any, selection: Any) -> Tensor:
    """prmt: byte i is the one of b : a that digit i says."""
    a, b, selection = np.broadcast_arrays(a, b, selection)
    source = np.stack([a >> 8 * i & 255 for i in range(4)], -1)
    source = np.concatenate(
        [source, np.stack([b >> 8 * i & 255 for i in range(4)], -1)], -1
    )
    out = np.zeros(a.shape, np.uint32)
    for i in range(4):
        digit = selection >> 4 * i & 15
        byte = np.take_along_axis(source, (digit & 7)[..., None], -1)[..., 0]
        sign = np.where(byte & 128, np.uint32(255), np.uint32(0))
        byte = np.where(digit & 8, sign, byte)
        out |= byte.astype(np.uint32) << np.uint32(8 * i)
    return Tensor(out.view(np.int32))


def halves(word: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two bfloat16 of a word in float32."""
    return (word << 16).view(np.float32), (word & 0xFFFF0000).view(np.float32)


def paired(low: np.ndarray, high: np.ndarray) -> Tensor:
    both = [x.astype(ml_dtypes.bfloat16).view(np.uint16) for x in (low, high)]
    word = both[0].astype(np.uint32) | both[1].astype(np.uint32) << 16
    return Tensor(word.view(np.int32))


def matrix_product(args: list) -> tuple[Tensor, ...]:
    """mma.m16n8k16 of each warp: lane 4 g + c of [warps, 8, 4, eights], or of one."""
    shape = np.broadcast_shapes(*(raw(x).shape for x in args))
    if len(shape) == 3:
        found = matrix_product([Tensor(raw(x)[..., None]) for x in args])
        return tuple(Tensor(x.data[..., 0]) for x in found)
    a = [halves(words(np.broadcast_to(raw(x), shape))) for x in args[:4]]
    b = [halves(words(np.broadcast_to(raw(x), shape))) for x in args[4:6]]
    sums = [np.broadcast_to(raw(x), shape) for x in args[6:]]
    left = np.zeros((shape[0], shape[3], 16, 16))
    right = np.zeros((shape[0], shape[3], 16, 8))
    for c in range(4):
        for half in range(2):
            for i in range(4):
                rows = np.arange(8) + 8 * (i % 2)
                k = 2 * c + half + 8 * (i // 2)
                left[:, :, rows, k] = a[i][half][:, :, c].transpose(0, 2, 1)
            for i in range(2):
                k = 2 * c + half + 8 * i
                right[:, :, k] = b[i][half][:, :, c].transpose(0, 2, 1)
    product = left @ right  # [warps, eights, 16, 8]
    out = []
    for i in range(4):
        own = product[:, :, 8 * (i // 2) : 8 * (i // 2) + 8, i % 2 :: 2]
        out.append(Tensor((own.transpose(0, 2, 3, 1) + sums[i]).astype(np.float32)))
    return tuple(out)


def numbers(word: Any, signed: bool) -> np.ndarray:
    """The four bytes of words."""
    return words(word)[..., None].view(np.int8 if signed else np.uint8).astype(np.int64)


def whole_product(args: list, signed: bool) -> tuple[Tensor, ...]:
    """mma.m16n8k32 of whole numbers of each warp: lane 4 g + c of [warps, 8, 4]."""
    shape = np.broadcast_shapes(*(raw(x).shape for x in args))
    a = [numbers(np.broadcast_to(raw(x), shape), signed) for x in args[:4]]
    b = [numbers(np.broadcast_to(raw(x), shape), True) for x in args[4:6]]
    left = np.zeros((shape[0], 16, 32), np.int64)
    right = np.zeros((shape[0], 32, 8), np.int64)
    for c in range(4):
        for byte in range(4):
            for i in range(4):
                rows = np.arange(8) + 8 * (i % 2)
                left[:, rows, 4 * c + byte + 16 * (i // 2)] = a[i][:, :, c, byte]
            for i in range(2):
                right[:, 4 * c + byte + 16 * i] = b[i][:, :, c, byte]
    product = left @ right  # [warps, 16, 8]
    out = []
    for i in range(4):
        own = product[:, 8 * (i // 2) : 8 * (i // 2) + 8, i % 2 :: 2]
        out.append(Tensor((own + raw(args[6 + i])).astype(np.int32)))
    return tuple(out)


def copied(place: Tensor, source: Tensor, count: Any, asks: Tensor) -> None:
    """A bulk copy of each warp that asks for one."""
    memory = source.memory.reshape(-1).view(np.uint8)
    asked = np.broadcast_arrays(place.data, source.data, raw(count), asks.data)
    for to, at, size, asks_ in zip(*(a.flat for a in asked), strict=True):
        if not asks_ or not size:
            continue
        assert to % 16 == at % 16 == size % 16 == 0, "a bulk copy that is not aligned"
        assert 0 <= at <= memory.size - size, "reads outside of an array"
        shared[to : to + size] = memory[at : at + size]


def rows_copied(place: Tensor, source: Tensor, count: Tensor) -> None:
    """An asynchronous copy of 16 bytes of each lane, of which `count` are read."""
    assert source.memory is not None
    memory = source.memory.reshape(-1).view(np.uint8)
    places, sources, counts = np.broadcast_arrays(place.data, source.data, count.data)
    for to, at, size in zip(places.flat, sources.flat, counts.flat, strict=True):
        assert to % 16 == at % 16 == 0, "a copy that is not aligned"
        assert 0 <= at <= memory.size - size, "reads outside of an array"
        shared[to : to + 16] = 0
        shared[to : to + size] = memory[at : at + size]


def two_floats_stored(at: Any, first: Any, second: Any, stores: Any) -> None:
    at, first, second, stores = np.broadcast_arrays(at, first, second, stores)
    chosen = stores != 0
    both = np.stack([first[chosen], second[chosen]], -1).astype(np.float32)
    shared[at[chosen][:, None] + np.arange(8)] = both.view(np.uint8)


def four_words_stored(at: Tensor, *rest: Any) -> None:
    assert at.memory is not None
    *parts, stores = (np.broadcast_to(raw(x), at.data.shape) for x in rest)
    places, chosen = at.data, stores != 0
    assert (places % 16 == 0).all(), "a wide store that is not aligned"
    bytes_ = at.memory.reshape(-1).view(np.uint8)
    found = np.stack(parts, -1)[chosen].view(np.uint8)
    bytes_[places[chosen][:, None] + np.arange(16)] = found.reshape(-1, 16)


def sums_put(first: Any, second: Any, ends: Any, at: Any) -> tuple[Tensor, Tensor]:
    """The sums over c of two rows to memory, and zeros, in warps where a tile ends."""
    with np.errstate(invalid="ignore"):  # of steps that are not there
        rows = np.stack([first.sum(2), second.sum(2)], -1).astype(np.float32)
    for where, row in zip(
        at[ends[..., 0] != 0][:, 0], rows[ends[..., 0] != 0], strict=True
    ):
        shared[where : where + 8] = row.view(np.uint8)
    left = [np.where(ends != 0, np.float32(0), x) for x in (first, second)]
    return Tensor(left[0]), Tensor(left[1])


def from_shared(at: np.ndarray, offset: int, count: int) -> list[np.ndarray]:
    where = at.astype(np.int64) + offset
    assert (where % (4 * count) == 0).all(), "a wide load that is not aligned"
    return [
        shared[(where + 4 * i)[..., None] + np.arange(4)].view(np.uint32)[..., 0]
        for i in range(count)
    ]


def from_memory(at: Tensor, offset: int, count: int) -> tuple[Tensor, ...]:
    """Words side by side at addresses, of which all are aligned to their load."""
    assert at.memory is not None and (at.data % min(16, 4 * count) == 0).all()
    bytes_ = at.memory.reshape(-1).view(np.uint8)
    where = (at.data + offset)[..., None] + np.arange(4 * count)
    assert 0 <= where.min() and where.max() < bytes_.size, "reads outside of an array"
    found = bytes_[where].view(np.int32)
    return tuple(Tensor(found[..., i]) for i in range(count))


def assembler(text: str, constraints: str, args: list, dtype: Any, *_: Any) -> Any:
    """What each line that the kernels have does."""
    if text.startswith("mma.sync.aligned.m16n8k16"):
        return matrix_product(args)
    if m := re.fullmatch(r"prmt.b32 \$0, \$1, (\w+|\$2), (0x\w+);", text):
        other = words(args[1]) if m[1] == "$2" else np.uint32(int(m[1], 16))
        return permuted(words(args[0]), other, int(m[2], 16))
    if m := re.fullmatch(r"ld.shared.v(\d).\w+ \{[^}]*\}, \[\$\d\+(\d+)\];", text):
        kind = np.float32 if "f32" in text else np.int32
        found = from_shared(raw(args[0]), int(m[2]), int(m[1]))
        return tuple(Tensor(x.view(kind)) for x in found)
    if m := re.match(r"mma.sync.aligned.m16n8k32.row.col.s32.(\w)8.s8.s32", text):
        return whole_product(args, m[1] == "s")
    if m := re.search(r"cp.async.bulk[^$]*\[\$2\], \[\$3\], (\d+), \[\$1\]", text):
        return copied(args[1], args[2], int(m[1]), args[3])
    if re.search(r"cp.async.bulk[^$]*\[\$2\], \[\$3\], \$4, \[\$1\]", text):
        return copied(*args[1:])
    if m := re.search(r"wgmma.mma_async.sync.aligned.m64n(\d+)k16", text):
        return product_of_groups(args, int(m[1]))
    if text.startswith("wgmma.wait_group"):
        return tuple(args)
    if text.startswith("bar.sync"):
        return None
    if "mbarrier.init" in text or "mbarrier.try_wait" in text:
        return None
    if text.startswith("cp.async.cg.shared.global [$1], [$2], 16, $3;"):
        return rows_copied(*args)
    if text.startswith(("cp.async.commit_group;", "cp.async.wait_group")):
        return None
    if "@stores st.shared.v2.f32 [$1], {$2, $3};" in text:
        return two_floats_stored(*map(raw, args))
    if "shfl.sync.bfly.b32" in text and "st.shared.v2.f32" in text:
        return sums_put(*map(raw, args))
    if text.startswith("shfl.sync.idx.b32 $0, $1, $2, 0x1f"):
        number, lane = np.broadcast_arrays(raw(args[0]), raw(args[1]))
        of_warps = [a.reshape(len(a), -1) for a in (number, lane)]
        return Tensor(np.take_along_axis(*of_warps, 1).reshape(lane.shape))
    if text.startswith("shfl.sync.bfly.b32 $0, $1, 1, 0x1f"):
        return Tensor(raw(args[0])[..., [1, 0, 3, 2]])
    if "@stores st.global.v4.b32 [$1], {$2, $3, $4, $5};" in text:
        return four_words_stored(*args)
    if text.startswith("ld.relaxed.gpu.global.b32 $0, [$1];"):
        return from_memory(args[0], 0, 1)[0]
    if text.startswith("bar.warp.sync"):
        return args[0]
    if m := re.fullmatch(r"ld.shared.u16 \$0, \[\$1\+(\d+)\];", text):
        at = raw(args[0]).astype(np.int64) + int(m[1])
        return Tensor(shared[at] | shared[at + 1].astype(np.int32) << 8)
    if m := re.fullmatch(r"ld.shared.b(\d+) \$0, \[\$1\+(\d+)\];", text):
        found = from_shared(raw(args[0]), int(m[2]), int(m[1]) // 32)
        kind = np.dtype(f"int{m[1]}")
        return Tensor(np.stack(found, -1).view(kind)[..., 0])
    if "cvt.rn.f16x2.e4m3x2" in text:
        found = words(args[0])[..., None].view(ml_dtypes.float8_e4m3fn)
        pairs = found.astype(np.float16).view(np.int32)
        return Tensor(pairs[..., 0]), Tensor(pairs[..., 1])
    if text.startswith("rcp.approx.ftz.f32 $0, $1;"):
        with np.errstate(divide="ignore"):
            return Tensor(np.float32(1) / raw(args[0]))
    if text.startswith("dp4a.s32.s32 $0, $1, 0x01010101, 0;"):
        return Tensor(numbers(args[0], True).sum(-1).astype(np.int32))
    if text == "prmt.b32 $0, $1, $2, $3;":
        return permuted(words(args[0]), words(args[1]), words(args[2]))
    if loads := re.findall(r"ld.global[.\w:]*?(?:v(\d))?.b32 [^;]*\+(\d+)\];", text):
        parts = (from_memory(args[0], int(at), int(n or 1)) for n, at in loads)
        return tuple(word for part in parts for word in part)
    if m := re.search(r"low, \$1, \$2, (0x\w+);\s*prmt.b32 high, \$3, \$4, \1;", text):
        low, high = (
            permuted(words(args[i]), words(args[i + 1]), int(m[1], 16)) for i in (0, 2)
        )
        return permuted(words(low), words(high), 0x5410)
    if text.startswith("st.shared.b32 [$1], $2;"):
        at, word = np.broadcast_arrays(raw(args[0]), words(args[1]))
        shared[at[..., None] + np.arange(4)] = word[..., None] >> 8 * np.arange(4) & 255
        return args[1]
    if "st.shared.b16 [$1], l;" in text:
        at, word = np.broadcast_arrays(raw(args[0]), words(args[1]))
        shared[at[..., None] + np.arange(2)] = word[..., None] >> 8 * np.arange(2) & 255
        return args[1]
    if text.startswith("mov.b32 {$0, $1}, $2;"):
        both = words(args[0])[..., None].view(np.int16)
        return Tensor(both[..., 0]), Tensor(both[..., 1])
    if text.startswith("cvt.rn.bf16x2.f32 $0, $2, $1;"):
        return paired(raw(args[0]), raw(args[1]))
    if text.startswith("fma.rn.bf16x2 $0, $2, $3, $1;"):
        c, a, b = (halves(words(x)) for x in args)
        return paired(*(x * y + z for x, y, z in zip(a, b, c, strict=True)))
    if m := re.search(
        r"mov.b32 o, (\w+); mov.b32 n, (\w+); *fma.rn.bf16x2 \$0, \$1, o, n;", text
    ):
        o, n = (halves(np.array([int(x, 16)], np.uint32)) for x in m.groups())
        a = halves(words(args[0]))
        return paired(*(x * y + z for x, y, z in zip(a, o, n, strict=True)))
    if "global_smem" in text:
        return Tensor(np.zeros(raw(args[0]).shape, np.int32))
    if m := re.fullmatch(r"prmt.b32 \$0, \$1, (0x\w+), \$2;", text):
        return permuted(words(args[0]), np.uint32(int(m[1], 16)), words(args[1]))
    if m := re.search(r"mov.b32 l, (\w+); mov.b32 h, (\w+); prmt.b32 \$0, l, h", text):
        low, high = (np.uint32(int(x, 16)) for x in m.groups())
        return permuted(low, high, words(args[0]))
    if "mov.b32 s, 0x80808080; prmt.b32 $0, s, s, $1;" in text:
        return permuted(np.uint32(0x80808080), np.uint32(0x80808080), words(args[0]))
    if text.startswith("mov.b32 $0, $1;"):
        return args[0]
    raise NotImplementedError(text)


def exponential(x: Tensor) -> Tensor:
    with np.errstate(over="ignore"):
        return Tensor(np.exp(x.data))


def alike(x: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
    """Both, a number in the dtype of the tensor beside it."""
    tensors = [a for a in (x, y) if isinstance(a, Tensor)]
    dtype = tensors[0].data.dtype if tensors else np.int32
    return np.asarray(raw(x)).astype(dtype), np.asarray(raw(y)).astype(dtype)


def chosen(condition: Any, x: Any, y: Any) -> Tensor:
    if isinstance(x, Tensor) and x.memory is not None:
        assert x.memory is y.memory, "a choice of addresses in two arrays"
        return x.like(np.where(raw(condition), x.data, y.data))
    return Tensor(np.where(raw(condition), *alike(x, y)))


def constant(x: Any) -> Any:
    return x


class Slabs:
    """Arrays of 64 numbers a row at the start of shared memory, swizzled for wgmma."""

    def __init__(self, dtype: Any, shape: list[int], at: int = 0, turned: bool = False):
        self.dtype, self.shape, self.at, self.turned = dtype, shape, at, turned

    def index(self, i: Any) -> "Slabs":
        _, *shape = self.shape
        each = int(np.prod(shape)) * self.dtype.itemsize
        return Slabs(self.dtype, shape, self.at + int(raw(i)) * each)

    def permute(self, axes: list[int]) -> "Slabs":
        assert axes == [1, 0]
        return Slabs(self.dtype, self.shape, self.at, not self.turned)

    @property
    def places(self) -> np.ndarray:
        """`[rows, 8, 16]`: where each byte is."""
        row, chunk, byte = np.ogrid[: self.shape[0], :8, :16]
        return self.at + 128 * row + (chunk ^ row % 8) * 16 + byte

    @property
    def data(self) -> np.ndarray:
        rows = shared[self.places].reshape(self.shape[0], -1).view(self.dtype)
        return rows.T if self.turned else rows

    def put(self, rows: np.ndarray) -> None:
        shared[self.places] = rows.view(np.uint8).reshape(self.shape[0], 8, 16)


def slabs_of(dtype: DType, shape: list[int], layout: Any) -> Slabs:
    del layout
    return Slabs(dtype.numpy, shape)


def slab_copied(slab: Slabs, at: Tensor, mask: Any) -> None:
    slab.put(load(at, mask).data)


def product_of_warps(a: Tensor, b: Slabs, sums: Tensor, is_async: bool) -> Tensor:
    """wgmma, in float64 and rounded once."""
    del is_async
    wide = a.data.astype(np.float64) @ b.data.astype(np.float64)
    return Tensor((wide + sums.data).astype(np.float32))


def product_of_groups(args: list, activations: int) -> tuple[Tensor, ...]:
    """Four wgmma: words of four fragments, a descriptor of activations, the sums."""
    words_, described, sums = args[:16], raw(args[16]), args[17:]
    of_warps = described.reshape(len(described), -1)
    first = of_warps[:, 0]
    assert (of_warps == first[:, None]).all(), "a descriptor of each lane"
    assert (first >> 16 == (8 << 16) + activations).all()
    where = ((first & 0x3FFF) << 4)[:, None] + np.arange(128 * activations)
    x = shared[where].view(ml_dtypes.bfloat16).reshape(-1, 8, activations, 8)
    x = x.transpose(0, 2, 1, 3).reshape(-1, activations, 64).astype(np.float64)
    pairs = np.stack([np.stack(halves(words(w)), -1) for w in words_])
    # [fragment, half, row, warp, g, c, 2] -> [warp, row, g, fragment, half, c, 2]
    pairs = pairs.reshape(4, 2, 2, *pairs.shape[1:]).transpose(3, 2, 4, 0, 1, 5, 6)
    w = pairs.reshape(len(pairs), 16, 64).astype(np.float64)
    found = (w @ x.swapaxes(1, 2)).reshape(len(pairs), 2, 8, -1, 4, 2)
    return tuple(
        Tensor((raw(s) + found[:, i // 2 % 2, :, i // 4, :, i % 2]).astype(np.float32))
        for i, s in enumerate(sums)
    )


class Gluon(SimpleNamespace):
    """`gl` for one program of a launch."""

    def __init__(self, warps: int, place: tuple[int, ...]):
        nothing = SimpleNamespace(
            index=lambda i: SimpleNamespace(
                load=lambda layout: Tensor(np.zeros(32, np.int32))
            )
        )
        super().__init__(
            int16=INT16,
            int32=INT32,
            int64=INT64,
            float16=FLOAT16,
            float32=FLOAT32,
            bfloat16=BFLOAT16,
            constexpr=constant,
            static_range=range,
            pointer_type=PointerType,
            num_warps=lambda: warps,
            program_id=lambda axis: Tensor(np.int32(place[axis])),
            load=load,
            store=store,
            inline_asm_elementwise=assembler,
            thread_barrier=lambda: None,
            allocate_shared_memory=lambda dtype, shape, layout: (
                slabs_of(dtype, shape, layout) if len(shape) > 2 else nothing
            ),
            arange=lambda a, b, layout: Tensor(np.arange(a, b, dtype=np.int32)),
            zeros=lambda shape, dtype, layout: Tensor(np.zeros(shape, dtype.numpy)),
            full=lambda shape, x, dtype, layout: Tensor(np.full(shape, x, dtype.numpy)),
            sum=lambda x, axis: Tensor(x.data.sum(axis, dtype=x.data.dtype)),
            where=chosen,
            minimum=lambda x, y: Tensor(np.minimum(*alike(x, y))),
            maximum=lambda x, y: Tensor(np.maximum(*alike(x, y))),
            fma=fused,
            permute=lambda x, axes: Tensor(x.data.transpose(axes)),
            reshape=lambda x, shape: Tensor(x.data.reshape(shape)),
            expand_dims=lambda x, axis: x.like(np.expand_dims(x.data, axis)),
            max=lambda x, axis: Tensor(x.data.max(axis)),
            join=lambda x, y: Tensor(np.stack([x.data, y.data], -1)),
            convert_layout=lambda x, *_, **__: x,
            split=lambda x: (Tensor(x.data[..., 0]), Tensor(x.data[..., 1])),
            exp=exponential,
            rsqrt=lambda x: Tensor(np.float32(1) / np.sqrt(x.data)),
            **dict.fromkeys(
                (
                    *("BlockedLayout", "SliceLayout", "SwizzledSharedLayout"),
                    *("NVMMASharedLayout", "NVMMADistributedLayout"),
                    "DotOperandLayout",
                ),
                lambda *_: None,
            ),
        )


def fused(x: Any, y: Any, z: Any) -> Tensor:
    wide = [np.asarray(raw(a), np.float64) for a in (x, y, z)]
    # infinity times nothing, and scales of steps that are not there
    with np.errstate(invalid="ignore", over="ignore"):
        return Tensor((wide[0] * wide[1] + wide[2]).astype(np.float32))


def modules(gl: Gluon) -> Any:
    """Imports kernel files anew, with this `gl`."""
    bridge = SimpleNamespace(
        gl=gl,
        gluon_jit=constant,
        constexpr_function=constant,
        async_load=slab_copied,
        fence_async_shared=lambda: None,
        async_copy=SimpleNamespace(
            commit_group=lambda: None, wait_group=lambda others: None
        ),
        warpgroup_mma=product_of_warps,
        warpgroup_mma_wait=lambda others, deps: deps,
    )
    read: dict[str, ModuleType] = {}

    def imported(name: str, *args: Any) -> Any:
        if name == BRIDGE:
            return bridge
        if not name.startswith(KERNELS):
            return builtins.__import__(name, *args)
        if name not in read:
            spec = importlib.util.find_spec(name)
            assert spec is not None and spec.origin is not None
            module = read[name] = ModuleType(name)
            module.__dict__["__builtins__"] = {**vars(builtins), "__import__": imported}
            exec(compile(Path(spec.origin).read_text(), name, "exec"), vars(module))
        return read[name]

    return imported


def pointer(array: np.ndarray | None) -> Tensor | None:
    """An address in an array, or in the memory that `side_by_side` has made."""
    if array is None:
        return None
    memory = array.base if isinstance(array.base, Memory) else array
    start = array.ctypes.data - memory.ctypes.data
    return Tensor(np.int64(start), memory, BY_NUMPY[array.dtype])


class Memory(np.ndarray):
    """Bytes in which several arrays are."""


def side_by_side(arrays: dict[str, Any]) -> dict[str, Any]:
    """The same in one memory: a kernel that chooses between them has one address."""
    present = {n: np.asarray(a) for n, a in arrays.items() if a is not None}
    memory = Memory(sum(a.nbytes + 64 for a in present.values()), np.uint8)
    memory[...], found, at = 255, dict(arrays), 0
    for name, a in present.items():
        found[name] = np.ndarray(a.shape, a.dtype, memory, at)
        found[name][...] = a
        at += -(-a.nbytes // 16) * 16 + 16
    return found


def run(launch: Any, arrays: dict[str, np.ndarray], place: tuple[int, ...]) -> None:
    """One program of a launch; `arrays` are by the names of their pointers."""
    shared[:] = 255  # bfloat16 and float32 that are no numbers
    name = launch.kernel.__name__
    imported = modules(Gluon(launch.num_warps, place))
    module = imported(launch.kernel.__module__)
    given = {n: pointer(x) for n, x in arrays.items()}
    vars(module)[name](**given, **dict(launch.constants))


def in_lane_order(x: np.ndarray, words: int) -> np.ndarray:
    """x `[rows, columns]` as `jaxkern/triton/quant/lane_order.py` has it."""
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % (8 * words))))
    by_lane = padded.reshape(len(x), -1, 4, words, 2)
    return by_lane.swapaxes(2, 3).reshape(len(x), -1)
