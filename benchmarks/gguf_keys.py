"""Keys of a model's GGUF file, as llama.cpp's converter writes them.

They are given without the architecture that stands before each.
"""

from typing import Any

from jaxkern import YarnScaling
from jaxkern.models.decoder import DecoderConfig
from jaxkern.models.feed_forward import Dense, Mixture
from jaxkern.models.gemma4 import Gemma4Config
from jaxkern.models.mixers.delta_net import DeltaNet
from jaxkern.models.mixers.full_attention import FullAttention
from jaxkern.models.mixers.mixing import Rotation


def gguf_keys(config: DecoderConfig | Gemma4Config) -> dict[str, Any]:
    """Of Gemma 4, or a decoder of attention, delta nets and one kind of blocks."""
    keys = {
        "block_count": config.layers,
        "context_length": config.context,
        "embedding_length": config.d_model,
        "attention.layer_norm_rms_epsilon": config.eps,
    }
    if isinstance(config, Gemma4Config):
        return keys | gemma4_keys(config)
    layers = [m for m in config.mixers if isinstance(m, FullAttention)]
    rotation = layers[0].rotation
    assert rotation is not None
    keys |= attention_keys(layers, rotation)
    net = next((m for m in config.mixers if isinstance(m, DeltaNet)), None)
    if net is not None:
        interval = [isinstance(m, FullAttention) for m in config.mixers].index(True) + 1
        keys |= delta_keys(net, interval)
        if config.architecture.startswith("qwen3_5"):  # of images; in texts no matter
            pairs = rotation.dim // 2
            sections = [*((pairs + i) // 3 for i in (2, 1, 0)), 0]
            keys["rope.dimension_sections"] = sections
    return keys | block_keys(config)


def attention_keys(layers: list[FullAttention], rotation: Rotation) -> dict[str, Any]:
    """Of layers that differ in their windows alone."""
    mixer = layers[0]
    keys: dict[str, Any] = {
        "attention.head_count": mixer.heads,
        "attention.head_count_kv": mixer.kv_heads,
        "attention.key_length": mixer.head_dim,
        "attention.value_length": mixer.head_dim,
        "rope.dimension_count": rotation.dim,
        "rope.freq_base": rotation.theta,
    }
    if windows := {m.window for m in layers if m.window}:
        (keys["attention.sliding_window"],) = windows
    if isinstance(rotation.scaling, YarnScaling):
        keys["rope.scaling.type"] = "yarn"
        keys["rope.scaling.factor"] = rotation.scaling.factor
        keys["rope.scaling.original_context_length"] = rotation.scaling.original_length
        keys["rope.scaling.yarn_beta_fast"] = rotation.scaling.beta_fast
        keys["rope.scaling.yarn_beta_slow"] = rotation.scaling.beta_slow
    return keys


def delta_keys(net: DeltaNet, interval: int) -> dict[str, Any]:
    """Of gated delta nets in all layers but every so many."""
    return {
        "full_attention_interval": interval,
        "ssm.conv_kernel": net.taps,
        "ssm.state_size": net.key_dim,
        "ssm.group_count": net.key_heads,
        "ssm.time_step_rank": net.value_heads,
        "ssm.inner_size": net.value_heads * net.value_dim,
    }


def block_keys(config: DecoderConfig) -> dict[str, Any]:
    """Of the dense blocks or experts, the same in every layer."""
    block = config.feed_forwards[0]
    if isinstance(block, Dense):
        return {"feed_forward_length": block.width}
    assert isinstance(block, Mixture)
    keys = {
        "expert_count": block.experts,
        "expert_used_count": block.chosen,
        "expert_feed_forward_length": block.width,
    }
    if block.shared is not None:
        keys["expert_shared_feed_forward_length"] = block.shared.width
    return keys


def gemma4_keys(config: Gemma4Config) -> dict[str, Any]:
    """Of Gemma 4, but for how wide its dense blocks are."""
    near, far = config.near, config.far
    keys: dict[str, Any] = {
        "attention.head_count": config.heads,
        "attention.head_count_kv": [
            near.kv_heads if seen else far.kv_heads for seen in config.windowed
        ],
        "attention.sliding_window": config.window,
        "attention.sliding_window_pattern": list(config.windowed),
        "attention.shared_kv_layers": config.shared,
        "embedding_length_per_layer_input": config.per_layer,
        "final_logit_softcapping": config.logit_softcap,
        "rope.freq_base": far.theta,
        "rope.freq_base_swa": near.theta,
    }
    for end, heads in (("", far), ("_swa", near)):
        for key in ("attention.key_length", "attention.value_length"):
            keys[key + end] = heads.head_dim
        keys[f"rope.dimension_count{end}"] = heads.head_dim
    if config.experts:
        keys |= {"expert_count": config.experts, "expert_used_count": config.chosen}
        keys["expert_feed_forward_length"] = config.expert_width
    return keys
