"""`quantization_config` of compressed-tensors: groups of modules, each with a scheme.

| weights of a scheme | tensors of a module | kind |
|---|---|---|
| int, 4 or 8 bits in words | weight_packed, weight_shape, weight_scale | int4, int8 |
| int, 8 bits | weight (bytes), weight_scale | int8 |
| float, 8 bits | weight, weight_scale | fp8; mxfp8 where scales are powers of two |
| float, 4 bits | weight_packed, weight_scale | nvfp4, with weight_global_scale; mxfp4 |

Integers may have weight_zero_point, those in words weight_g_idx. Which module is of
which group say patterns, which are not run: of several schemes a module has the first
one that its tensors fit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from jaxkern.formats.architecture_keys import ArchitectureKeys
from jaxkern.formats.packed_matrix import (
    Arrays,
    PackedMatrix,
    codes_in_words,
    from_fp8,
    from_int8,
    from_microscaled,
    from_words,
)
from jaxkern.formats.packing import SCALES, Packing, known, names_of
from jaxkern.primitives.quant.int_tensor import IntTensor
from jaxkern.primitives.quant.quantized_tensor import QuantizedTensor

Container = Callable[[Arrays], QuantizedTensor]
FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
    *("mixed-precision", "dense"),
)
STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")
STATUSES = ("compressed", "frozen", "initialized", "calibration")
OF_SPARSITY = (  # of weights that lie dense all the same
    *("global_sparsity", "sparsity_structure", "registry_requires_subclass"),
    *("targets", "ignore"),
)
HOW_FOUND = ("observer", "scale_dtype", "zp_dtype")
POWERS_OF_TWO = {"scales": "F8_E8M0"}  # which files call U8
ORDERS = ("none", "weight", "static", "group", "dynamic")


@dataclass(frozen=True)
class Scheme:
    """How the weights of some modules are quantised.

    Attributes:
      group: weights along a row that share a scale; 0 for all of it.
      block: rows and columns that do, or None.
      whole: one scale serves the matrix.
      sorted: inputs are in groups by `weight_g_idx`.
    """

    integer: bool
    bits: int
    symmetric: bool
    group: int
    block: tuple[int, int] | None
    whole: bool
    sorted: bool


def read_compressed_tensors(keys: ArchitectureKeys, packing: Packing) -> None:
    """The packed weights of all groups."""
    known(keys, "format", *FORMATS)
    known(keys, "quantization_status", *STATUSES)
    keys.value("global_compression_ratio")
    sparsity = keys.within("sparsity_config")
    known(sparsity, "format", "dense")
    for key in OF_SPARSITY:
        sparsity.value(key)
    schemes = [scheme_of(keys, name) for name in group_names(keys)]
    if not schemes:
        raise keys.error("config_groups", "expected a scheme of weights")
    tensors = packing.folder.tensors
    for name in tensors:
        weight, _, part = name.rpartition("weight")
        if part == "_packed" or (not part and f"{name}_scale" in tensors):
            packing.add(f"{weight}weight", fitting(schemes, packing, f"{weight}weight"))
    packing.refuse(names_of(keys, "ignore"))


def group_names(keys: ArchitectureKeys) -> list[str]:
    """Of the groups, in the file's order."""
    prefix = f"{keys.arch}.config_groups."
    inside = [key for key in keys.file.metadata if key.startswith(prefix)]
    return [*dict.fromkeys(k.removeprefix(prefix).partition(".")[0] for k in inside)]


def scheme_of(keys: ArchitectureKeys, name: str) -> Scheme:
    """A group's weights; what it says of activations is passed over."""
    group = keys.within(f"config_groups.{name}")
    group.strings("targets")
    known(group, "format", *FORMATS)
    prefix = f"{keys.arch}.config_groups.{name}."
    for key in keys.file.metadata:
        inner = key.removeprefix(prefix)
        passed = inner.startswith(("input_activations.", "weights.observer_kwargs."))
        if key.startswith(prefix) and passed:
            group.value(inner)
    weights = group.within("weights")
    for key in HOW_FOUND:
        weights.value(key)
    integer = known(weights, "type", "int", "float") == "int"
    bits = weights.integer("num_bits", 8)
    if bits not in (4, 8):
        raise weights.error("num_bits", "expected 4 or 8")
    if weights.flag("dynamic", False):
        raise weights.error("dynamic", "expected scales in the file")
    size = weights.value("group_size")
    if size is not None and (type(size) is not int or (size < 1 and size != -1)):
        raise weights.error("group_size", "expected a positive integer, or -1")
    usual = {None: "tensor", -1: "channel"}.get(size, "group")
    strategy, size = weights.string("strategy", usual), max(size or 0, 0)
    if strategy not in STRATEGIES:
        raise weights.error("strategy", f"expected one of {', '.join(STRATEGIES)}")
    block = weights.value("block_structure")
    if strategy == "block":
        sized = isinstance(block, list) and [type(n) for n in block] == [int, int]
        if not sized or min(block) < 1:
            raise weights.error("block_structure", "expected two positive integers")
    if (strategy in ("group", "tensor_group")) != bool(size) and strategy != "block":
        raise weights.error("group_size", f"which {strategy} contradicts")
    order = weights.string("actorder", "none")
    if order.lower() not in ORDERS:
        raise weights.error("actorder", f"expected one of {', '.join(ORDERS)}")
    return Scheme(
        integer=integer,
        bits=bits,
        symmetric=weights.flag("symmetric", True),
        group=size,
        block=(block[0], block[1]) if strategy == "block" else None,
        whole=strategy == "tensor",
        sorted=order.lower() in ("group", "dynamic"),
    )


def fitting(schemes: list[Scheme], packing: Packing, weight: str) -> PackedMatrix:
    """The weight by the first scheme that its tensors fit; else the first error."""
    errors = []
    for scheme in schemes:
        try:
            return matrix_of(scheme, packing, weight)
        except ValueError as error:
            errors.append(error)
    raise errors[0]


def matrix_of(scheme: Scheme, packing: Packing, weight: str) -> PackedMatrix:
    """The weight by one scheme, its parts checked."""
    packed = f"{weight}_packed" in packing.folder.tensors
    if scheme.integer:
        return (in_words if packed else in_bytes)(scheme, packing, weight)
    if not scheme.symmetric:
        raise packing.folder.error(
            f"tensor {weight} is of floats with zero points, which are not read"
        )
    return (in_pairs if packed else in_floats)(scheme, packing, weight)


def in_words(scheme: Scheme, packing: Packing, weight: str) -> PackedMatrix:
    """Integers in words of 32 bits, offset by half their range."""
    shape = packing.part(f"{weight}_shape", ("I64", "I32"), (2,))
    f, d = (int(n) for n in packing.folder.view(shape))
    bits, size = scheme.bits, scheme.group or d
    if min(f, d) < 1 or max(f, d) > 2**31 or (bits == 4 and d % 2):
        raise packing.folder.error(
            f"tensor {shape} says {(f, d)}, expected positive numbers, the second even"
        )
    groups, per_word = -(-d // size), 32 // bits
    if scheme.whole or scheme.block:
        raise packing.folder.error(
            f"tensor {weight}_packed has not a scale for each row or group"
        )
    parts = {
        "words": packing.part(f"{weight}_packed", ("I32",), (f, -(-d // per_word))),
        "scales": packing.part(f"{weight}_scale", SCALES, (f, groups)),
    }
    if not scheme.symmetric:
        rows = (-(-f // per_word), groups)
        parts["zeros"] = packing.part(f"{weight}_zero_point", ("I32",), rows)
    if scheme.sorted:
        parts["g_idx"] = packing.part(f"{weight}_g_idx", ("I32", "I64"), (d,))
    container = partial(of_words, d=d, bits=bits, group_size=size)
    packing.taken.add(shape)
    return PackedMatrix((f, d), f"int{bits}", parts, container)


def of_words(arrays: Arrays, *, d: int, bits: int, group_size: int) -> IntTensor:
    zeros, groups = arrays.get("zeros"), arrays.get("g_idx")
    if zeros is not None:
        zeros = codes_in_words(zeros.T, bits)[:, : len(arrays["words"])].T
    if groups is not None and (groups == -1).all():  # never set
        groups = None
    return from_words(
        arrays["words"],
        arrays["scales"],
        zeros,
        groups,
        d=d,
        bits=bits,
        group_size=group_size,
    )


def in_bytes(scheme: Scheme, packing: Packing, weight: str) -> PackedMatrix:
    """Signed bytes, a scale for each row or for all."""
    f, d = matrix(packing, weight)
    if scheme.bits != 8 or scheme.group or scheme.block or scheme.sorted:
        raise packing.folder.error(
            f"tensor {weight} is not packed, which 4 bits and groups are"
        )
    shapes = ((1,), (1, 1), ()) if scheme.whole else ((f, 1), (f,))
    parts = {
        "weight": packing.part(weight, ("I8",), (f, d)),
        "weight_scale": packing.part(f"{weight}_scale", SCALES, *shapes),
    }
    if not scheme.symmetric:
        name = f"{weight}_zero_point"
        parts["weight_zero_point"] = packing.part(name, ("I8", *SCALES), *shapes)
    return PackedMatrix((f, d), "int8", parts, from_int8)


def in_floats(scheme: Scheme, packing: Packing, weight: str) -> PackedMatrix:
    """8-bit floats."""
    f, d = matrix(packing, weight)
    codes, scale = packing.part(weight, ("F8_E4M3",), (f, d)), f"{weight}_scale"
    if scheme.bits != 8:
        raise packing.folder.error(f"tensor {weight} is not packed, which 4 bits are")
    if scheme.group == 32 and packing.folder.tensors[scale].qtype == "U8":
        packing.part(scale, ("U8",), (f, d // 32) if d % 32 == 0 else (f, -1))
        container: Container = partial(from_microscaled, form="mxfp8")
        parts = {"codes": codes, "scales": scale}
        return PackedMatrix((f, d), "mxfp8", parts, container, POWERS_OF_TWO)
    block = scheme.block or (1, scheme.group)
    shapes = [(-(-f // block[0]), -(-d // (block[1] or d)))]
    if scheme.whole:
        block, shapes = (0, 0), [(1,), (1, 1), ()]
    scales = packing.part(scale, SCALES, *shapes)
    container = partial(from_fp8, block=block)
    parts = {"codes": codes, "scales": scales}
    return PackedMatrix((f, d), "fp8", parts, container)


def in_pairs(scheme: Scheme, packing: Packing, weight: str) -> PackedMatrix:
    """Floats of 4 bits, two in a byte, the first one low."""
    f, half = matrix(packing, f"{weight}_packed")
    d, form = 2 * half, {16: "nvfp4", 32: "mxfp4"}.get(scheme.group, "")
    if scheme.bits != 4 or not form or d % scheme.group:
        raise packing.folder.error(
            f"tensor {weight}_packed is {(f, half)}, expected 4-bit floats in whole "
            "groups of 16 or 32"
        )
    dtypes = ("F8_E4M3",) if form == "nvfp4" else ("U8", "F8_E8M0")
    groups = (f, d // scheme.group)
    parts = {
        "codes": packing.part(f"{weight}_packed", ("U8",), (f, half)),
        "scales": packing.part(f"{weight}_scale", dtypes, groups),
    }
    if form == "nvfp4":
        name = f"{weight}_global_scale"
        parts["divisor"] = packing.part(name, ("F32",), (1,), ())
    means = {} if form == "nvfp4" else POWERS_OF_TWO
    container = partial(from_microscaled, form=form)
    return PackedMatrix((f, d), form, parts, container, means)


def matrix(packing: Packing, name: str) -> tuple[int, int]:
    """The shape of a tensor, which must be a matrix."""
    info = packing.folder.tensors[name]
    if len(info.shape) != 2 or 0 in info.shape:
        raise packing.folder.error(
            f"tensor {name} is {info.qtype} {info.shape}, expected a matrix"
        )
    return info.shape
