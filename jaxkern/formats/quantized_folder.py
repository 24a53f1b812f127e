"""Folders with a `quantization_config`: which of their tensors are packed weights.

| quant_method | tensors of a module | weight |
|---|---|---|
| fp8 | weight, weight_scale_inv or weight_scale | float8 * scale of its block |
| compressed-tensors | weight_packed or weight, weight_scale, ... | see there |
| gptq | qweight, qzeros, scales, g_idx | (code - zero) * scale of its group |
| awq | qweight, qzeros, scales | likewise, eight outputs in another order |
| bitsandbytes | weight, weight.absmax, ... | level(code) * absmax of its group |

Each becomes one tensor `<module>.weight` with the shape of the weights. Weights alone
are quantised here: what says how activations are rounded before a product is read and
not applied. Which modules are left as they are the tensors say; a list of them that
names a packed one is refused. Patterns in such lists are not run: a stranger's regular
expression may take for ever.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from jaxkern.formats.architecture_keys import ArchitectureKeys, architecture_keys
from jaxkern.formats.bitsandbytes_nf4 import read_bitsandbytes
from jaxkern.formats.compressed_tensors import read_compressed_tensors
from jaxkern.formats.packed_matrix import (
    PackedMatrix,
    from_awq,
    from_fp8,
    from_gptq,
)
from jaxkern.formats.packing import (
    CONFIG,
    SCALES,
    Folder,
    Packing,
    known,
    modules,
    names_of,
)

HARMLESS = {
    "quant_method": "how the folder was found to be read",
    "version": "who wrote it",
    "dequantize": "how it is run",
    "use_exllama": "how it is run",
    "exllama_config.*": "how it is run",
    "max_input_length": "how it is run",
    "backend": "how it is run",
    "scale_fmt": "the scales' own dtype says it",
    "modules_to_convert": "the tensors say it",
    "model_name_or_path": "who wrote it",
    "model_file_base_name": "who wrote it",
    "dataset": "how the codes were found",
    "tokenizer": "how the codes were found",
    "damp_percent": "how the codes were found",
    "damp_auto_increment": "how the codes were found",
    "true_sequential": "how the codes were found",
    "static_groups": "how the codes were found; g_idx says the rest",
    "sym": "the zeros say it",
    "mse": "how the codes were found",
    "block_name_to_quantize": "the tensors say it",
    "module_name_preceding_first_block": "the tensors say it",
    "modules_in_block_to_quantize": "the tensors say it",
    "batch_size": "how the codes were found",
    "pad_token_id": "how the codes were found",
    "cache_block_outputs": "how the codes were found",
    "do_fuse": "how it is run",
    "fuse_max_seq_len": "how it is run",
    "lm_head": "the tensors say it",
    "_load_in_4bit": "load_in_4bit once more",
    "_load_in_8bit": "load_in_8bit once more",
    "bnb_4bit_compute_dtype": "how it is run",
    "bnb_4bit_use_double_quant": "the tensors say it",
    "llm_int8_enable_fp32_cpu_offload": "of weights of 8 bits",
    "llm_int8_has_fp16_weight": "of weights of 8 bits",
    "llm_int8_threshold": "of weights of 8 bits",
    "meta.*": "who wrote it",
}
WITHOUT: Mapping[str, tuple[Any, ...]] = {
    "expert_dtype": ("fp8",),
    "is_marlin_format": (False,),
    "pack_dtype": ("int32",),
}


def packed_weights(folder: Folder) -> Packing:
    """What is packed by the method that the folder's `quantization_config` names.

    Where nothing is, its keys are left to the architecture, which refuses them unless
    it reads them.

    Raises:
      ValueError: of the folder's kind: another method, keys that are not understood,
        tensors that are missing or do not fit.
    """
    at = f"{folder.architecture}.{CONFIG}."
    said = {
        key.removeprefix(f"{folder.architecture}."): value
        for key, value in folder.metadata.items()
        if key.startswith(at)
    }
    packing, method = Packing(folder), said.get(f"{CONFIG}.quant_method")
    plain = all(info.qtype in SCALES for info in folder.tensors.values())
    if method is None or plain or method == "mxfp4":  # whose entry reads it
        return packing
    if not isinstance(method, str) or method not in METHODS:
        raise folder.error(
            f"key {CONFIG}.quant_method is {method!r}, known are {', '.join(METHODS)}"
        )
    alone: Any = folder
    alone = replace(alone, metadata={**said, "general.architecture": CONFIG})
    with architecture_keys(alone, HARMLESS, WITHOUT) as keys:
        METHODS[method](keys, packing)
    return packing


def read_fp8(keys: ArchitectureKeys, packing: Packing) -> None:
    """Float8 with scales of blocks, or one for each matrix."""
    known(keys, "activation_scheme", "dynamic", "static")
    known(keys, "fmt", "e4m3", "float8_e4m3fn")
    block = keys.value("weight_block_size", [0, 0])
    sized = isinstance(block, list) and [type(n) for n in block] == [int, int]
    if not sized or min(block) < 0 or (0 in block and any(block)):
        raise keys.error("weight_block_size", "expected two positive integers")
    rows, columns = block
    for name, info in packing.folder.tensors.items():
        if info.qtype != "F8_E4M3":
            continue
        if len(info.shape) not in (2, 3):
            raise packing.folder.error(f"tensor {name} is 8-bit floats {info.shape}")
        named = [f"{name}_scale_inv", f"{name}_scale"]
        found = [n for n in named if n in packing.folder.tensors]
        if len(found) != 1:
            raise packing.folder.error(
                f"tensor {name} is {info.qtype} with {len(found)} of "
                f"{' and '.join(named)}, expected one"
            )
        *lead, f, d = info.shape
        shapes = [(*lead, 1, 1), (*lead,)] + ([] if lead else [(1,)])
        if rows:
            shapes = [(*lead, -(-f // rows), -(-d // columns))]
        scales = packing.part(found[0], (*SCALES, "F8_E8M0"), *shapes)
        packing.add(
            name,
            PackedMatrix(
                info.shape,
                "fp8",
                {"codes": name, "scales": scales},
                partial(from_fp8, block=(rows, columns)),
            ),
        )
    packing.refuse(names_of(keys, "modules_to_not_convert", "ignored_layers"))


def read_gptq(keys: ArchitectureKeys, packing: Packing) -> None:
    """Codes of 4 or 8 bits down the inputs; version 1 stores zeros less 1."""
    bits, size = known_bits(keys, 4, 8), group_size(keys)
    form = known(keys, "checkpoint_format", "gptq", "gptq_v2")
    older = known(keys, "format", "gptq", "gptq_v2")
    sorted_ = keys.flag("desc_act", False)
    for module in modules(packing, "qweight"):
        words, f = packing.folder.tensors[f"{module}.qweight"].shape
        d, per_word = words * 32 // bits, 32 // bits
        groups = -(-d // (size or d))
        parts = {
            "qweight": packing.part(f"{module}.qweight", ("I32",), (words, f)),
            "qzeros": packing.part(
                f"{module}.qzeros", ("I32",), (groups, -(-f // per_word))
            ),
            "scales": packing.part(f"{module}.scales", SCALES, (groups, f)),
        }
        if f % per_word:
            raise packing.folder.error(
                f"tensor {parts['qweight']} has {f} outputs, expected a multiple of "
                f"{per_word} for zeros in words"
            )
        if sorted_ or f"{module}.g_idx" in packing.folder.tensors:
            parts["g_idx"] = packing.part(f"{module}.g_idx", ("I32",), (d,))
        less_one = "gptq_v2" not in (form, older)
        packing.add(
            f"{module}.weight",
            PackedMatrix(
                (f, d),
                f"int{bits}",
                parts,
                partial(
                    from_gptq,
                    bits=bits,
                    group_size=size or d,
                    zeros_less_one=less_one,
                ),
            ),
        )
    packing.refuse(names_of(keys, "modules_to_not_convert"))


def read_awq(keys: ArchitectureKeys, packing: Packing) -> None:
    """Codes of 4 bits along the outputs, in the order of its "gemm" version."""
    bits, size = known_bits(keys, 4), group_size(keys)
    if keys.string("version", "gemm").lower() != "gemm":
        raise keys.error("version", "expected gemm: its order of packing is read here")
    if not keys.flag("zero_point", True):
        raise keys.error("zero_point", "expected true: its files have zeros")
    for module in modules(packing, "qweight"):
        d, words = packing.folder.tensors[f"{module}.qweight"].shape
        f, groups = words * 32 // bits, -(-d // (size or d))
        parts = {
            "qweight": packing.part(f"{module}.qweight", ("I32",), (d, words)),
            "qzeros": packing.part(f"{module}.qzeros", ("I32",), (groups, words)),
            "scales": packing.part(f"{module}.scales", SCALES, (groups, f)),
        }
        if d % 2:
            raise packing.folder.error(
                f"tensor {parts['qweight']} has {d} inputs, expected an even number"
            )
        container = partial(from_awq, group_size=size or d)
        packing.add(f"{module}.weight", PackedMatrix((f, d), "int4", parts, container))
    packing.refuse(names_of(keys, "modules_to_not_convert"))


def known_bits(keys: ArchitectureKeys, *values: int) -> int:
    key = "w_bit" if keys.has("w_bit") else "bits"
    bits = keys.integer(key)
    if bits not in values:
        raise keys.error(key, f"expected {' or '.join(map(str, values))}")
    return bits


def group_size(keys: ArchitectureKeys) -> int:
    """Inputs with one scale; 0 where all of a row share it, which files call -1."""
    key = "q_group_size" if keys.has("q_group_size") else "group_size"
    size = keys.value(key)
    if type(size) is not int or (size < 1 and size != -1):
        raise keys.error(key, "expected a positive integer, or -1 for whole rows")
    return max(size, 0)


METHODS: Mapping[str, Callable[[ArchitectureKeys, Packing], None]] = {
    "fp8": read_fp8,
    "compressed-tensors": read_compressed_tensors,
    "gptq": read_gptq,
    "awq": read_awq,
    "bitsandbytes": read_bitsandbytes,
}
