"""Qwen3-Next and the text models of Qwen3.5: gated delta nets, and some attention.

    x = x + mixer(rms_norm(x))      a gated delta net; in every fourth layer attention,
                                    a part of whose dims rotates, with an output gate
    x = x + experts(rms_norm(x))    with a shared expert and its gate; or a dense block

All norms but that of the delta net store their weight less 1. The tensors `mtp.*` of
the published files predict further tokens: they are no part of the model that gives the
logits, and are left out.
"""

import numpy as np

from jaxkern.formats.architecture_keys import ArchitectureKeys
from jaxkern.models.decoder import DecoderConfig, DecoderWeights, LayerWeights
from jaxkern.models.feed_forward import Dense, Mixture
from jaxkern.models.folder_blocks import (
    attention_weights,
    decoder_weights,
    dense_weights,
    expert_weights,
)
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
    sparse_layers,
)
from jaxkern.models.folder_tensors import FolderTensors
from jaxkern.models.mixers.delta_net import DeltaNet, DeltaNetWeights
from jaxkern.models.mixers.full_attention import FullAttention

HARMLESS = {
    "full_attention_interval": "read where there are no layer_types",
    "rope_parameters.mrope_section": "of images; text has one position",
    "rope_parameters.mrope_interleaved": "of images; text has one position",
    "intermediate_size": "of layers that this model may not have",
}
WITHOUT = {"attention_bias": (False,)}
IGNORED = {r"mtp\.": "predicts further tokens"}
KINDS = {"full_attention": "full", "linear_attention": "delta"}


def read(keys: ArchitectureKeys, num_tensors: int) -> tuple[DecoderConfig, Widths]:
    """What config.json says."""
    layers, head_dim = num_layers(keys, num_tensors), head_size(keys)
    every = positive(keys, "full_attention_interval", 4)
    default = [
        "linear_attention" if (i + 1) % every else "full_attention"
        for i in range(layers)
    ]
    kinds = layer_types(keys, layers, KINDS, default)
    turns = rotation(keys, head_dim, share=0.25)
    full = attention(keys, turns, head_dim, output_gate=True)
    delta = DeltaNet(
        key_heads=positive(keys, "linear_num_key_heads"),
        value_heads=positive(keys, "linear_num_value_heads"),
        key_dim=positive(keys, "linear_key_head_dim"),
        value_dim=positive(keys, "linear_value_head_dim"),
        taps=positive(keys, "linear_conv_kernel_dim"),
    )
    if delta.value_heads % delta.key_heads:
        raise keys.error(
            "linear_num_value_heads", f"{delta.key_heads} key heads do not divide them"
        )
    feed_forwards, experts = [Dense()] * layers, 0
    if keys.arch != "qwen3_5_text":
        experts = positive(keys, "num_experts")
        mixture = choice(keys, experts, normalize=keys.flag("norm_topk_prob", True))
        feed_forwards = sparse_layers(keys, layers, mixture)
    config = DecoderConfig(
        **shared_keys(keys),
        eps=keys.number("rms_norm_eps"),
        mixers=tuple(full if kind == "full" else delta for kind in kinds),
        feed_forwards=tuple(feed_forwards),
    )
    dense = any(isinstance(block, Dense) for block in feed_forwards)
    return config, Widths(
        dense=keys.integer("intermediate_size") if dense else 0,
        expert=keys.integer("moe_intermediate_size") if experts else 0,
        shared=keys.integer("shared_expert_intermediate_size") if experts else 0,
        experts=experts,
        tied=keys.flag("tie_word_embeddings", False),
    )


def weights(
    take: FolderTensors, config: DecoderConfig, widths: Widths
) -> DecoderWeights:
    """The tensors of a folder."""
    d = config.d_model

    def layer(i: int) -> LayerWeights:
        at, mixer = f"model.layers.{i}", config.mixers[i]
        if isinstance(mixer, FullAttention):
            norms = ("q_norm", "k_norm")
            mixed = attention_weights(
                take, f"{at}.self_attn", mixer, d, head_norms=norms, norm_offset=1.0
            )
        else:
            assert isinstance(mixer, DeltaNet)
            mixed = delta_weights(take, f"{at}.linear_attn", mixer, d)
        if isinstance(config.feed_forwards[i], Mixture):
            sizes = (d, widths.expert, widths.experts)
            shared = f"{at}.mlp.shared_expert"
            feed_forward = expert_weights(take, f"{at}.mlp", *sizes)._replace(
                shared=dense_weights(take, shared, d, widths.shared),
                shared_gate=take.array(f"{shared}_gate.weight", (1, d)),
            )
        else:
            feed_forward = dense_weights(take, f"{at}.mlp", d, widths.dense)
        norms = ("input_layernorm", "post_attention_layernorm")
        before, between = (
            take.array(f"{at}.{norm}.weight", (d,), offset=1.0) for norm in norms
        )
        return LayerWeights(before, mixed, between, feed_forward)

    layers = [layer(i) for i in range(config.layers)]
    return decoder_weights(take, config, layers, tied=widths.tied, norm_offset=1.0)


def delta_weights(
    take: FolderTensors, at: str, mixer: DeltaNet, d: int
) -> DeltaNetWeights:
    """The projections in one tensor each, or in two that run through the key heads."""
    k, n, h, hv = mixer.key_heads, mixer.value_heads, mixer.key_dim, mixer.value_dim
    if take.folder.architecture == "qwen3_next":
        wide = n // k * hv
        both = take.rows(f"{at}.in_proj_qkvz.weight", (2 * k * h + 2 * n * hv, d))
        by_head = both.reshape(k, 2 * h + 2 * wide, d)
        ends = (h, 2 * h, 2 * h + wide)
        parts = [p.reshape(-1, d) for p in np.split(by_head, ends, axis=1)]
        gates = take.rows(f"{at}.in_proj_ba.weight", (2 * n, d))
        parts += [gates.reshape(k, 2, n // k, d)[:, j].reshape(n, d) for j in (0, 1)]
    else:
        sizes = {"qkv": mixer.channels, "z": n * hv, "b": n, "a": n}
        parts = [
            take.rows(f"{at}.in_proj_{name}.weight", (size, d))
            for name, size in sizes.items()
        ]
    taps = (mixer.channels, 1, mixer.taps)
    return DeltaNetWeights(
        input=take.matrices(*parts),
        convolution=take.array(f"{at}.conv1d.weight", taps)[:, 0],
        a_log=take.array(f"{at}.A_log", (n,)),
        dt_bias=take.array(f"{at}.dt_bias", (n,)),
        norm=take.array(f"{at}.norm.weight", (hv,)),
        output=take.matrices(take.rows(f"{at}.out_proj.weight", (d, n * hv))),
    )
