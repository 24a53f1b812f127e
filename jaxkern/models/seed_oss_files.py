"""Seed-OSS: Llama with biases of q, k and v, and heads of a size of their own.

x = x + attention(rms_norm(x))
x = x + swiglu(rms_norm(x))
"""

from typing import Any

from jaxkern.formats.architecture_keys import ArchitectureKeys
from jaxkern.models.decoder import DecoderConfig
from jaxkern.models.decoder_files import (
    ATTENTION,
    DENSE,
    NORMS,
    Folder,
    OfGGUF,
    folder_architecture,
)
from jaxkern.models.decoder_gguf import gguf_attention, gguf_base, gguf_decoder
from jaxkern.models.feed_forward import Dense
from jaxkern.models.folder_keys import (
    attention,
    check_said,
    head_size,
    num_layers,
    positive,
    rotation,
    shared_keys,
)
from jaxkern.models.llama_form import Form
from jaxkern.models.mixers.layout import Layout


def config_of(keys: ArchitectureKeys) -> DecoderConfig:
    """What config.json says."""
    check_said(keys, "head_dim", "num_key_value_heads")
    layers, head_dim = num_layers(keys), head_size(keys)
    turns = rotation(keys, head_dim)
    mixer = attention(keys, turns, head_dim, **biases_of(keys))
    return DecoderConfig(
        **shared_keys(keys),
        eps=keys.number("rms_norm_eps"),
        mixers=(mixer,) * layers,
        feed_forwards=(Dense(positive(keys, "intermediate_size")),) * layers,
    )


def biases_of(keys: ArchitectureKeys) -> dict[str, Any]:
    """Of q, k and v, or of the output too."""
    three = keys.flag("attention_bias", True)
    if not keys.flag("attention_out_bias", False):
        return {"qkv_bias": three}
    if not three:
        raise keys.error("attention_out_bias", "but q, k and v have none")
    return {"bias": True}


def config_of_gguf(keys: ArchitectureKeys) -> DecoderConfig:
    """What the keys of a GGUF file say; of biases its tensors do."""
    base = gguf_base(keys, Form("seed_oss"))
    bias = "blk.0.attn_q.bias" in keys.file.tensors
    return gguf_decoder(
        base,
        mixers=(gguf_attention(base, qkv_bias=bias),) * base.layers,
        feed_forwards=(Dense(positive(keys, "feed_forward_length")),) * base.layers,
    )


ARCHITECTURES = (
    folder_architecture(
        "seed_oss",
        "seed_oss",
        Folder(
            config_of,
            names=NORMS | ATTENTION | DENSE,
            harmless={"residual_dropout": "of training"},
        ),
        OfGGUF("seed_oss", config_of_gguf, Layout(ffn_norm="post_attention_norm")),
    ),
)
