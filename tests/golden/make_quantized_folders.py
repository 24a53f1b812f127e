"""A tiny mixture in folders with packed weights, and its logits by `transformers`.

    pip install torch transformers accelerate compressed-tensors bitsandbytes
    python -m tests.golden.make_quantized_folders

writes under `tests/golden/quantized_folders/` a folder for each method, or those named.
Schemes of compressed-tensors and bitsandbytes are packed and decoded by these packages;
fp8, awq and gptq by the loops here, as their authors publish the formats. `golden.npz`
of each folder has, of the decoded weights in float32:

    tokens  [t] int32
    logits  [t, vocabulary]
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from bitsandbytes import functional
from compressed_tensors.compressors.naive_quantized.base import (
    NaiveQuantizationCompressor,
)
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.base import (
    PackedQuantizationCompressor,
)
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.utils.helpers import (
    calculate_qparams,
    generate_gparam,
)
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

FOLDERS = Path(__file__).parent / "quantized_folders"
Tensors = dict[str, torch.Tensor]
Packed = tuple[Tensors, torch.Tensor]
"""The tensors of a module by their names in it, and its weight decoded, `[f, d]`."""

SIZES = {
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}


def fp8_blocks(module: str, w: torch.Tensor) -> Packed:
    """DeepSeek's: float8 codes, a scale that multiplies for each 128 x 128."""
    f, d = w.shape
    codes = torch.empty(f, d, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-f // 128), -(-d // 128))
    decoded = torch.empty(f, d)
    for i in range(0, f, 128):
        for j in range(0, d, 128):
            at = slice(i, i + 128), slice(j, j + 128)
            scale = w[at].abs().max() / 448
            scales[i // 128, j // 128] = scale
            codes[at] = (w[at] / scale).to(torch.float8_e4m3fn)
            decoded[at] = codes[at].float() * scale
    return {"weight": codes, "weight_scale_inv": scales}, decoded


def by_groups(w: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    """Codes of 4 bits `[f, d]`, zeros and scales `[f, groups]`."""
    parts = w.reshape(len(w), -1, size)
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).half().float()
    zeros = torch.round(-low / scales).clamp(0, 15)
    codes = torch.round(parts / scales[..., None]) + zeros[..., None]
    return codes.clamp(0, 15).reshape(w.shape), zeros, scales


def in_words(values: torch.Tensor, order: list[int]) -> torch.Tensor:
    """`[r, 8 c]` as `[r, c]`: nibble i of a word is the value order[i] of eight."""
    words = torch.zeros(len(values), values.shape[1] // 8, dtype=torch.int64)
    for column in range(words.shape[1]):
        for i in range(8):
            words[:, column] |= values[:, 8 * column + order[i]].long() << (4 * i)
    return words.to(torch.int32)


def awq(module: str, w: torch.Tensor) -> Packed:
    """AutoAWQ's "gemm": words along the outputs of `[d, f]`."""
    size, order = 32, [0, 2, 4, 6, 1, 3, 5, 7]
    codes, zeros, scales = by_groups(w, size)
    each = [x.repeat_interleave(size, dim=1) for x in (zeros, scales)]
    return {
        "qweight": in_words(codes.T, order),
        "qzeros": in_words(zeros.T, order),
        "scales": scales.T.half(),
    }, (codes - each[0]) * each[1]


def gptq(module: str, w: torch.Tensor) -> Packed:
    """AutoGPTQ's version 1: words along the inputs, zeros less one; act-order in the
    products back, whose inputs are sorted by their size."""
    size, d = 32, w.shape[1]
    order = torch.arange(d)
    if module.endswith(("o_proj", "down_proj")):
        order = w.abs().sum(0).argsort(descending=True)
    codes, zeros, scales = by_groups(w[:, order], size)
    back = order.argsort()
    codes, group = codes[:, back], (torch.arange(d) // size)[back]
    usual = list(range(8))
    return {
        "qweight": in_words(codes, usual).T,
        "qzeros": in_words((zeros.T - 1).remainder(16), usual),
        "scales": scales.T.half(),
        "g_idx": group.to(torch.int32),
    }, (codes - zeros[:, group]) * scales[:, group]


def compressed(group: dict, compressor: type) -> Callable[[str, torch.Tensor], Packed]:
    """By the package, its scales from the extremes of each part."""
    scheme = QuantizationScheme(targets=["Linear"], **group)
    args = scheme.weights

    def pack(module: str, w: torch.Tensor) -> Packed:
        parts, given = w.reshape(len(w), -1, args.group_size or w.shape[1]), {}
        if args.strategy == "tensor_group":
            given["weight_global_scale"] = generate_gparam(w.min(), w.max())
        scale, zero = calculate_qparams(
            parts.amin(-1), parts.amax(-1), args, *given.values()
        )
        state = {"weight": w, "weight_scale": scale, **given}
        if not args.symmetric:
            state["weight_zero_point"] = torch.round(zero).to(torch.int8)
        packed = compressor.compress(state, scheme)
        if args.strategy != "tensor_group":
            return packed, compressor.decompress(dict(packed), scheme)["weight"].float()
        # the package decodes these to bfloat16
        codes = unpack_fp4_from_uint8(packed["weight_packed"], *w.shape).float()
        scale = packed["weight_scale"].float() / packed["weight_global_scale"]
        return packed, codes * scale.repeat_interleave(args.group_size, dim=1)

    return pack


def nf4(module: str, w: torch.Tensor) -> Packed | None:
    """By bitsandbytes, scales quantised once more, where groups of 64 fit a row."""
    if w.shape[1] % 64:
        return None
    codes, state = functional.quantize_4bit(
        w, blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    parts = {f"weight.{name}": x for name, x in state.as_dict(packed=True).items()}
    return {"weight": codes, **parts}, functional.dequantize_4bit(codes, state)


INT4 = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group"}
INT4 |= {"group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
NVFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": 16}
NVFP4 |= {"strategy": "tensor_group", "scale_dtype": torch.float8_e4m3fn}
TOKENS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token"}
MIXED = {  # by the middle of their names
    "self_attn": ({"weights": INT8}, NaiveQuantizationCompressor),
    "mlp.experts": ({"weights": NVFP4}, NVFP4PackedCompressor),
    "mlp": (
        {"weights": FLOAT8, "input_activations": {**TOKENS, "dynamic": True}},
        NaiveQuantizationCompressor,
    ),
}


def mixed(module: str, w: torch.Tensor) -> Packed:
    """Three schemes in one folder."""
    found = next(value for name, value in MIXED.items() if f".{name}." in module)
    return compressed(*found)(module, w)


def config_of_groups(*groups: dict) -> dict:
    """As the package writes it."""
    dumped = [
        QuantizationScheme(targets=["Linear"], **group).model_dump(mode="json")
        for group in groups
    ]
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "mixed-precision" if len(groups) > 1 else "pack-quantized",
        "global_compression_ratio": None,
        "config_groups": {f"group_{i}": group for i, group in enumerate(dumped)},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.20.0",
    }


FOUR = {"bits": 4, "group_size": 32}
METHODS: dict[str, tuple[Callable[[str, torch.Tensor], Packed | None], dict]] = {
    "bitsandbytes": (
        nf4,
        {
            "quant_method": "bitsandbytes",
            "_load_in_4bit": True,
            "_load_in_8bit": False,
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_storage": "uint8",
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_has_fp16_weight": False,
            "llm_int8_skip_modules": ["lm_head"],
            "llm_int8_threshold": 6.0,
            "load_in_4bit": True,
            "load_in_8bit": False,
        },
    ),
    "fp8": (
        fp8_blocks,
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
        },
    ),
    "awq": (
        awq,
        {
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": True,
            "modules_to_not_convert": ["lm_head", "mlp.gate"],
            **FOUR,
        },
    ),
    "gptq": (
        gptq,
        {
            "quant_method": "gptq",
            "checkpoint_format": "gptq",
            "desc_act": True,
            "sym": False,
            "lm_head": False,
            "damp_percent": 0.01,
            "true_sequential": True,
            "meta": {"quantizer": ["gptqmodel:1.2.1"]},
            **FOUR,
        },
    ),
    "compressed_int4": (
        compressed({"weights": INT4}, PackedQuantizationCompressor),
        config_of_groups({"weights": INT4}),
    ),
    "compressed_mixed": (
        mixed,
        config_of_groups(*(group for group, _ in MIXED.values())),
    ),
}


def logits_of(folder: Path, config: dict, weights: Tensors) -> np.ndarray:
    """What `transformers` makes of plain weights, in float32."""
    with tempfile.TemporaryDirectory() as plain:
        save_file(weights, f"{plain}/model.safetensors", {"format": "pt"})
        Path(plain, "config.json").write_text(json.dumps(config))
        model = AutoModelForCausalLM.from_pretrained(
            plain, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    with torch.no_grad():
        return model(torch.tensor(TOKEN_IDS)[None]).logits[0].numpy()


TOKEN_IDS = np.random.default_rng(0).integers(3, SIZES["vocab_size"], 16)


def main() -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", **SIZES)
    model = AutoModelForCausalLM.from_config(config)
    for name, x in model.named_parameters():
        if "norm" in name:
            x.data.add_(0.3 * torch.randn_like(x))
    with tempfile.TemporaryDirectory() as saved:
        model.to(torch.bfloat16).save_pretrained(saved)
        weights = load_file(f"{saved}/model.safetensors")
        plain_config = json.loads(Path(saved, "config.json").read_text())
    before = logits_of(FOLDERS, plain_config, weights)
    for method, (pack, said) in METHODS.items():
        if sys.argv[1:] and method not in sys.argv[1:]:
            continue
        stored, plain = {}, {}
        for name, w in weights.items():
            stored[name] = plain[name] = w
            module = name.removesuffix(".weight")
            packed = pack(module, w.float()) if name.endswith("_proj.weight") else None
            if packed is not None:
                parts, plain[name] = packed
                del stored[name]
                stored |= {f"{module}.{n}": p.contiguous() for n, p in parts.items()}
        folder = FOLDERS / method
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
        text = json.dumps({**plain_config, "quantization_config": said}, indent=2)
        (folder / "config.json").write_text(text + "\n")
        logits = logits_of(folder, plain_config, plain)
        np.savez_compressed(
            folder / "golden.npz", tokens=TOKEN_IDS.astype(np.int32), logits=logits
        )
        print(method, logits.std(), np.abs(logits - before).max())


if __name__ == "__main__":
    main()
