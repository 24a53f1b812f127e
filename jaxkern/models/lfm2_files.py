"""LFM2: gated short convolutions, and attention in a few layers.

x = x + mixer(rms_norm(x))      a short convolution, or attention with normalised
                                heads of q and k
x = x + swiglu(rms_norm(x))
"""

from jaxkern.formats.architecture_keys import ArchitectureKeys
from jaxkern.models.decoder import DecoderConfig
from jaxkern.models.decoder_files import (
    ATTENTION,
    MODEL_NAMES,
    Folder,
    OfGGUF,
    folder_architecture,
)
from jaxkern.models.decoder_gguf import gguf_attention, gguf_base, gguf_decoder
from jaxkern.models.feed_forward import Dense
from jaxkern.models.folder_keys import (
    attention,
    head_size,
    layer_types,
    num_layers,
    positive,
    rotation,
    shared_keys,
)
from jaxkern.models.llama_form import Form
from jaxkern.models.mixers.layout import Layout
from jaxkern.models.mixers.short_conv import ShortConv

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
KINDS = {"full_attention": "full", "conv": "conv"}
NAMES = {
    **ATTENTION,
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
}
MODEL = {
    **MODEL_NAMES,
    "embedding_norm": "token_embd_norm",  # behind the last layer
}


def config_of(keys: ArchitectureKeys) -> DecoderConfig:
    """What config.json says."""
    layers, head_dim = num_layers(keys), head_size(keys)
    full = keys.value("full_attn_idxs", list(range(layers)))
    if not isinstance(full, list):
        raise keys.error("full_attn_idxs", "expected a list of layers")
    default = ["full_attention" if i in full else "conv" for i in range(layers)]
    kinds = layer_types(keys, layers, KINDS, default)
    turns = rotation(keys, head_dim, theta=1000000.0)
    mixer = attention(keys, turns, head_dim, head_norms=True)
    conv = ShortConv(
        channels=positive(keys, "hidden_size"),
        taps=positive(keys, "conv_L_cache"),
        bias=keys.flag("conv_bias", False),
    )
    return DecoderConfig(
        **shared_keys(keys),
        eps=keys.number("norm_eps"),
        mixers=tuple(mixer if kind == "full" else conv for kind in kinds),
        feed_forwards=(Dense(feed_forward_width(keys)),) * layers,
    )


def feed_forward_width(keys: ArchitectureKeys) -> int:
    """Two thirds of the width in config.json, times a factor, in whole multiples."""
    width = positive(keys, "block_ff_dim", keys.integer("intermediate_size", 0))
    if not keys.flag("block_auto_adjust_ff_dim", True):
        return width
    width = int(keys.number("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
    multiple = positive(keys, "block_multiple_of", 256)
    return -(-width // multiple) * multiple


def config_of_gguf(keys: ArchitectureKeys) -> DecoderConfig:
    """What the keys of a GGUF file say: a layer without key heads is a convolution."""
    base = gguf_base(keys, Form("lfm2", features=("layer_heads",)))
    heads = keys.per_layer("attention.head_count_kv") or []
    if len(heads) != base.layers or {*heads} - {0, base.kv_heads}:
        raise keys.error(
            "attention.head_count_kv",
            f"expected 0 or {base.kv_heads} for each of {base.layers} layers",
        )
    conv = ShortConv(base.d_model, positive(keys, "shortconv.l_cache"))
    full = gguf_attention(base, head_norms=True)
    block = Dense(positive(keys, "feed_forward_length"))
    return gguf_decoder(
        base,
        mixers=tuple(full if n else conv for n in heads),
        feed_forwards=(block,) * base.layers,
    )


ARCHITECTURES = (
    folder_architecture(
        "lfm2",
        "lfm2",
        Folder(
            config_of,
            names=NAMES,
            model=MODEL,
            layout=Layout(output_norm="token_embd_norm"),
            tied=True,
            tied_keys=("tie_word_embeddings", "tie_embedding"),
            harmless=HARMLESS,
            without={"block_use_swiglu": (True,), "use_pos_enc": (True,)},
        ),
        OfGGUF(
            "lfm2",
            config_of_gguf,
            Layout(output_norm="token_embd_norm", flat_taps=True),
        ),
    ),
)
