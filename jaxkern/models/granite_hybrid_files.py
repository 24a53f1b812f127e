"""Granite 4 (hybrid): Mamba-2 and some attention, experts beside a shared block.

    x = x + r * mixer(rms_norm(x))      Mamba-2, or attention, mostly without rotation
    x = x + r * (experts(rms_norm(x)) + shared(rms_norm(x)))

The embeddings have a factor, the logits a divisor, the scores a scale of their own.
A model without experts has the shared block alone.

GGUF files have gate and up apart, the rates -exp(A_log), and rotate where they say
`rope.scaling.finetuned`. With several groups of Mamba-2 programs differ in what they
normalise together: such a file is refused.
"""

import math
from dataclasses import replace

from jaxkern.formats.architecture_keys import ArchitectureKeys
from jaxkern.models.decoder import DecoderConfig
from jaxkern.models.decoder_files import (
    ATTENTION,
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
    layer_types,
    mixture,
    num_layers,
    positive,
    rotation,
    shared_keys,
)
from jaxkern.models.granite_files import EXPERTS, scales_of, scales_of_gguf
from jaxkern.models.llama_form import Form
from jaxkern.models.mixers.layout import Layout
from jaxkern.models.mixers.mamba2 import Mamba2

WITH_ROPE = "only read with position_embedding_type rope"
WITH_EXPERTS = "only read with num_local_experts"
HARMLESS = {
    "mamba_chunk_size": "how it is computed",
    "init_method": "of weights before training",
    "rope_theta": WITH_ROPE,
    "rope_parameters.rope_theta": WITH_ROPE,
    "rope_parameters.rope_type": WITH_ROPE,
    "num_experts_per_tok": WITH_EXPERTS,
    "intermediate_size": WITH_EXPERTS,
}
KINDS = {
    "full_attention": "full",
    "attention": "full",
    "linear_attention": "mamba",
    "mamba": "mamba",
}
MAMBA = {
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
}
SHARED = {
    "shared_mlp.input_linear": "ffn_gate_up_shexp",
    "shared_mlp.output_linear": "ffn_down_shexp",
}
OTHERS = {
    "mamba.A_log": "ssm_a_log",
    "mamba.D": "ssm_d",
    "mamba.dt_bias": "ssm_dt.bias",
}


def config_of(keys: ArchitectureKeys) -> DecoderConfig:
    """What config.json says."""
    layers, head_dim = num_layers(keys), head_size(keys)
    kinds = layer_types(keys, layers, KINDS, ["mamba"] * layers)
    position = keys.string("position_embedding_type", "nope")
    if position not in ("nope", "rope"):
        raise keys.error("position_embedding_type", "known are nope and rope")
    full = attention(
        keys,
        rotation(keys, head_dim) if position == "rope" else None,
        head_dim,
        scale=keys.number("attention_multiplier", 1.0),
        bias=keys.flag("attention_bias", False),
    )
    mamba = mamba_of(keys)
    shared = positive(keys, "shared_intermediate_size")
    if experts := keys.integer("num_local_experts", 0):
        width = positive(keys, "intermediate_size")
        block = mixture(keys, experts, width, shared=Dense(shared, "_shexp"))
    else:
        block = Dense(shared, "_shexp")
    return DecoderConfig(
        **shared_keys(keys),
        eps=keys.number("rms_norm_eps"),
        mixers=tuple(full if kind == "full" else mamba for kind in kinds),
        feed_forwards=(block,) * layers,
        **scales_of(keys),
    )


def mamba_of(keys: ArchitectureKeys) -> Mamba2:
    """The sizes of Mamba-2."""
    heads, groups = positive(keys, "mamba_n_heads"), positive(keys, "mamba_n_groups", 1)
    width = positive(keys, "mamba_expand") * keys.integer("hidden_size")
    if keys.value("mamba_d_head", "auto") == "auto":
        head_dim = width // heads
    else:
        head_dim = positive(keys, "mamba_d_head")
    if heads * head_dim != width or heads % groups:
        raise keys.error("mamba_n_heads", f"{groups} groups, {width} channels")
    return Mamba2(
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state_dim=positive(keys, "mamba_d_state"),
        taps=positive(keys, "mamba_d_conv"),
        limits=step_limits(keys),
        conv_bias=keys.flag("mamba_conv_bias", True),
        bias=keys.flag("mamba_proj_bias", False),
    )


def config_of_gguf(keys: ArchitectureKeys) -> DecoderConfig:
    """What the keys of a GGUF file say: a layer without key heads is Mamba-2."""
    form = Form("granitehybrid", features=("experts", "layer_heads"))
    base = gguf_base(keys, form)
    heads = keys.per_layer("attention.head_count_kv") or []
    if len(heads) != base.layers or {*heads} - {0, base.kv_heads}:
        raise keys.error(
            "attention.head_count_kv",
            f"expected 0 or {base.kv_heads} for each of {base.layers} layers",
        )
    rotated = keys.flag("rope.scaling.finetuned", False)
    full = gguf_attention(base, pairing="interleaved", rotated=rotated)
    if positive(keys, "ssm.group_count") != 1:
        raise keys.error("ssm.group_count", "expected 1: else programs differ")
    mamba = mamba_of_gguf(keys)
    width = positive(keys, "feed_forward_length")
    block = Dense(width)
    if keys.integer("expert_count", 0):
        shared = Dense(positive(keys, "expert_shared_feed_forward_length"), "_shexp")
        block = gguf_mixture(keys, width=width, shared=shared)
    found = gguf_decoder(
        base,
        mixers=tuple(full if n else mamba for n in heads),
        feed_forwards=(block,) * base.layers,
    )
    return replace(found, **scales_of_gguf(keys))


def mamba_of_gguf(keys: ArchitectureKeys) -> Mamba2:
    """The sizes of Mamba-2 in a GGUF file; of a bias its tensors say."""
    inner, many = positive(keys, "ssm.inner_size"), positive(keys, "ssm.time_step_rank")
    if inner % many:
        raise keys.error("ssm.time_step_rank", f"{inner} channels cannot be shared")
    groups = positive(keys, "ssm.group_count")
    if many % groups:
        raise keys.error("ssm.group_count", f"{many} heads cannot share them")
    return Mamba2(
        heads=many,
        head_dim=inner // many,
        groups=groups,
        state_dim=positive(keys, "ssm.state_size"),
        taps=positive(keys, "ssm.conv_kernel"),
        conv_bias=any(n.endswith(".ssm_conv1d.bias") for n in keys.file.tensors),
    )


def step_limits(keys: ArchitectureKeys) -> tuple[float, float]:
    """time_step_limit; JSON has no infinity, so that it may be in words."""
    found = keys.value("time_step_limit", [0.0, math.inf])
    if isinstance(found, list) and len(found) == 2:
        low, high = (
            math.inf if x in ({"__float__": "Infinity"}, "Infinity") else x
            for x in found
        )
        plain = isinstance(low, int | float) and isinstance(high, int | float)
        if plain and 0 <= low < high:
            return float(low), float(high)
    raise keys.error("time_step_limit", "expected two numbers, the smaller one first")


ARCHITECTURES = (
    folder_architecture(
        "granitehybrid",
        "granitemoehybrid",
        Folder(
            config_of,
            names=NORMS | ATTENTION | MAMBA | EXPERTS | SHARED,
            others=OTHERS,
            layout=Layout(experts="fused", one_gate_up=True),
            harmless=TRAINING | HARMLESS,
            without={"normalization_function": ("rmsnorm",)},
        ),
        OfGGUF("granitehybrid", config_of_gguf, Layout(flat_taps=True, rates=True)),
    ),
)
