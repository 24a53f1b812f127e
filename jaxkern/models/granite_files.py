"""Granite 3, dense and with experts: Llama with factors.

    x = embedding(tokens) * embedding_multiplier
    x = x + r * attention(rms_norm(x))      scores times a scale of their own
    x = x + r * block(rms_norm(x))
    logits = rms_norm(x) @ output / logits_scaling

GGUF files have the rows of q and k in pairs, and gate and up of experts apart. Those of
Granite 4 without Mamba-2 say `granite` too, with sizes of states that no layer has, and
by `rope.scaling.finetuned` whether they rotate.
"""

from dataclasses import replace
from typing import Any

from jaxkern.formats.architecture_keys import ArchitectureKeys
from jaxkern.models.decoder import DecoderConfig, FeedForward
from jaxkern.models.decoder_files import (
    ATTENTION,
    DENSE,
    NORMS,
    Folder,
    OfGGUF,
    folder_architecture,
)
from jaxkern.models.decoder_gguf import (
    gguf_attention,
    gguf_base,
    gguf_decoder,
    gguf_mixture,
)
from jaxkern.models.feed_forward import Dense
from jaxkern.models.folder_keys import (
    TRAINING,
    attention,
    head_size,
    mixture,
    num_layers,
    positive,
    rotation,
    shared_keys,
)
from jaxkern.models.llama_form import Form
from jaxkern.models.mixers.layout import Layout

EXPERTS = {
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.input_linear": "ffn_gate_up_exps",
    "block_sparse_moe.output_linear": "ffn_down_exps",
}
OF_STATES = ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")


def config_of(keys: ArchitectureKeys) -> DecoderConfig:
    """What config.json says."""
    layers, head_dim = num_layers(keys), head_size(keys)
    mixer = attention(
        keys,
        rotation(keys, head_dim),
        head_dim,
        scale=keys.number("attention_multiplier", 1.0),
        bias=keys.flag("attention_bias", False),
    )
    width = positive(keys, "intermediate_size")
    block: FeedForward = Dense(width)
    if keys.arch == "granitemoe":
        block = mixture(keys, positive(keys, "num_local_experts"), width)
    return DecoderConfig(
        **shared_keys(keys),
        eps=keys.number("rms_norm_eps"),
        mixers=(mixer,) * layers,
        feed_forwards=(block,) * layers,
        **scales_of(keys),
    )


def scales_of(keys: ArchitectureKeys) -> dict[str, Any]:
    """The factors of embeddings, of what layers add and of logits."""
    return dict(
        embedding_scale=keys.number("embedding_multiplier", 1.0),
        residual_scale=keys.number("residual_multiplier", 1.0),
        logit_scale=1.0 / keys.number("logits_scaling", 1.0),
    )


def scales_of_gguf(keys: ArchitectureKeys) -> dict[str, Any]:
    """Likewise; 0 is for none."""
    return dict(
        embedding_scale=keys.number_or_none("embedding_scale") or 1.0,
        residual_scale=keys.number_or_none("residual_scale") or 1.0,
        logit_scale=1.0 / (keys.number_or_none("logit_scale") or 1.0),
    )


def config_of_gguf(keys: ArchitectureKeys) -> DecoderConfig:
    """What the keys of a GGUF file say; of biases its tensors do."""
    experts = keys.arch == "granitemoe"
    features = ("experts",) if experts else ()
    base = gguf_base(keys, Form(keys.arch, features=features))
    bias = "blk.0.attn_q.bias" in keys.file.tensors
    rotated = keys.flag("rope.scaling.finetuned", True)
    mixer = gguf_attention(base, pairing="interleaved", rotated=rotated, bias=bias)
    for size in OF_STATES:
        keys.value(f"ssm.{size}")
    width = positive(keys, "feed_forward_length")
    block: FeedForward = Dense(width)
    if experts:
        shared = keys.integer("expert_shared_feed_forward_length", 0)
        beside = Dense(shared, "_shexp") if shared else None
        block = gguf_mixture(keys, width=width, shared=beside)
    found = gguf_decoder(
        base, mixers=(mixer,) * base.layers, feed_forwards=(block,) * base.layers
    )
    return replace(found, **scales_of_gguf(keys))


ARCHITECTURES = tuple(
    folder_architecture(
        kind,
        kind,
        Folder(
            config_of,
            names=NORMS | ATTENTION | blocks,
            layout=Layout(experts="fused"),
            harmless=TRAINING,
        ),
        OfGGUF(kind, config_of_gguf),
    )
    for kind, blocks in (("granite", DENSE), ("granitemoe", EXPERTS))
)
