"""Which tensor of a model gets which block format: the mixes of llama.cpp by name.

A mix keeps more bits where few weights matter much: in the output, and in the values
and the second product of the feed-forward part of the first and last eighth of the
layers and every third between. Norms, biases and routers stay as they are.
(llama.cpp: tools/quantize/README.md, src/llama-quant.cpp)
"""

import re

from jaxkern.primitives.quant.gguf_blocks import BLOCK_FORMATS

# the format of most weights
MIXES = {
    "F32": "F32",
    "F16": "F16",
    "BF16": "BF16",
    **{q: q for q in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q6_K")},
    **{q: q for q in ("IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0")},
    **{f"Q3_K_{size}": "Q3_K" for size in "SML"},
    **{f"Q{bits}_K_{size}": f"Q{bits}_K" for bits in (4, 5) for size in "SM"},
}
# for rows that are no multiple of 256
SMALLER_BLOCKS = {
    "Q2_K": "IQ4_NL",
    "Q3_K": "IQ4_NL",
    "IQ4_XS": "IQ4_NL",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
    "TQ1_0": "Q4_0",
    "TQ2_0": "Q4_0",
}
LAYER = re.compile(r"blk\.(\d+)\.(.+)\.weight")
ROUTERS = ("ffn_gate_inp", "ffn_gate_inp_shexp")
SMALL = ("ssm_conv1d", "shortconv.conv", "token_types", "position_embd")


def qtype_in_mix(
    mix: str, name: str, shape: tuple[int, ...], *, layers: int, tied: bool, gqa: int
) -> str | None:
    """The format of one tensor, or None for "as it is".

    Args:
      mix: a key of `MIXES`, such as "Q4_K_M".
      name, shape: of the tensor, as in a GGUF file.
      layers: of the model.
      tied: the embedding is the output too.
      gqa: query heads that share a key head.
    """
    part = LAYER.fullmatch(name)
    kind = part[2] if part else name.removesuffix(".weight")
    if not name.endswith(".weight") or len(shape) < 2:
        return None
    if kind.endswith("_norm") or kind in ROUTERS or kind.startswith(SMALL):
        return None
    most = MIXES[mix]
    if most in ("F32", "F16", "BF16"):
        return most
    output = name == "output.weight" or (tied and name == "token_embd.weight")
    if output:
        found = most if most == "Q8_0" else "Q6_K"
    elif part is None:
        found = most
    else:
        found = _of_layer(mix, kind, int(part[1]), layers, gqa) or most
    if shape[-1] % BLOCK_FORMATS[found].elements:
        found = SMALLER_BLOCKS.get(found, "F16")
    return "F16" if shape[-1] % BLOCK_FORMATS[found].elements else found


def _of_layer(mix: str, kind: str, i: int, layers: int, gqa: int) -> str | None:
    """Where a mix differs from its main format; None elsewhere."""
    eighth = layers // 8
    more = i < eighth or i >= 7 * layers // 8 or (i - eighth) % 3 == 2
    match mix, kind:
        case "Q4_K_M" | "Q5_K_M", "attn_v" | "ffn_down":
            return "Q6_K" if more else None
        case "Q4_K_S", "attn_v":
            return "Q5_K" if i < 4 else None
        case "Q4_K_S", "ffn_down":
            return "Q5_K" if i < eighth else None
        case "Q3_K_M", "attn_v":
            return "Q5_K" if i < 2 else "Q4_K"
        case "Q3_K_M", "ffn_down":
            return "Q5_K" if i < layers // 16 else "Q4_K" if more else None
        case "Q3_K_M", "attn_output":
            return "Q4_K"
        case "Q3_K_L", "attn_v" | "ffn_down" | "attn_output":
            return "Q5_K"
        case "Q2_K", "attn_v":
            return "Q4_K" if gqa >= 4 else "Q3_K"
        case "Q2_K", "ffn_down" | "attn_output":
            return "Q3_K"
    return None
