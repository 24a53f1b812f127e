"""Granite 4 (hybrid): Mamba-2 and some attention, experts beside a shared block.

    x = x + r * mixer(rms_norm(x))      Mamba-2, or attention, mostly without rotation
    x = x + r * (experts(rms_norm(x)) + shared(rms_norm(x)))

The embeddings have a factor, the logits a divisor, the scores a scale of their own.
A model without experts has the shared block alone.
"""

import math

from jaxkern.formats.architecture_keys import ArchitectureKeys
from jaxkern.models.decoder import DecoderConfig
from jaxkern.models.decoder_files import (
    ATTENTION,
    NORMS,
    Folder,
    folder_architecture,
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
EXPERTS = {
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.input_linear": "ffn_gate_up_exps",
    "block_sparse_moe.output_linear": "ffn_down_exps",
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
        embedding_scale=keys.number("embedding_multiplier", 1.0),
        residual_scale=keys.number("residual_multiplier", 1.0),
        logit_scale=1.0 / keys.number("logits_scaling", 1.0),
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
            names=NORMS | ATTENTION | MAMBA | EXPERTS,
            others=OTHERS,
            layout=Layout(experts="fused", one_gate_up=True),
            harmless=TRAINING | HARMLESS,
            without={"normalization_function": ("rmsnorm",)},
        ),
    ),
)
