"""gpt-oss: sinks, windows in every other layer, experts with biases and a clamped gate.

    scores get one more logit a head, the sink, that takes weight and has no value
    expert(x) = down ((up x + 1) * gate x * sigmoid(1.702 gate x)), clamped to the limit
    weights   = softmax over the k largest of router x + bias

The experts of the published files are MXFP4: `*_blocks` and `*_scales`, each group of
32 along the inputs. In every file the rows of gate and up alternate.
https://arxiv.org/abs/2508.10925
"""

import numpy as np

from jaxkern.formats.architecture_keys import ArchitectureKeys
from jaxkern.models.decoder import DecoderConfig, DecoderWeights, LayerWeights
from jaxkern.models.feed_forward import MixtureWeights
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

HARMLESS = {
    "experts_per_token": "num_experts_per_tok once more",
    "initial_context_length": "rope_scaling says it too",
    "quantization_config.modules_to_not_convert": "the dtypes of the tensors say it",
}
IGNORED: dict[str, str] = {}
KINDS = {"full_attention": "full", "sliding_attention": "window"}


def read(keys: ArchitectureKeys, num_tensors: int) -> tuple[DecoderConfig, Widths]:
    """What config.json says."""
    layers, head_dim = num_layers(keys, num_tensors), head_size(keys)
    turns = rotation(keys, head_dim, theta=150000.0)
    window = positive(keys, "sliding_window", 128)
    alternating = ["sliding_attention", "full_attention"] * layers
    kinds = layer_types(keys, layers, KINDS, alternating[:layers])
    full = attention(keys, turns, head_dim)
    windowed = attention(keys, turns, head_dim, window=window)
    experts = positive(keys, "num_local_experts")
    mixture = choice(
        keys,
        experts,
        alpha=keys.number("swiglu_alpha", 1.702),
        limit=keys.number("swiglu_limit", 7.0),
        up_offset=1.0,
    )
    method = keys.string("quantization_config.quant_method", "none")
    if method not in ("none", "mxfp4"):
        raise keys.error("quantization_config.quant_method", "known is mxfp4")
    config = DecoderConfig(
        **shared_keys(keys),
        eps=keys.number("rms_norm_eps"),
        mixers=tuple(full if kind == "full" else windowed for kind in kinds),
        feed_forwards=(mixture,) * layers,
    )
    return config, Widths(
        expert=keys.integer("intermediate_size"),
        experts=experts,
        tied=keys.flag("tie_word_embeddings", False),
        bias=keys.flag("attention_bias", True),
        packed=method == "mxfp4",
    )


def weights(
    take: FolderTensors, config: DecoderConfig, widths: Widths
) -> DecoderWeights:
    """The tensors of a folder."""
    d = config.d_model
    if widths.packed and (d % 32 or widths.expert % 32):
        raise take.folder.error(
            f"MXFP4 groups have 32 weights, which do not divide {d} or {widths.expert}"
        )

    def layer(i: int) -> LayerWeights:
        at, mixer = f"model.layers.{i}", config.mixers[i]
        assert isinstance(mixer, FullAttention)
        return LayerWeights(
            mixer_norm=take.array(f"{at}.input_layernorm.weight", (d,)),
            mixer=attention_weights(
                take, f"{at}.self_attn", mixer, d, bias=widths.bias, sinks=True
            ),
            feed_forward_norm=take.array(
                f"{at}.post_attention_layernorm.weight", (d,)
            ),
            feed_forward=expert_weights(take, f"{at}.mlp", d, widths),
        )

    layers = [layer(i) for i in range(config.layers)]
    return decoder_weights(take, config, layers, tied=widths.tied)


def expert_weights(
    take: FolderTensors, at: str, d: int, widths: Widths
) -> MixtureWeights:
    """Router and experts; the rows of gate and up taken apart."""
    e, f = widths.experts, widths.expert

    def stacked(name: str, wide: int, narrow: int) -> list:
        """`[e, wide, narrow]`; of gate_up_proj the even and the odd rows."""
        name, odd = f"{at}.experts.{name}", name == "gate_up_proj"
        parts = (slice(0, None, 2), slice(1, None, 2)) if odd else (slice(None),)
        if not widths.packed:
            rows = np.swapaxes(take.rows(name, (e, narrow, wide)), 1, 2)
            return [take.stack(rows[:, part]) for part in parts]
        groups = narrow // 32
        codes = take.rows(f"{name}_blocks", (e, wide, groups, 16), ("U8",))
        codes = codes.reshape(e, wide, narrow // 2)
        scales = take.rows(f"{name}_scales", (e, wide, groups), ("U8",))
        return [take.packed_mxfp4(codes[:, part], scales[:, part]) for part in parts]

    gate, up = stacked("gate_up_proj", 2 * f, d)
    (down,) = stacked("down_proj", d, f)
    biases = take.array(f"{at}.experts.gate_up_proj_bias", (e, 2 * f))
    return MixtureWeights(
        router=take.array(f"{at}.router.weight", (e, d)),
        router_bias=take.array(f"{at}.router.bias", (e,)),
        gate=gate,
        up=up,
        down=down,
        gate_bias=biases[:, 0::2],
        up_bias=biases[:, 1::2],
        down_bias=take.array(f"{at}.experts.down_proj_bias", (e, d)),
    )
