"""Packed weights of folders against their formats in NumPy; damaged ones are refused.

Each folder here has one packed module. tests/models/test_quantized_folders.py reads
whole models, with the layouts that the makers' own programs write.
"""

import json
import re
import struct

import ml_dtypes
import numpy as np
import pytest

from jaxkern import dequantize
from jaxkern.formats.safetensors import SafetensorsError, read_safetensors_folder
from jaxkern.primitives.quant.nf4_tensor import LEVELS

RNG = np.random.default_rng(0)
F, D = 24, 96
DTYPES = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(ml_dtypes.float8_e8m0fnu): "F8_E8M0",
    np.dtype(np.uint8): "U8",
    np.dtype(np.int8): "I8",
    np.dtype(np.int32): "I32",
    np.dtype(np.int64): "I64",
}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = np.concatenate([E2M1, -E2M1])


def write_folder(path, said, tensors):
    """A folder with these tensors, those of the module `m` but for the last ones."""
    path.mkdir(exist_ok=True)
    config = {"model_type": "llama", "quantization_config": said}
    (path / "config.json").write_text(json.dumps(config))
    entries, content = {}, b""
    for name, x in tensors.items():
        x = np.asarray(x)
        end = len(content) + x.nbytes
        entries[f"m.{name}"] = {
            "dtype": DTYPES[x.dtype],
            "shape": x.shape,
            "data_offsets": [len(content), end],
        }
        content += x.tobytes()
    header = json.dumps(entries).encode()
    file = path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + content)
    return path


def words(codes, bits=4):
    """`[r, c]` as `[r, ceil(c bits / 32)]`, the first code lowest."""
    per_word = 32 // bits
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % per_word)))
    parts = codes.reshape(len(codes), -1, per_word).astype(np.uint64)
    shifts = bits * np.arange(per_word, dtype=np.uint64)
    return (parts << shifts).sum(-1).astype(np.uint32).view(np.int32)


def codes_of(bits, shape=(F, D)):
    return RNG.integers(0, 2**bits, shape)


def scales_of(*shape, dtype=np.float32):
    return RNG.uniform(0.01, 0.1, shape).astype(dtype)


def float8(shape=(F, D)):
    return RNG.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)


def by_column(x, size):
    """Numbers of groups `[f, g]` for each of D columns."""
    return np.repeat(np.float64(x), size, axis=1)[:, :D]


def scheme(**weights):
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "ignore": ["lm_head", "re:.*(a+)+$"],
        "sparsity_config": {"format": "dense", "global_sparsity": 0.1, "targets": []},
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def fp8(block=(16, 32), scale=np.float32, experts=()):
    codes = float8((*experts, F, D))
    scales = scales_of(*experts, -(-F // block[0]), -(-D // block[1])).astype(scale)
    w = np.float64(scales).repeat(block[0], -2)[..., :F, :].repeat(block[1], -1)
    said = {"quant_method": "fp8", "weight_block_size": block, "scale_fmt": "ue8m0"}
    tensors = {"weight": codes, "weight_scale_inv": scales}
    return said, tensors, np.float64(codes) * w[..., :D], "fp8"


def fp8_whole():
    codes, scale = float8(), np.array(0.03, ml_dtypes.bfloat16)
    said = {"quant_method": "fp8", "activation_scheme": "static"}
    tensors = {"weight": codes, "weight_scale": scale, "activation_scale": scale}
    return said, tensors, np.float64(codes) * np.float64(scale), "fp8"


def gptq(bits=4, size=32, version=1, order=None):
    codes, groups = codes_of(bits), -(-D // (size if size > 0 else D))
    zeros, scales = codes_of(bits, (groups, F)), scales_of(groups, F)
    index = np.arange(D) // (size if size > 0 else D)
    index = index if order is None else index[order]
    stored = (zeros - (version == 1)) % 2**bits
    tensors = {
        "qweight": words(codes, bits).T,
        "qzeros": words(stored, bits),
        "scales": scales,
        "g_idx": index.astype(np.int32),
    }
    tensors["qweight"] = words(codes, bits).T.copy()
    said = {"quant_method": "gptq", "bits": bits, "group_size": size}
    said["checkpoint_format"] = "gptq" if version == 1 else "gptq_v2"
    w = (codes - zeros[index].T) * np.float64(scales[index].T)
    return said, tensors, w, f"int{bits}"


def awq():
    codes, zeros = codes_of(4, (D, F)), codes_of(4, (3, F))
    scales = scales_of(3, F, dtype=np.float16)

    def eights(x):  # nibble i of a word is the output AWQ_ORDER[i] of eight
        by_eight = x.reshape(len(x), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        return words(by_eight.reshape(x.shape))

    tensors = {"qweight": eights(codes), "qzeros": eights(zeros), "scales": scales}
    said = {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM"}
    each = (np.float64(x).repeat(32, axis=0) for x in (zeros, scales))
    zero, scale = each
    return said, tensors, ((codes - zero) * scale).T, "int4"


def int_words(bits=4, size=32, symmetric=True, order=None):
    codes, groups = codes_of(bits, (F - 1, D)), -(-D // (size or D))
    scales = scales_of(F - 1, groups, dtype=ml_dtypes.bfloat16)
    zeros = np.full((F - 1, groups), 2 ** (bits - 1))
    tensors = {
        "weight_packed": words(codes, bits),
        "weight_shape": np.array([F - 1, D]),
        "weight_scale": scales,
    }
    said = {"num_bits": bits, "type": "int", "symmetric": symmetric}
    said |= {"strategy": "group", "group_size": size} if size else {}
    said |= {} if size else {"strategy": "channel"}
    if not symmetric:
        zeros = codes_of(bits, zeros.shape)
        tensors["weight_zero_point"] = words(zeros.T, bits).T.copy()
    index = np.arange(D) // (size or D)
    if order is not None:
        index = index[order]
        tensors["weight_g_idx"] = index.astype(np.int32)
        said["actorder"] = "group"
    w = (codes - zeros[:, index]) * np.float64(scales)[:, index]
    return scheme(**said), tensors, w, f"int{bits}"


def int_bytes(strategy="channel", symmetric=True):
    codes = RNG.integers(-128, 128, (F, D)).astype(np.int8)
    rows = F if strategy == "channel" else 1
    scales, zeros = scales_of(rows, 1), RNG.integers(-9, 9, (rows, 1)).astype(np.int8)
    tensors = {"weight": codes, "weight_scale": scales, "input_scale": scales[:1]}
    if not symmetric:
        tensors["weight_zero_point"] = zeros
    said = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": strategy}
    w = (np.float64(codes) - (0 if symmetric else zeros)) * scales
    return scheme(**said), tensors, w, "int8"


def floats(**strategy):
    codes, size = float8(), strategy.get("group_size", D)
    shape = {"tensor": (1,), "channel": (F, 1), "group": (F, 3), "block": (2, 3)}
    scales = scales_of(*shape[strategy["strategy"]])
    each = scales
    if strategy["strategy"] in ("group", "block"):
        each = by_column(scales, size if "group_size" in strategy else 32)
        each = each if len(each) == F else each.repeat(16, axis=0)[:F]
    said = scheme(num_bits=8, type="float", **strategy)
    tensors = {"weight": codes, "weight_scale": scales}
    return said, tensors, np.float64(codes) * each, "fp8"


def fp4(form):
    codes, size = codes_of(4), 16 if form == "nvfp4" else 32
    pairs = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
    tensors = {"weight_packed": pairs}
    said = {"num_bits": 4, "type": "float", "group_size": size}
    if form == "nvfp4":
        tensors["weight_scale"] = (scales_of(F, D // size) * 900).astype(
            ml_dtypes.float8_e4m3fn
        )
        tensors["weight_global_scale"] = np.array([900.0], np.float32)
        scales = np.float64(tensors["weight_scale"]) / 900
        said["strategy"] = "tensor_group"
    else:
        tensors["weight_scale"] = RNG.integers(120, 126, (F, 3)).astype(np.uint8)
        scales = np.exp2(np.float64(tensors["weight_scale"]) - 127)
        said["strategy"] = "group"
    return scheme(**said), tensors, E2M1[codes] * by_column(scales, size), form


def mxfp8():
    codes, scales = float8(), RNG.integers(120, 126, (F, 3)).astype(np.uint8)
    said = scheme(num_bits=8, type="float", group_size=32, strategy="group")
    w = np.float64(codes) * by_column(np.exp2(np.float64(scales) - 127), 32)
    return said, {"weight": codes, "weight_scale": scales}, w, "mxfp8"


def nf4():
    """Without the values of nested scales, of which the golden folder has some."""
    d, levels = 128, np.array(LEVELS, np.float32)
    codes, absmax = codes_of(4, (F, d)), scales_of(F * 2)
    pairs = (codes[:, 0::2] << 4 | codes[:, 1::2]).astype(np.uint8)
    state = {"quant_type": "nf4", "blocksize": 64, "shape": [F, d], "dtype": "float16"}
    name = "weight.quant_state.bitsandbytes__nf4"
    tensors = {
        "weight": pairs.reshape(-1, 1),
        "weight.absmax": absmax,
        "weight.quant_map": levels,
        name: np.frombuffer(json.dumps(state).encode(), np.uint8),
    }
    said = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    said |= {"bnb_4bit_quant_type": "nf4", "llm_int8_skip_modules": ["lm_head"]}
    w = levels[codes].reshape(F, 2, 64) * np.float64(absmax).reshape(F, 2, 1)
    return said, tensors, w.reshape(F, d), "nf4"


SHUFFLED = RNG.permutation(D)
CASES = {
    "fp8": fp8(),
    "fp8_bf16_scales": fp8(scale=ml_dtypes.bfloat16),
    "fp8_power_scales": fp8(scale=ml_dtypes.float8_e8m0fnu),
    "fp8_experts": fp8(experts=(2,)),
    "fp8_whole": fp8_whole(),
    "gptq": gptq(),
    "gptq_v2": gptq(version=2),
    "gptq_8": gptq(bits=8),
    "gptq_rows": gptq(size=-1),
    "gptq_order": gptq(order=SHUFFLED),
    "awq": awq(),
    "words": int_words(),
    "words_zeros": int_words(symmetric=False),
    "words_8": int_words(bits=8, symmetric=False),
    "words_rows": int_words(size=None),
    "words_order": int_words(symmetric=False, order=SHUFFLED),
    "bytes": int_bytes(),
    "bytes_zeros": int_bytes(symmetric=False),
    "bytes_whole": int_bytes("tensor"),
    "floats": floats(strategy="channel"),
    "floats_whole": floats(strategy="tensor"),
    "floats_groups": floats(strategy="group", group_size=32),
    "floats_blocks": floats(strategy="block", block_structure=[16, 32]),
    "nvfp4": fp4("nvfp4"),
    "mxfp4": fp4("mxfp4"),
    "mxfp8": mxfp8(),
    "nf4": nf4(),
}


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_the_format(name, tmp_path):
    said, tensors, expected, kind = CASES[name]
    folder = read_safetensors_folder(write_folder(tmp_path, said, tensors))
    assert {n: (t.qtype, t.shape) for n, t in folder.tensors.items()} == {
        "m.weight": (kind, expected.shape)
    }
    stored = sum(np.asarray(x).nbytes for x in tensors.values())
    assert 0 < folder.tensors["m.weight"].nbytes <= stored
    assert not [key for key in folder.metadata if "quantization" in key]
    w = folder.load("m.weight")
    assert w.shape == expected.shape
    found = np.asarray(dequantize(w))
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-7 * scale)
    with pytest.raises(SafetensorsError, match=r"m.weight is packed: it has no array"):
        folder.view("m.weight")


def changed(case, said=None, **tensors):
    """The case with other keys or tensors; None leaves one out."""
    old_said, old, *_ = CASES[case]
    new = {n: x for n, x in {**old, **tensors}.items() if x is not None}
    return {**old_said, **(said or {})}, new


def in_group(case, **weights):
    """The case with other keys of its scheme."""
    (group,) = CASES[case][0]["config_groups"].values()
    group = {**group, "weights": {**group["weights"], **weights}}
    return changed(case, {"config_groups": {"group_0": group}})


def with_state(content):
    """The folder of bitsandbytes with these bytes as its quant state."""
    name = "weight.quant_state.bitsandbytes__nf4"
    return changed("nf4", **{name: np.frombuffer(content, np.uint8)})


FEWER = np.ones((F, 2), np.float32)
HOSTILE = {
    "another method": (changed("awq", {"quant_method": "hqq"}), "'hqq', known are fp8"),
    "no string": (changed("awq", {"quant_method": 3}), "is 3, known are fp8"),
    "stranger": (changed("awq", {"rotation": "hadamard"}), "rotation is 'hadamard'"),
    "fp8 stranger": (changed("fp8", {"w_bit": 8}), "w_bit is 8, which the model"),
    "fp8 block": (changed("fp8", {"weight_block_size": [0, 32]}), "two positive"),
    "fp8 no block": (changed("fp8", {"weight_block_size": "all"}), "two positive"),
    "fp8 format": (changed("fp8", {"fmt": "e5m2"}), "'e5m2', expected e4m3"),
    "fp8 no scale": (changed("fp8", weight_scale_inv=None), "with 0 of m.weight_scale"),
    "fp8 two scales": (changed("fp8", weight_scale=FEWER), "with 2 of m.weight_scale"),
    "fp8 scales": (
        changed("fp8", weight_scale_inv=FEWER),
        r"weight_scale_inv is F32 \(24, 2\), expected F32 or BF16 or .* \(2, 3\) by",
    ),
    "fp8 integers": (
        changed("fp8", weight_scale_inv=np.ones((2, 3), np.int32)),
        "weight_scale_inv is I32",
    ),
    "fp8 vector": (changed("fp8", weight=float8((F,))), r"8-bit floats \(24,\)"),
    "fp8 left": (
        changed("fp8", {"modules_to_not_convert": ["lm_head", "m"]}),
        "leaves m as it is, but tensor m.weight is packed",
    ),
    "gptq bits": (changed("gptq", {"bits": 3}), "bits is 3, expected 4 or 8"),
    "gptq other bits": (changed("gptq", {"bits": 8}), r"\(12, 24\)|\(24, 12\)|qzeros"),
    "gptq no bits": (changed("gptq", {"bits": None}), "has no key .*bits"),
    "gptq groups": (changed("gptq", {"group_size": 0}), "group_size is 0, expected a"),
    "gptq other groups": (changed("gptq", {"group_size": 16}), "expected I32 .6, 3."),
    "gptq form": (changed("gptq", {"checkpoint_format": "marlin"}), "expected gptq or"),
    "gptq by rules": (changed("gptq", {"dynamic": {"a": {"bits": 8}}}), "dynamic.a"),
    "gptq no scales": (changed("gptq", scales=None), "has no tensor m.scales, of a"),
    "gptq no zeros": (changed("gptq", qzeros=None), "has no tensor m.qzeros"),
    "gptq no order": (changed("gptq", {"desc_act": True}, g_idx=None), "m.g_idx"),
    "gptq twice": (changed("gptq", weight=FEWER), "m.weight is there packed and as"),
    "gptq odd outputs": (
        changed("gptq", qweight=np.ones((12, 20), "i"), scales=np.ones((3, 20), "f")),
        "has 20 outputs, expected a multiple of 8",
    ),
    "gptq cube": (changed("gptq", qweight=np.ones((2, 2, 2), np.int32)), "a matrix"),
    "awq version": (changed("awq", {"version": "gemv"}), "'gemv', expected gemm"),
    "awq no zeros": (changed("awq", {"zero_point": False}), "expected true"),
    "awq scales": (changed("awq", scales=FEWER), r"m.scales is F32 \(24, 2\), expec"),
    "awq bits": (changed("awq", {"w_bit": 8}), "w_bit is 8, expected 4"),
    "words shape": (
        changed("words", weight_shape=np.array([F - 1, -D])),
        r"m.weight_shape says \(23, -96\)",
    ),
    "words other shape": (
        changed("words", weight_shape=np.array([F - 1, 2 * D])),
        r"m.weight_packed is I32 \(23, 12\), expected I32 \(23, 24\)",
    ),
    "words no shape": (changed("words", weight_shape=None), "no tensor m.weight_shape"),
    "words no scale": (changed("words", weight_scale=None), "no tensor m.weight_scale"),
    "words zeros": (in_group("words", symmetric=False), "m.weight_zero_point"),
    "words order": (in_group("words", actorder="group"), "no tensor m.weight_g_idx"),
    "words orders": (in_group("words", actorder="spiral"), "'spiral', expected one"),
    "words bits": (in_group("words", num_bits=3), "num_bits is 3, expected 4 or 8"),
    "words whole": (
        in_group("words_rows", strategy="tensor"),
        "has not a scale for each row",
    ),
    "words groups": (in_group("words", group_size=0), "group_size is 0, expected"),
    "words stranger": (in_group("words", rank=8), "weights.rank is 8, which"),
    "words traced": (in_group("words", dynamic=True), "dynamic is True, expected"),
    "contradiction": (in_group("words", strategy="channel"), "which channel contrad"),
    "bytes bits": (in_group("bytes", num_bits=4), "m.weight is not packed"),
    "bytes floats": (in_group("bytes", type="float"), "m.weight is I8"),
    "floats zeros": (in_group("floats", symmetric=False), "with zero points"),
    "block": (in_group("floats_blocks", block_structure=[16]), "two positive integ"),
    "cache": (changed("floats", {"kv_cache_scheme": {"num_bits": 8}}), "kv_cache"),
    "sparse": (
        changed("floats", {"sparsity_config": {"format": "sparse-bitmask"}}),
        "'sparse-bitmask', expected dense",
    ),
    "no groups": (changed("floats", {"config_groups": {}}), "expected a scheme"),
    "transform": (changed("floats", {"transform_config": {"a": 1}}), "transform_"),
    "no global": (changed("nvfp4", weight_global_scale=None), "weight_global_scale"),
    "nvfp4 groups": (in_group("nvfp4", group_size=8), "whole groups of 16 or 32"),
    "nf4 of 8 bits": (changed("nf4", {"load_in_8bit": True}), "weights of 4 bits"),
    "nf4 type": (changed("nf4", {"bnb_4bit_quant_type": "fp4"}), "expected nf4"),
    "nf4 storage": (
        changed("nf4", {"bnb_4bit_quant_storage": "bfloat16"}),
        "'bfloat16', expected uint8",
    ),
    "nf4 absmax": (changed("nf4", **{"weight.absmax": None}), "m.weight.absmax"),
    "nf4 codes": (
        changed("nf4", weight=np.zeros((7, 1), np.uint8)),
        r"m.weight is U8 \(7, 1\), expected U8 \(1536, 1\)",
    ),
    "nf4 state": (with_state(b"{"), "is no quant state"),
    "nf4 shape": (with_state(b'{"shape": 3, "blocksize": 64}'), "is no quant state"),
    "nf4 other": (
        with_state(b'{"quant_type": "fp4", "blocksize": 64, "shape": [24, 128]}'),
        "expected nf4, a shape of two dims",
    ),
    "nf4 rows": (
        with_state(b'{"quant_type": "nf4", "blocksize": 64, "shape": [32, 96]}'),
        "groups of 64 that do not divide a row of 96",
    ),
    "left": (changed("words", {"ignore": ["m"]}), "leaves m as it is, but tensor"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_does_not_fit_is_refused(name, tmp_path):
    (said, tensors), message = HOSTILE[name]
    path = write_folder(tmp_path, said, tensors)
    with pytest.raises(SafetensorsError, match=message) as error:
        read_safetensors_folder(path)
    assert re.match(rf"{tmp_path}: .*\.$", str(error.value))


@pytest.mark.parametrize(
    ("case", "tensors", "message"),
    [
        ("gptq", {"g_idx": np.full(D, 3, np.int32)}, "names groups 3 to 3 of 3"),
        ("nf4", {"weight.quant_map": np.zeros(16, np.float32)}, "of other levels"),
        ("gptq", {"g_idx": np.full(D, -1, np.int32)}, "names groups -1 to -1 of 3"),
        ("gptq", {"g_idx": np.full(D, 1, np.int32)}, "each of 3 groups 32 times"),
        ("words_order", {"weight_g_idx": np.full(D, 9, np.int32)}, "9 to 9 of 3"),
        (
            "nvfp4",
            {"weight_global_scale": np.zeros(1, np.float32)},
            "no positive number",
        ),
    ],
)
def test_values_that_do_not_fit_are_refused_when_read(case, tensors, message, tmp_path):
    said, tensors = changed(case, **tensors)
    folder = read_safetensors_folder(write_folder(tmp_path, said, tensors))
    with pytest.raises(SafetensorsError, match=message):
        folder.load("m.weight")


def test_an_order_that_was_never_set(tmp_path):
    """compressed-tensors writes -1 for every input before it sorts."""
    said, tensors = changed("words", weight_g_idx=np.full(D, -1, np.int32))
    said["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    w = read_safetensors_folder(write_folder(tmp_path, said, tensors)).load("m.weight")
    assert w.order is None
    np.testing.assert_allclose(dequantize(w), CASES["words"][2], rtol=2e-6)
