"""LFM2: gated short convolutions, and attention in a few layers.

    x = x + mixer(rms_norm(x))      a short convolution, or attention with normalised
                                    heads of q and k
    x = x + swiglu(rms_norm(x))
"""

from jaxkern.formats.architecture_keys import ArchitectureKeys
from jaxkern.models.decoder import DecoderConfig, DecoderWeights, LayerWeights
from jaxkern.models.feed_forward import Dense
from jaxkern.models.folder_blocks import (
    attention_weights,
    decoder_weights,
    dense_weights,
)
from jaxkern.models.folder_keys import (
    Widths,
    attention,
    head_size,
    layer_types,
    num_layers,
    positive,
    rotation,
    shared_keys,
)
from jaxkern.models.folder_tensors import FolderTensors
from jaxkern.models.mixers.full_attention import FullAttention
from jaxkern.models.mixers.short_conv import ShortConv, ShortConvWeights

HARMLESS = {
    "block_mlp_init_scale": "of weights before training",
    "block_out_init_scale": "of weights before training",
    "block_use_xavier_init": "of weights before training",
    "conv_use_xavier_init": "of weights before training",
    "full_attn_idxs": "read where there are no layer_types",
    "block_dim": "hidden_size once more",
    "conv_dim": "hidden_size once more",
    "conv_dim_out": "hidden_size once more",
    "block_norm_eps": "norm_eps once more",
    "num_heads": "num_attention_heads once more",
    "theta": "rope_theta once more",
    "block_multiple_of": "only read with block_auto_adjust_ff_dim",
    "block_ffn_dim_multiplier": "only read with block_auto_adjust_ff_dim",
}
WITHOUT = {"block_use_swiglu": (True,), "use_pos_enc": (True,)}
IGNORED: dict[str, str] = {}
KINDS = {"full_attention": "full", "conv": "conv"}
NAMES = ("w1", "w3", "w2")


def read(keys: ArchitectureKeys, num_tensors: int) -> tuple[DecoderConfig, Widths]:
    """What config.json says."""
    layers, head_dim = num_layers(keys, num_tensors), head_size(keys)
    full = keys.value("full_attn_idxs", list(range(layers)))
    if not isinstance(full, list):
        raise keys.error("full_attn_idxs", "expected a list of layers")
    default = ["full_attention" if i in full else "conv" for i in range(layers)]
    kinds = layer_types(keys, layers, KINDS, default)
    mixer = attention(keys, rotation(keys, head_dim, theta=1000000.0), head_dim)
    d = keys.integer("hidden_size")
    conv = ShortConv(channels=d, taps=positive(keys, "conv_L_cache"))
    config = DecoderConfig(
        **shared_keys(keys),
        eps=keys.number("norm_eps"),
        mixers=tuple(mixer if kind == "full" else conv for kind in kinds),
        feed_forwards=(Dense(),) * layers,
    )
    tied = keys.flag("tie_word_embeddings", True)
    return config, Widths(
        dense=feed_forward_width(keys),
        tied=keys.flag("tie_embedding", tied),
        bias=keys.flag("conv_bias", False),
    )


def feed_forward_width(keys: ArchitectureKeys) -> int:
    """Two thirds of the width in config.json, times a factor, in whole multiples."""
    width = keys.integer("block_ff_dim", keys.integer("intermediate_size", 0))
    if not keys.flag("block_auto_adjust_ff_dim", True):
        return width
    width = int(keys.number("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
    multiple = positive(keys, "block_multiple_of", 256)
    return -(-width // multiple) * multiple


def weights(
    take: FolderTensors, config: DecoderConfig, widths: Widths
) -> DecoderWeights:
    """The tensors of a folder."""
    d = config.d_model

    def layer(i: int) -> LayerWeights:
        at, mixer = f"model.layers.{i}", config.mixers[i]
        if isinstance(mixer, FullAttention):
            mixed = attention_weights(
                take,
                f"{at}.self_attn",
                mixer,
                d,
                head_norms=("q_layernorm", "k_layernorm"),
                output="out_proj",
            )
        else:
            assert isinstance(mixer, ShortConv)
            mixed = conv_weights(take, f"{at}.conv", mixer, widths.bias)
        return LayerWeights(
            mixer_norm=take.array(f"{at}.operator_norm.weight", (d,)),
            mixer=mixed,
            feed_forward_norm=take.array(f"{at}.ffn_norm.weight", (d,)),
            feed_forward=dense_weights(
                take, f"{at}.feed_forward", d, widths.dense, NAMES
            ),
        )

    layers = [layer(i) for i in range(config.layers)]
    norm = "model.embedding_norm.weight"
    return decoder_weights(take, config, layers, tied=widths.tied, norm=norm)


def conv_weights(
    take: FolderTensors, at: str, mixer: ShortConv, bias: bool
) -> ShortConvWeights:
    d = mixer.channels
    return ShortConvWeights(
        input=take.matrices(take.rows(f"{at}.in_proj.weight", (3 * d, d))),
        convolution=take.array(f"{at}.conv.weight", (d, 1, mixer.taps))[:, 0],
        output=take.matrices(take.rows(f"{at}.out_proj.weight", (d, d))),
        input_bias=take.array_if(bias, f"{at}.in_proj.bias", (3 * d,)),
        convolution_bias=take.array_if(bias, f"{at}.conv.bias", (d,)),
        output_bias=take.array_if(bias, f"{at}.out_proj.bias", (d,)),
    )
