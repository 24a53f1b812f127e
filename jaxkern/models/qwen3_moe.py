"""Qwen3-MoE: Qwen3's attention, and experts in the layers that config.json names.

    x = x + attention(rms_norm(x))          heads of q and k normalised, then rotated
    x = x + experts(rms_norm(x))            softmax over all experts, then the best k
"""

from jaxkern.formats.architecture_keys import ArchitectureKeys
from jaxkern.models.decoder import DecoderConfig, DecoderWeights, LayerWeights
from jaxkern.models.feed_forward import Mixture
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
    num_layers,
    positive,
    rotation,
    shared_keys,
    sparse_layers,
)
from jaxkern.models.folder_tensors import FolderTensors
from jaxkern.models.mixers.full_attention import FullAttention

HARMLESS = {"sliding_window": "only read with use_sliding_window"}
IGNORED: dict[str, str] = {}


def read(keys: ArchitectureKeys, num_tensors: int) -> tuple[DecoderConfig, Widths]:
    """What config.json says."""
    layers, head_dim = num_layers(keys, num_tensors), head_size(keys)
    mixer = attention(keys, rotation(keys, head_dim), head_dim)
    name = "num_experts" if keys.has("num_experts") else "num_local_experts"
    experts = positive(keys, name)
    mixture = choice(keys, experts, normalize=keys.flag("norm_topk_prob", False))
    config = DecoderConfig(
        **shared_keys(keys),
        eps=keys.number("rms_norm_eps"),
        mixers=(mixer,) * layers,
        feed_forwards=tuple(sparse_layers(keys, layers, mixture)),
    )
    return config, Widths(
        dense=keys.integer("intermediate_size"),
        expert=keys.integer("moe_intermediate_size"),
        experts=experts,
        tied=keys.flag("tie_word_embeddings", False),
        bias=keys.flag("attention_bias", False),
    )


def weights(
    take: FolderTensors, config: DecoderConfig, widths: Widths
) -> DecoderWeights:
    """The tensors of a folder."""
    d = config.d_model

    def layer(i: int) -> LayerWeights:
        at, mixer = f"model.layers.{i}", config.mixers[i]
        assert isinstance(mixer, FullAttention)
        if isinstance(config.feed_forwards[i], Mixture):
            sizes = (d, widths.expert, widths.experts)
            feed_forward = expert_weights(take, f"{at}.mlp", *sizes)
        else:
            feed_forward = dense_weights(take, f"{at}.mlp", d, widths.dense)
        return LayerWeights(
            mixer_norm=take.array(f"{at}.input_layernorm.weight", (d,)),
            mixer=attention_weights(
                take,
                f"{at}.self_attn",
                mixer,
                d,
                bias=widths.bias,
                head_norms=("q_norm", "k_norm"),
            ),
            feed_forward_norm=take.array(
                f"{at}.post_attention_layernorm.weight", (d,)
            ),
            feed_forward=feed_forward,
        )

    layers = [layer(i) for i in range(config.layers)]
    return decoder_weights(take, config, layers, tied=widths.tied)
