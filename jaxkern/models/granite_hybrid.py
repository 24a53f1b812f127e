"""Granite 4 (hybrid): Mamba-2 and some attention, experts beside a shared block.

    x = x + r * mixer(rms_norm(x))      Mamba-2, or attention, mostly without rotation
    x = x + r * (experts(rms_norm(x)) + shared(rms_norm(x)))

The embeddings have a factor, the logits a divisor, the scores a scale of their own.
A model without experts has the shared block alone.
"""

import math

from jaxkern.formats.architecture_keys import ArchitectureKeys
from jaxkern.models.decoder import DecoderConfig, DecoderWeights, LayerWeights
from jaxkern.models.feed_forward import Dense, DenseWeights, MixtureWeights
from jaxkern.models.folder_blocks import attention_weights, decoder_weights
from jaxkern.models.folder_keys import (
    Widths,
    attention,
    choice,
    head_size,
    layer_types,
    num_layers,
    positive,
    rotation,
    shared_keys,
)
from jaxkern.models.folder_tensors import FolderTensors
from jaxkern.models.mixers.full_attention import FullAttention
from jaxkern.models.mixers.mamba2 import Mamba2, Mamba2Weights

HARMLESS = {
    "mamba_chunk_size": "how it is computed",
    "init_method": "of weights before training",
    "rope_theta": "only read with position_embedding_type rope",
    "rope_parameters.rope_theta": "only read with position_embedding_type rope",
    "rope_parameters.rope_type": "only read with position_embedding_type rope",
    "num_experts_per_tok": "only read with num_local_experts",
    "intermediate_size": "only read with num_local_experts",
}
WITHOUT = {"normalization_function": ("rmsnorm",)}
IGNORED: dict[str, str] = {}
KINDS = {
    "full_attention": "full",
    "attention": "full",
    "linear_attention": "mamba",
    "mamba": "mamba",
}


def read(keys: ArchitectureKeys, num_tensors: int) -> tuple[DecoderConfig, Widths]:
    """What config.json says."""
    layers, head_dim = num_layers(keys, num_tensors), head_size(keys)
    kinds = layer_types(keys, layers, KINDS, ["mamba"] * layers)
    position = keys.string("position_embedding_type", "nope")
    if position not in ("nope", "rope"):
        raise keys.error("position_embedding_type", "known are nope and rope")
    turns = rotation(keys, head_dim) if position == "rope" else None
    scale = keys.number("attention_multiplier", 1.0)
    mixer, scan = attention(keys, turns, head_dim, scale=scale), mamba(keys)
    experts = keys.integer("num_local_experts", 0)
    block = choice(keys, experts) if experts else Dense()
    config = DecoderConfig(
        **shared_keys(keys),
        eps=keys.number("rms_norm_eps"),
        mixers=tuple(mixer if kind == "full" else scan for kind in kinds),
        feed_forwards=(block,) * layers,
        embedding_scale=keys.number("embedding_multiplier", 1.0),
        residual_scale=keys.number("residual_multiplier", 1.0),
        logit_scale=1.0 / keys.number("logits_scaling", 1.0),
    )
    return config, Widths(
        expert=keys.integer("intermediate_size") if experts else 0,
        shared=keys.integer("shared_intermediate_size"),
        experts=experts,
        tied=keys.flag("tie_word_embeddings", False),
        bias=keys.flag("attention_bias", False),
    )


def mamba(keys: ArchitectureKeys) -> Mamba2:
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


def weights(
    take: FolderTensors, config: DecoderConfig, widths: Widths
) -> DecoderWeights:
    """The tensors of a folder."""
    d = config.d_model

    def layer(i: int) -> LayerWeights:
        at, mixer = f"model.layers.{i}", config.mixers[i]
        if isinstance(mixer, FullAttention):
            where = f"{at}.self_attn"
            mixed = attention_weights(take, where, mixer, d, bias=widths.bias)
        else:
            assert isinstance(mixer, Mamba2)
            mixed = mamba_weights(take, f"{at}.mamba", mixer, d)
        feed_forward = shared = shared_weights(take, f"{at}.shared_mlp", d, widths)
        if widths.experts:
            experts = mixture_weights(take, f"{at}.block_sparse_moe", d, widths)
            feed_forward = experts._replace(shared=shared)
        return LayerWeights(
            mixer_norm=take.array(f"{at}.input_layernorm.weight", (d,)),
            mixer=mixed,
            feed_forward_norm=take.array(
                f"{at}.post_attention_layernorm.weight", (d,)
            ),
            feed_forward=feed_forward,
        )

    layers = [layer(i) for i in range(config.layers)]
    return decoder_weights(take, config, layers, tied=widths.tied)


def mamba_weights(
    take: FolderTensors, at: str, mixer: Mamba2, d: int
) -> Mamba2Weights:
    n, wide, f = mixer.heads, mixer.width, mixer.width + mixer.channels + mixer.heads
    taps = (mixer.channels, 1, mixer.taps)
    return Mamba2Weights(
        input=take.matrices(take.rows(f"{at}.in_proj.weight", (f, d))),
        convolution=take.array(f"{at}.conv1d.weight", taps)[:, 0],
        convolution_bias=take.array_if(
            mixer.conv_bias, f"{at}.conv1d.bias", (mixer.channels,)
        ),
        a_log=take.array(f"{at}.A_log", (n,)),
        dt_bias=take.array(f"{at}.dt_bias", (n,)),
        skip=take.array(f"{at}.D", (n,)),
        norm=take.array(f"{at}.norm.weight", (wide,)),
        output=take.matrices(take.rows(f"{at}.out_proj.weight", (d, wide))),
        input_bias=take.array_if(mixer.bias, f"{at}.in_proj.bias", (f,)),
        output_bias=take.array_if(mixer.bias, f"{at}.out_proj.bias", (d,)),
    )


def shared_weights(
    take: FolderTensors, at: str, d: int, widths: Widths
) -> DenseWeights:
    """Gate and up lie in one tensor."""
    f = widths.shared
    return DenseWeights(
        gate_up=take.matrices(take.rows(f"{at}.input_linear.weight", (2 * f, d))),
        down=take.matrices(take.rows(f"{at}.output_linear.weight", (d, f))),
    )


def mixture_weights(
    take: FolderTensors, at: str, d: int, widths: Widths
) -> MixtureWeights:
    """All experts in one tensor, the rows of gate before those of up."""
    e, f = widths.experts, widths.expert
    both = take.rows(f"{at}.input_linear.weight", (e, 2 * f, d))
    return MixtureWeights(
        router=take.array(f"{at}.router.layer.weight", (e, d)),
        gate=take.stack(both[:, :f]),
        up=take.stack(both[:, f:]),
        down=take.stack(take.rows(f"{at}.output_linear.weight", (e, d, f))),
    )
