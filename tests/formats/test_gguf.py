"""gguf: what the `gguf` package writes is read; what is broken is refused in words."""

import random
import struct
import sys
import tracemalloc
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import GGUFTensor, dequantize
from jaxkern.formats.gguf import GGUFError, read_gguf
from tests.primitives.quant.block_bytes import QTYPES, decoded, random_blocks

METADATA = {
    "uint8": 200,
    "int8": -100,
    "uint16": 60000,
    "int16": -30000,
    "uint32": 4000000000,
    "int32": -2000000000,
    "uint64": 2**63 + 1,
    "int64": -(2**62),
    "float32": 0.5,
    "float64": 0.1,
    "bool": True,
    "string": "déjà vu",
}


def write(path: Path, tensors: dict[str, np.ndarray], **types: str) -> Path:
    """A file with every kind of metadata; `types` names block formats of tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    for kind, value in METADATA.items():
        getattr(writer, f"add_{kind}")(f"test.{kind}", value)
    writer.add_array("test.strings", ["a", "", "ccc"])
    writer.add_array("test.floats", [1.5, -2.5])
    writer.add_array("test.bools", [True, False])
    for name, array in tensors.items():
        qtype = types.get(name)
        raw = None if qtype is None else gguf.GGMLQuantizationType[qtype]
        writer.add_tensor(name, array, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    rng = np.random.default_rng(0)
    tensors = {
        "norm": rng.standard_normal(7).astype(np.float32),
        "half": rng.standard_normal((3, 5)).astype(np.float16),
        "matrix": random_blocks("Q4_K", 3, 512),
        "experts": random_blocks("Q8_0", 2, 3, 64),
    }
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    return write(path, tensors, matrix="Q4_K", experts="Q8_0")


def header(
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_tensors: int | None = None,
    n_pairs: int | None = None,
    pairs: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    weights: int = 256,
) -> bytes:
    """A file by hand, with whatever is to be wrong about it."""
    counts = [
        len(tensors) if n_tensors is None else n_tensors,
        len(pairs) if n_pairs is None else n_pairs,
    ]
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(pairs + tensors)
    return head + bytes(-len(head) % 32) + bytes(weights)


def string(text: str | bytes) -> bytes:
    text = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(text)) + text


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def tensor(name="w", dims=(8,), kind=0, offset=0, n_dims=None) -> bytes:
    n_dims = len(dims) if n_dims is None else n_dims
    shape = struct.pack(f"<I{len(dims)}Q", n_dims, *dims)
    return string(name) + shape + struct.pack("<IQ", kind, offset)


def array(kind: int, n: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, n) + items


def test_metadata(file):
    metadata = read_gguf(file).metadata
    for kind, value in METADATA.items():
        assert metadata[f"test.{kind}"] == value, kind
        assert type(metadata[f"test.{kind}"]) is type(value), kind
    assert metadata["test.strings"] == ["a", "", "ccc"]
    np.testing.assert_array_equal(metadata["test.floats"], [1.5, -2.5])
    np.testing.assert_array_equal(metadata["test.bools"], [True, False])
    assert not metadata["test.floats"].flags.writeable


def test_tensor_infos_are_those_of_the_gguf_package(file):
    ours, theirs = read_gguf(file), gguf.GGUFReader(file)
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for t in theirs.tensors:
        info = ours.tensors[t.name]
        assert info.shape == tuple(int(n) for n in reversed(t.shape))
        assert (info.qtype, info.size) == (t.tensor_type.name, t.n_elements)
        assert (info.offset, info.nbytes) == (t.data_offset, t.n_bytes)
        view = ours.view(t.name)
        np.testing.assert_array_equal(view.view(np.uint8), t.data.view(np.uint8))


def test_architecture(file):
    assert read_gguf(file).architecture == "llama"


def test_load(file):
    ours, theirs = read_gguf(file), gguf.GGUFReader(file)
    raw = {t.name: t.data for t in theirs.tensors}
    norm, half, experts = (ours.load(n) for n in ("norm", "half", "experts"))
    assert isinstance(norm, jax.Array) and norm.dtype == jnp.float32
    np.testing.assert_array_equal(norm, raw["norm"])
    assert isinstance(half, jax.Array) and half.dtype == jnp.float16
    np.testing.assert_array_equal(half, raw["half"])
    assert isinstance(experts, GGUFTensor) and experts.shape == (2, 3, 64)
    np.testing.assert_array_equal(
        dequantize(experts), decoded(raw["experts"], "Q8_0").reshape(2, 3, 64)
    )


@pytest.mark.parametrize("qtype", QTYPES)
def test_every_format_round_trips(tmp_path, qtype):
    blocks = random_blocks(qtype, 2, 256)
    path = write(tmp_path / "one.gguf", {"w": blocks}, w=qtype)
    w = read_gguf(path).load("w")
    values = dequantize(w) if isinstance(w, GGUFTensor) else w
    np.testing.assert_array_equal(
        np.asarray(values).astype(np.float32), decoded(blocks, qtype)
    )


def test_a_view_copies_nothing(file):
    ours = read_gguf(file)
    a, b = ours.view("matrix"), ours.view("matrix")
    assert np.shares_memory(a, b) and not a.flags.writeable


def test_loading_on_a_device(file):
    device = jax.devices()[-1]
    w = read_gguf(file).load("matrix", device=device)
    assert isinstance(w, GGUFTensor) and w.blocks.devices() == {device}


UINT8, UINT32, BOOL, STRING, ARRAY = 0, 4, 7, 8, 9
BROKEN = {
    "magic": (header(magic=b"GGML"), r"magic is b'GGML', expected b'GGUF'"),
    "short": (b"GG", r"magic at byte 0 needs 4 bytes, the file has 2 left"),
    "version": (header(version=1), r"version is 1, expected one of \(2, 3\)"),
    "big endian": (header(version=3 << 24), r"big-endian, expected little-endian"),
    "tensor count": (header(n_tensors=2**60), r"tensor count is 1152\d+, expected at"),
    "key count": (header(n_pairs=2**63), r"key count is 9223\d+, expected at most"),
    # The counts above are absurd by any least size: these two are one too many.
    "one key too many": (
        header(n_pairs=9, pairs=(bytes(8 * 13),), weights=0),
        r"key count is 9, expected at most 8 in the 104 bytes",
    ),
    "one tensor too many": (
        header(n_tensors=2, pairs=(bytes(40),), weights=0),
        r"tensor count is 2, expected at most 1 in the 48 bytes",
    ),
    "key length": (
        header(pairs=(struct.pack("<Q", 2**62) + bytes(20),)),
        r"length of key 0 is 4611\d+, expected at most",
    ),
    "key encoding": (
        header(pairs=(pair(b"\xff", UINT8, b"\0"),)),
        r"key 0 at byte 32 is not UTF-8",
    ),
    "duplicate key": (
        header(pairs=(pair("a", UINT8, b"\0"), pair("a", UINT8, b"\0"))),
        r"key 'a' occurs twice",
    ),
    "value type": (
        header(pairs=(pair("a", 13, b"\0"),)),
        r"type of key 'a' is 13, expected 0 to 12",
    ),
    "string length": (
        header(pairs=(pair("a", STRING, struct.pack("<Q", 2**40)),)),
        r"length of key 'a' is 1099511627776, expected at most",
    ),
    "array length": (
        header(pairs=(pair("a", ARRAY, array(UINT32, 2**62)),)),
        r"length of key 'a' is 4611\d+, expected at most",
    ),
    "string array length": (
        header(pairs=(pair("a", ARRAY, array(STRING, 100)),)),
        r"length of key 'a' is 100, expected at most",
    ),
    "array item type": (
        header(pairs=(pair("a", ARRAY, array(77, 1)),)),
        r"item type of key 'a' is 77",
    ),
    "array of arrays": (
        header(pairs=(pair("a", ARRAY, array(ARRAY, 1, array(UINT8, 0))),)),
        r"key 'a' is an array of arrays, expected a flat array",
    ),
    "alignment zero": (
        header(pairs=(pair("general.alignment", UINT32, bytes(4)),)),
        r"general.alignment is 0, expected a power of two",
    ),
    "alignment odd": (
        header(pairs=(pair("general.alignment", UINT32, struct.pack("<I", 48)),)),
        r"general.alignment is 48, expected a power of two",
    ),
    "alignment type": (
        header(pairs=(pair("general.alignment", BOOL, b"\1"),)),
        r"general.alignment is True, expected a power of two",
    ),
    "duplicate tensor": (
        header(tensors=(tensor("w"), tensor("w", offset=32))),
        r"tensor 'w' occurs twice",
    ),
    "no dims": (
        header(tensors=(tensor(dims=()), bytes(32))),
        r"number of dims of tensor 'w' is 0, expected 1 to 4",
    ),
    "five dims": (
        header(tensors=(tensor(dims=(1,) * 5),)),
        r"number of dims of tensor 'w' is 5, expected 1 to 4",
    ),
    "zero dim": (
        header(tensors=(tensor(dims=(8, 0)),)),
        r"dims of tensor 'w' are \[8, 0\], expected no zero",
    ),
    "product of dims": (
        header(tensors=(tensor(dims=(2**32, 2**32)),)),
        r"tensor 'w' ends at byte \d{20,}, the file has only \d+",
    ),
    "tensor type": (
        header(tensors=(tensor(kind=99),)),
        r"type of tensor 'w' is 99, expected a ggml type",
    ),
    "row length": (
        header(tensors=(tensor(dims=(48, 2), kind=2),)),
        r"row length of tensor 'w' is 48, expected a multiple of the 32 elements",
    ),
    "unaligned": (
        header(tensors=(tensor(offset=8),)),
        r"offset of tensor 'w' is 8, expected a multiple of 32",
    ),
    "out of range": (
        header(tensors=(tensor(offset=2**40),)),
        r"tensor 'w' ends at byte 1099\d+, the file has only",
    ),
    "truncated": (
        header(tensors=(tensor(dims=(65,)),)),
        r"tensor 'w' ends at byte \d+, the file has only \d+: it is truncated",
    ),
    "overlap": (
        header(tensors=(tensor("a", dims=(16,)), tensor("b", offset=32))),
        r"'b' starts at byte \d+, expected at \d+ or later, where tensor 'a' ends",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_file(tmp_path, name):
    content, message = BROKEN[name]
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(GGUFError, match=message) as raised:
        read_gguf(path)
    assert str(raised.value).startswith(f"{path}: ")


def test_empty_file_and_missing_file(tmp_path):
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(GGUFError, match="is empty, expected a GGUF file"):
        read_gguf(tmp_path / "empty.gguf")
    with pytest.raises(FileNotFoundError):
        read_gguf(tmp_path / "missing.gguf")


def test_every_truncation_is_refused(file, tmp_path):
    content = file.read_bytes()
    path = tmp_path / "cut.gguf"
    end = max(i.offset + i.nbytes for i in read_gguf(file).tensors.values())
    for size in [*range(1, 1200, 7), end - 1]:
        path.write_bytes(content[:size])
        with pytest.raises(GGUFError):
            read_gguf(path)


def test_a_hand_written_file_is_right(tmp_path):
    """The builder of broken files builds sound ones too."""
    path = tmp_path / "fine.gguf"
    align = pair("general.alignment", UINT32, struct.pack("<I", 64))
    content = header(
        version=2,
        pairs=(align, pair("a", ARRAY, array(UINT8, 0))),
        tensors=(tensor("b", (4, 8), offset=64), tensor("a", (16,))),
    )
    path.write_bytes(content + bytes(64))
    ours = read_gguf(path)
    assert ours.version == 2 and ours.tensors["b"].shape == (8, 4)
    assert ours.tensors["a"].offset % 64 == 0
    with pytest.raises(GGUFError, match=r"general.architecture is None, expected a"):
        _ = ours.architecture


def test_a_type_without_decoder_is_refused_when_loaded(tmp_path):
    path = tmp_path / "q8_1.gguf"
    path.write_bytes(header(tensors=(tensor(dims=(256,), kind=9),), weights=512))
    ours = read_gguf(path)
    assert ours.tensors["w"].qtype == "Q8_1"
    with pytest.raises(GGUFError, match="tensor w has type Q8_1, expected one"):
        ours.load("w")
    with pytest.raises(GGUFError, match="has no tensor 'v' among its 1"):
        ours.load("v")


SPLIT = {"split.no": 2, "split.count": 2, "split.tensors.count": 5}  # type codes


def write_parts(folder: Path, count: int = 3) -> list[Path]:
    """Two tensors in each part; every part says which one it is."""
    paths = [folder / f"m-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
    for i, path in enumerate(paths):
        values = {"split.no": i, "split.count": count, "split.tensors.count": 2 * count}
        pairs = [
            pair(key, SPLIT[key], struct.pack("<H" if SPLIT[key] == 2 else "<i", value))
            for key, value in values.items()
        ]
        architecture = pair("general.architecture", STRING, string("llama"))
        name = pair("general.name", STRING, string(f"part {i}"))
        tensors = (tensor(f"a{i}"), tensor(f"b{i}", offset=32))
        content = header(pairs=(*pairs, architecture, name), tensors=tensors, weights=0)
        rows = np.arange(16, dtype=np.float32) + 100 * i
        path.write_bytes(content + rows.tobytes())
    return paths


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_split_file(tmp_path, opened):
    """The parts as one file. Before, a part passed for a file that lacks tensors."""
    paths = write_parts(tmp_path)
    file = read_gguf(paths[opened])
    assert file.metadata["general.name"] == "part 0" and file.path == str(paths[0])
    assert list(file.tensors) == ["a0", "b0", "a1", "b1", "a2", "b2"]
    for i in range(3):
        for j, name in enumerate("ab"):
            expected = np.arange(8) + 100 * i + 8 * j
            np.testing.assert_array_equal(file.view(f"{name}{i}"), expected)
            np.testing.assert_array_equal(file.load(f"{name}{i}"), expected)
    file.forget("b2")
    assert file.nbytes == sum(path.stat().st_size for path in paths)


def test_split_file_refusals(tmp_path):
    first, second, third = write_parts(tmp_path)
    third.rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(
        GGUFError, match=r"part 1 of a model split in 3, of which .*3-of"
    ):
        read_gguf(first)
    with pytest.raises(GGUFError, match=r"part 3 .* name that ends in -00003-of-00003"):
        read_gguf(tmp_path / "elsewhere.gguf")
    third.write_bytes(second.read_bytes())
    with pytest.raises(GGUFError, match="says it is part 2 of 3, expected 3 of 3"):
        read_gguf(first)
    content = (tmp_path / "elsewhere.gguf").read_bytes()
    third.write_bytes(content.replace(b"a2", b"a1"))
    with pytest.raises(GGUFError, match="tensor 'a1' occurs in two parts"):
        read_gguf(first)
    third.write_bytes(content)
    six, seven = struct.pack("<i", 6), struct.pack("<i", 7)
    first.write_bytes(first.read_bytes().replace(six, seven, 1))
    with pytest.raises(GGUFError, match="the parts have 6 tensors, expected 7"):
        read_gguf(first)
    count = pair("split.count", UINT32, struct.pack("<I", 2**32 - 1))
    path = tmp_path / "m-00001-of-99999.gguf"
    path.write_bytes(header(pairs=(count, pair("split.no", UINT8, b"\0"))))
    with pytest.raises(GGUFError, match="split in 4294967295, expected a name"):
        read_gguf(path)


def calls_to_read(path: Path) -> int:
    """Python functions that `read_gguf` calls: its time, without a clock."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        read_gguf(path)
    finally:
        sys.setprofile(None)
    return calls


def test_time_per_tensor(tmp_path):
    """Linear, and no more than a few steps each.

    The largest header of the other tests has four tensors, where it does not show that
    the set of all types is built anew for each.
    """
    calls = {}
    for n in (200, 800):
        path = tmp_path / f"{n}.gguf"
        tensors = tuple(tensor(f"t{i}", offset=32 * i) for i in range(n))
        pairs = tuple(pair(f"k{i}", UINT8, b"\0") for i in range(n))
        path.write_bytes(header(pairs=pairs, tensors=tensors, weights=32 * n))
        calls[n] = calls_to_read(path)
    assert calls[800] < 4.2 * calls[200]
    assert calls[800] < 60 * 800


INTERESTING = [0, 1, 2, 7, 8, 9, 13, 31, 255, 2**15, 2**31, 2**32 - 1, 2**63, 2**64 - 1]


def mutated(content: bytes, rng: random.Random, header_bytes: int) -> bytes:
    """The file with one to three fields of its header damaged."""
    out = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(header_bytes)
        match rng.randrange(5):
            case 0:
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                width = rng.choice([1, 2, 4, 8])
                value = rng.choice(INTERESTING) % 2 ** (8 * width)
                out[at : at + width] = value.to_bytes(width, "little")
            case 2:
                del out[at : at + rng.randint(1, 16)]
            case 3:
                out[at:at] = rng.randbytes(rng.randint(1, 16))
            case 4:
                source = rng.randrange(header_bytes)
                out[at : at + 8] = out[source : source + 8]
    return bytes(out[: rng.randrange(len(out)) if rng.random() < 0.1 else None])


def fuzz(file: Path, path: Path, seeds: range) -> tuple[int, int]:
    """(files read, files refused); anything but a parse or a GGUFError propagates."""
    content = file.read_bytes()
    end = min(i.offset for i in read_gguf(file).tensors.values())
    read = refused = 0
    tracemalloc.start()
    try:
        for seed in seeds:
            path.write_bytes(mutated(content, random.Random(seed), end))
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                ours = read_gguf(path)
                for name, info in ours.tensors.items():
                    assert info.offset + info.nbytes <= path.stat().st_size, seed
                    view = ours._bytes[info.offset : info.offset + info.nbytes]
                    assert view.size == info.nbytes, (seed, name)
                read += 1
            except GGUFError as error:
                assert str(error).startswith(f"{path}: "), seed
                refused += 1
            peak = tracemalloc.get_traced_memory()[1] - before
            assert peak < 2**20, (seed, peak)
    finally:
        tracemalloc.stop()
    return read, refused


def test_fuzz(file, tmp_path):
    read, refused = fuzz(file, tmp_path / "fuzzed.gguf", range(3000))
    assert read > 100 and refused > 1000  # both outcomes are really met


@pytest.mark.full
def test_fuzz_long(file, tmp_path):
    fuzz(file, tmp_path / "fuzzed.gguf", range(3000, 60_000))
