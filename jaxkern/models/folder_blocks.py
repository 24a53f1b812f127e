"""Blocks of weights that folders of several model types name the same way."""

from collections.abc import Sequence

import numpy as np

from jaxkern.models.decoder import DecoderConfig, DecoderWeights, LayerWeights
from jaxkern.models.feed_forward import DenseWeights, MixtureWeights
from jaxkern.models.folder_tensors import FolderTensors
from jaxkern.models.mixers.full_attention import AttentionWeights, FullAttention

GATED = ("gate_proj", "up_proj", "down_proj")


def attention_weights(
    take: FolderTensors,
    at: str,
    mixer: FullAttention,
    d: int,
    *,
    bias: bool = False,
    head_norms: tuple[str, str] | None = None,
    norm_offset: float = 0.0,
    output: str = "o_proj",
    sinks: bool = False,
) -> AttentionWeights:
    """q, k, v and output under the prefix `at`.

    With an output gate q_proj has the rows of both, head by head.
    """
    h, n, k = mixer.head_dim, mixer.heads, mixer.kv_heads
    wide = n * h * (2 if mixer.output_gate else 1)
    query = take.rows(f"{at}.q_proj.weight", (wide, d))
    key, value = (take.rows(f"{at}.{w}_proj.weight", (k * h, d)) for w in "kv")
    rows = [query, key, value]
    if mixer.output_gate:
        by_head = query.reshape(n, 2, h, d)
        query, gate = (by_head[:, i].reshape(n * h, d) for i in range(2))
        rows = [query, key, value, gate]
    norms = [None, None]
    if head_norms is not None:
        norms = [
            take.array(f"{at}.{name}.weight", (h,), norm_offset) for name in head_norms
        ]
    return AttentionWeights(
        qkv=take.matrices(*rows),
        output=take.matrices(take.rows(f"{at}.{output}.weight", (d, n * h))),
        qkv_bias=take.arrays(
            [f"{at}.{w}_proj.bias" for w in "qkv"], (wide, k * h, k * h)
        )
        if bias
        else None,
        output_bias=take.array_if(bias, f"{at}.{output}.bias", (d,)),
        q_norm=norms[0],
        k_norm=norms[1],
        sinks=take.array_if(sinks, f"{at}.sinks", (n,)),
    )


def dense_weights(
    take: FolderTensors,
    at: str,
    d: int,
    width: int,
    names: tuple[str, str, str] = GATED,
) -> DenseWeights:
    """A gated block under the prefix `at`."""
    gate, up = (take.rows(f"{at}.{name}.weight", (width, d)) for name in names[:2])
    down = take.rows(f"{at}.{names[2]}.weight", (d, width))
    return DenseWeights(take.matrices(gate, up), take.matrices(down))


def expert_weights(
    take: FolderTensors, at: str, d: int, width: int, experts: int
) -> MixtureWeights:
    """A router `gate` and experts one by one under the prefix `at`."""

    def stacked(name: str, shape: tuple[int, int]):
        each = [
            take.rows(f"{at}.experts.{e}.{name}.weight", shape) for e in range(experts)
        ]
        return take.stack(np.stack(each))

    return MixtureWeights(
        router=take.array(f"{at}.gate.weight", (experts, d)),
        gate=stacked("gate_proj", (width, d)),
        up=stacked("up_proj", (width, d)),
        down=stacked("down_proj", (d, width)),
    )


def decoder_weights(
    take: FolderTensors,
    config: DecoderConfig,
    layers: Sequence[LayerWeights],
    *,
    tied: bool,
    norm: str = "model.norm.weight",
    norm_offset: float = 0.0,
) -> DecoderWeights:
    """The layers between embedding and output, which may be one table."""
    shape = (config.vocabulary, config.d_model)
    table = take.rows("model.embed_tokens.weight", shape)
    head = table
    if not tied:
        head = take.rows("lm_head.weight", shape)
    elif take.has("lm_head.weight"):  # a copy that some programs write
        take.rows("lm_head.weight", shape)
    return DecoderWeights(
        embedding=take.stack(table),
        layers=tuple(layers),
        output_norm=take.array(norm, (config.d_model,), norm_offset),
        output=take.matrices(head),
    )
