"""GGUF files of two small layers, one per architecture, weights random."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

VOCABULARY, D_MODEL, FEED_FORWARD, LAYERS, HEADS, KV_HEADS = 288, 64, 96, 2, 4, 2
HEAD_DIM = {"llama": 16, "qwen2": 16, "qwen3": 32}
BIASES = {"attn_output": 64, "ffn_gate": 96, "ffn_down": 64}  # up has none
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_gguf(
    path: Path,
    architecture: str,
    *,
    tied: bool = False,
    window: int | None = None,
    factors: bool = False,
    linear_scaling: float | None = None,
    quantized: bool = True,
    biases: bool = False,
    keys: Mapping[str, Any] | None = None,
    tensors_per_part: int = 0,
) -> Path:
    """Writes a model of this architecture; its weights depend on the name alone.

    `keys` of the architecture, such as "attention.scale", come on top or instead.
    With `tensors_per_part` there are files `NAME-00001-of-0000N.gguf` instead of one.
    """
    rng = np.random.default_rng(sum(architecture.encode()))
    h = HEAD_DIM[architecture]
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_per_part)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(D_MODEL)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1000.0)
    if architecture == "qwen3":
        writer.add_key_length(h)
        writer.add_value_length(h)
    else:
        writer.add_rope_dimension_count(h)
    if window is not None:
        writer.add_sliding_window(window)
    if linear_scaling is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(linear_scaling)
    for key, value in (keys or {}).items():
        add_key(writer, f"{architecture}.{key}", value)
    add_tokenizer(writer)

    def add(name: str, *shape: int, qtype: str = "F32", mean: float = 0.0) -> None:
        w = mean + rng.standard_normal(shape) / np.sqrt(shape[-1])
        if not quantized:
            qtype = "F32"
        kind = gguf.GGMLQuantizationType[qtype]
        blocks = gguf.quants.quantize(w.astype(np.float32), kind)
        writer.add_tensor(name, blocks, raw_dtype=kind)

    add("token_embd.weight", VOCABULARY, D_MODEL, qtype="Q8_0")
    if not tied:
        add("output.weight", VOCABULARY, D_MODEL, qtype="Q5_0")
    add("output_norm.weight", D_MODEL, mean=1.0)
    if factors:
        factor = np.linspace(1.0, 4.0, h // 2, dtype=np.float32)
        writer.add_tensor("rope_freqs.weight", factor)
    for i in range(LAYERS):
        blk = f"blk.{i}"
        add(f"{blk}.attn_norm.weight", D_MODEL, mean=1.0)
        add(f"{blk}.attn_q.weight", HEADS * h, D_MODEL, qtype="Q4_1")
        add(f"{blk}.attn_k.weight", KV_HEADS * h, D_MODEL, qtype="Q4_0")
        add(f"{blk}.attn_v.weight", KV_HEADS * h, D_MODEL, qtype="F16")
        if architecture == "qwen2":
            add(f"{blk}.attn_q.bias", HEADS * h)
            add(f"{blk}.attn_k.bias", KV_HEADS * h)
            add(f"{blk}.attn_v.bias", KV_HEADS * h)
        if architecture == "qwen3":
            add(f"{blk}.attn_q_norm.weight", h, mean=1.0)
            add(f"{blk}.attn_k_norm.weight", h, mean=1.0)
        add(f"{blk}.attn_output.weight", D_MODEL, HEADS * h, qtype="Q8_0")
        add(f"{blk}.ffn_norm.weight", D_MODEL, mean=1.0)
        add(f"{blk}.ffn_gate.weight", FEED_FORWARD, D_MODEL, qtype="Q5_1")
        add(f"{blk}.ffn_up.weight", FEED_FORWARD, D_MODEL, qtype="BF16")
        add(f"{blk}.ffn_down.weight", D_MODEL, FEED_FORWARD, qtype="Q8_0")
        for name, width in BIASES.items() if biases else ():
            add(f"{blk}.{name}.bias", width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Adds or replaces a key; its type follows from the value's."""
    for pairs in writer.kv_data:
        pairs.pop(key, None)
    if isinstance(value, list):
        return writer.add_array(key, value)
    kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}
    writer.add_key_value(key, value, gguf.GGUFValueType[kinds[type(value)]])


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Byte-level BPE: the bytes, some merges, and control tokens at the end."""
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "n"), ("an", "d")]
    tokens = [*byte_tokens(), *("".join(pair) for pair in merges)]
    unused = VOCABULARY - len(tokens) - len(SPECIAL)
    tokens += [*(f"<unused{i}>" for i in range(unused)), *SPECIAL]
    control = unused + len(SPECIAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - control) + [3] * control)
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(VOCABULARY - 1)
    writer.add_chat_template(TEMPLATE)


def byte_tokens() -> list[str]:
    """GPT-2's printable character for each byte."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in kept]
    characters = {b: chr(b) for b in kept}
    characters |= {b: chr(256 + i) for i, b in enumerate(others)}
    return [characters[b] for b in range(256)]
