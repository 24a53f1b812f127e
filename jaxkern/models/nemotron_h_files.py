"""Nemotron-H: each layer is one block, Mamba-2, attention, a dense block or experts.

    x = x + block(rms_norm(x))          https://arxiv.org/abs/2504.03624

Blocks and experts have no gate: down relu(up x)**2. Attention has no rotation. Experts
are chosen as by DeepSeek V3, in Nemotron 3 Super of a latent that all of them share. A
shared block beside them reads x. Layers that predict further tokens (`mtp.*`) are left
out.

transformers bounds the time step of Mamba-2 from below, by `time_step_min`, where it
reads a text in one piece, and not where it adds a token. A folder is read with the
bound; GGUF files have none, as in llama.cpp. Those with experts say `nemotron_h_moe`.
"""

import math
from collections.abc import Sequence
from typing import Any

from jaxkern.formats.architecture_keys import ArchitectureKeys
from jaxkern.models.decoder import DecoderConfig, FeedForward, Mixer
from jaxkern.models.decoder_files import Folder, OfGGUF, folder_architecture
from jaxkern.models.decoder_gguf import (
    further_layers,
    gguf_attention,
    gguf_base,
    gguf_decoder,
    gguf_mixture,
    own_layers,
)
from jaxkern.models.feed_forward import Dense, Mixture
from jaxkern.models.folder_keys import (
    TRAINING,
    attention,
    check_said,
    head_size,
    layer_types,
    mixture,
    positive,
    shared_keys,
)
from jaxkern.models.granite_hybrid_files import mamba_of_gguf, step_limits
from jaxkern.models.llama_form import Form
from jaxkern.models.mixers.full_attention import FullAttention
from jaxkern.models.mixers.layout import Layout
from jaxkern.models.mixers.mamba2 import Mamba2

NO_ROTATION = "no layer rotates"
FURTHER = "of layers that predict further tokens"
BEFORE_TRAINING = "of weights before training"
HARMLESS = {
    "chunk_size": "how it is computed",
    "use_mamba_kernels": "how it is computed",
    "mamba_ssm_cache_dtype": "states here are float32",
    "residual_in_fp32": "how sums are rounded",
    "num_logits_to_keep": "how it is run",
    "moe_shared_expert_overlap": "how it is run",
    "expand": "mamba_num_heads says it",
    "hidden_dropout": "of training",
    "rescale_prenorm_residual": BEFORE_TRAINING,
    "time_step_max": BEFORE_TRAINING,
    "time_step_floor": BEFORE_TRAINING,
    "rope_theta": NO_ROTATION,
    "rope_parameters.rope_theta": NO_ROTATION,
    "rope_parameters.rope_type": NO_ROTATION,
    "partial_rotary_factor": NO_ROTATION,
    "num_nextn_predict_layers": FURTHER,
    "mtp_layers_block_type": FURTHER,
    "mtp_hybrid_override_pattern": FURTHER,
    **dict.fromkeys(
        (
            *("intermediate_size", "moe_intermediate_size", "moe_latent_size"),
            *("moe_shared_expert_intermediate_size", "n_routed_experts"),
            *("num_experts_per_tok", "n_group", "topk_group", "norm_topk_prob"),
            "routed_scaling_factor",
        ),
        "of layers that this model may not have",
    ),
}
WITHOUT = {
    "mamba_hidden_act": ("silu",),
    "mamba_proj_bias": (False,),
    "mlp_hidden_act": ("relu2",),
    "n_shared_experts": (1,),
}
KINDS = {
    "linear_attention": "mamba",
    "mamba": "mamba",
    "full_attention": "attention",
    "attention": "attention",
    "mlp": "dense",
    "moe": "experts",
}
LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
NAMES = {
    "norm": "attn_norm",
    "mixer.in_proj": "ssm_in",
    "mixer.conv1d": "ssm_conv1d",
    "mixer.norm": "ssm_norm",
    "mixer.out_proj": "ssm_out",
    **{f"mixer.{x}_proj": f"attn_{x}" for x in "qkv"},
    "mixer.o_proj": "attn_output",
    "mixer.gate": "ffn_gate_inp",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
    **{
        f"mixer.{a}{x}_proj": f"ffn_{x}{b}"
        for x in ("up", "down")
        for a, b in (
            ("", ""),
            ("experts.{j}.", "_exps.{j}"),
            ("shared_experts.", "_shexp"),
        )
    },
}
OTHERS = {
    "mixer.A_log": "ssm_a_log",
    "mixer.D": "ssm_d",
    "mixer.dt_bias": "ssm_dt.bias",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
}


def config_of(keys: ArchitectureKeys) -> DecoderConfig:
    """What config.json says."""
    kinds = kinds_of(keys)
    mixers: dict[str, Mixer] = {
        "mamba": mamba_of(keys),
        "attention": attention_of(keys),
    }
    blocks: dict[str, FeedForward] = {}
    if "dense" in kinds:
        blocks["dense"] = Dense(positive(keys, "intermediate_size"), gated=False)
    if "experts" in kinds:
        blocks["experts"] = experts_of(keys)
    return DecoderConfig(
        **shared_keys(keys),
        eps=eps_of(keys),
        mixers=tuple(mixers.get(kind) for kind in kinds),
        feed_forwards=tuple(blocks.get(kind) for kind in kinds),
    )


def kinds_of(keys: ArchitectureKeys) -> list[str]:
    """Of each layer, in words or by a letter."""
    pattern = keys.string("hybrid_override_pattern", "")
    if not {*pattern} <= {*LETTERS}:
        raise keys.error(
            "hybrid_override_pattern", f"expected letters of {''.join(LETTERS)}"
        )
    listed = keys.strings("layers_block_type")
    layers = keys.integer("num_hidden_layers", len(listed or pattern))
    if not 1 <= layers <= len(keys.file.tensors):
        raise keys.error("num_hidden_layers", "expected a layer or more, with tensors")
    by_letter = [LETTERS[letter] for letter in pattern]
    kinds = layer_types(keys, layers, KINDS, by_letter, "layers_block_type")
    if pattern and kinds != [KINDS[kind] for kind in by_letter]:
        raise keys.error(
            "layers_block_type", "which hybrid_override_pattern contradicts"
        )
    return kinds


def eps_of(keys: ArchitectureKeys) -> float:
    """That of the norms, under one name or several."""
    eps = keys.number("layer_norm_epsilon")
    for again in ("norm_eps", "rms_norm_eps"):
        if keys.number(again, eps) != eps:
            raise keys.error(again, f"but layer_norm_epsilon is {eps}")
    return eps


def mamba_of(keys: ArchitectureKeys) -> Mamba2:
    """The sizes of Mamba-2."""
    heads, groups = positive(keys, "mamba_num_heads"), positive(keys, "n_groups")
    if heads % groups:
        raise keys.error("n_groups", f"{heads} heads cannot share them")
    if step_limits(keys) != (0.0, math.inf):
        raise keys.error("time_step_limit", "expected none: programs differ in it")
    return Mamba2(
        heads=heads,
        head_dim=positive(keys, "mamba_head_dim"),
        groups=groups,
        state_dim=positive(keys, "ssm_state_size"),
        taps=positive(keys, "conv_kernel"),
        limits=(keys.number("time_step_min", 0.001), math.inf),
        conv_bias=keys.flag("use_conv_bias", True),
        bias=keys.flag("use_bias", False),
    )


def attention_of(keys: ArchitectureKeys) -> FullAttention:
    """The heads, whose size older files call `attention_head_dim`."""
    check_said(keys, "num_key_value_heads")
    key = "head_dim" if keys.has("head_dim") else "attention_head_dim"
    size = positive(keys, key)
    if keys.integer("attention_head_dim", size) != size:
        raise keys.error("attention_head_dim", f"but head_dim is {size}")
    return attention(keys, None, head_size(keys) if key == "head_dim" else size)


def experts_of(keys: ArchitectureKeys) -> Mixture:
    """The experts, and the block that every token passes."""
    shared = positive(keys, "moe_shared_expert_intermediate_size")
    return mixture(
        keys,
        positive(keys, "n_routed_experts"),
        positive(keys, "moe_intermediate_size"),
        shared=Dense(shared, "_shexp", gated=False),
        gated=False,
        latent=keys.integer("moe_latent_size", 0),
        score="sigmoid",
        correction=True,
        normalize=keys.flag("norm_topk_prob", True),
        scaling_factor=keys.number("routed_scaling_factor", 1.0),
        num_groups=positive(keys, "n_group", 1),
        top_groups=positive(keys, "topk_group", 1),
        group_score="top2",
    )


def config_of_gguf(keys: ArchitectureKeys) -> DecoderConfig:
    """What the keys of a GGUF file say: by heads and widths which layer is what."""
    sparse = keys.arch == "nemotron_h_moe"
    features = ("layer_heads", *(("experts",) if sparse else ()))
    base = gguf_base(keys, Form(keys.arch, features=features))
    layers = own_layers(keys, base)
    heads = per_layer(keys, "attention.head_count_kv", base.layers)
    widths = per_layer(keys, "feed_forward_length", base.layers)
    if {*heads} - {0, base.kv_heads}:
        raise keys.error("attention.head_count_kv", f"expected 0 or {base.kv_heads}")
    full, mamba = gguf_attention(base, rotated=False), mamba_of_gguf(keys)

    def block(width: int) -> FeedForward:
        return experts_of_gguf(keys) if sparse else Dense(width, gated=False)

    both = list(zip(heads, widths, strict=True))[:layers]
    if any(many and width for many, width in both):
        raise keys.error("feed_forward_length", "expected 0 in layers with attention")
    return gguf_decoder(
        base,
        mixers=tuple(
            full if many else None if width else mamba for many, width in both
        ),
        feed_forwards=tuple(block(width) if width else None for _, width in both),
    )


def per_layer(keys: ArchitectureKeys, key: str, layers: int) -> Sequence[int]:
    """One number for each layer."""
    found = keys.per_layer(key) or []
    if len(found) != layers:
        raise keys.error(key, f"expected a number for each of {layers} layers")
    return found


def experts_of_gguf(keys: ArchitectureKeys) -> Mixture:
    """`experts_of` a GGUF file."""
    if keys.integer("expert_group_count", 1) != 1:
        raise keys.error("expert_group_count", "expected 1")
    if keys.integer("expert_shared_count", 1) != 1:
        raise keys.error("expert_shared_count", "expected 1")
    if keys.integer("expert_gating_func", 2) != 2:
        raise keys.error("expert_gating_func", "expected 2, sigmoid")
    shared = positive(keys, "expert_shared_feed_forward_length")
    return gguf_mixture(
        keys,
        shared=Dense(shared, "_shexp", gated=False),
        gated=False,
        latent=keys.integer("moe_latent_size", 0),
        score="sigmoid",
        correction=True,
        normalize=keys.flag("expert_weights_norm", False),
        scaling_factor=keys.number_or_none("expert_weights_scale") or 1.0,
    )


ONE_NORM: dict[str, Any] = {"mixer_norm": "attn_norm", "ffn_norm": "attn_norm"}
ARCHITECTURES = (
    folder_architecture(
        "nemotron_h",
        "nemotron_h",
        Folder(
            config_of,
            names=NAMES,
            others=OTHERS,
            model={"embeddings": "token_embd", "norm_f": "output_norm"},
            at="backbone",
            ignored=("mtp.{rest}",),
            layout=Layout(experts="single", **ONE_NORM),
            harmless=TRAINING | HARMLESS,
            without=WITHOUT,
        ),
        OfGGUF(
            "nemotron_h_moe",
            config_of_gguf,
            Layout(flat_taps=True, rates=True, **ONE_NORM),
            further_layers,
            also=("nemotron_h",),
        ),
    ),
)
