"""MiniMax M2: experts in every layer, heads that turn in part.

    x = x + attention(rms_norm(x))      q and k normalised over all heads at once
    x = x + experts(rms_norm(x))        chosen by sigmoids plus a correction

The weights of the chosen experts are normalised. config.json says how many dims of a
head turn by `rotary_dim`, or by a share of them.
"""

from jaxkern.formats.architecture_keys import ArchitectureKeys
from jaxkern.models.decoder import DecoderConfig
from jaxkern.models.decoder_files import (
    ATTENTION,
    HEAD_NORMS,
    NORMS,
    Folder,
    OfGGUF,
    folder_architecture,
)
from jaxkern.models.decoder_gguf import (
    gguf_attention,
    gguf_base,
    gguf_decoder,
    gguf_mixture,
)
from jaxkern.models.folder_keys import (
    TRAINING,
    attention,
    check_said,
    head_size,
    mixture,
    num_layers,
    positive,
    rotation,
    shared_keys,
)
from jaxkern.models.kimi_linear_files import EXPERTS
from jaxkern.models.llama_form import Form
from jaxkern.models.mixers.layout import Layout
from jaxkern.models.mixers.mixing import Rotation

FURTHER = "of layers that predict further tokens, which no file has"
HARMLESS = {
    "router_jitter_noise": "of training",
    "use_mtp": FURTHER,
    "num_mtp_modules": FURTHER,
    "mtp_transformer_layers": FURTHER,
}
WITHOUT = {
    "qk_norm_type": ("per_layer",),
    "scoring_func": ("sigmoid",),
    "shared_intermediate_size": (0,),
    "use_qk_norm": (True,),
    "use_routing_bias": (True,),
}
OTHERS = {"block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias"}


def config_of(keys: ArchitectureKeys) -> DecoderConfig:
    """What config.json says."""
    layers = num_layers(keys)
    kinds = keys.value("attn_type_list", [1] * layers)
    if kinds != [1] * layers:
        raise keys.error("attn_type_list", f"expected 1 for each of {layers} layers")
    check_said(keys, "head_dim", "num_key_value_heads")
    mixer = attention(keys, turns_of(keys), head_size(keys), wide_norms=True)
    experts = mixture(
        keys,
        positive(keys, "num_local_experts"),
        positive(keys, "intermediate_size"),
        score="sigmoid",
        correction=True,
    )
    return DecoderConfig(
        **shared_keys(keys),
        eps=keys.number("rms_norm_eps"),
        mixers=(mixer,) * layers,
        feed_forwards=(experts,) * layers,
    )


def turns_of(keys: ArchitectureKeys) -> Rotation:
    """How heads rotate: the keys that say how many dims must agree."""
    head_dim = head_size(keys)
    said = keys.integer("rotary_dim", head_dim)
    found = rotation(keys, head_dim, theta=5000000.0, share=said / head_dim)
    if keys.has("rotary_dim") and found.dim != said:
        raise keys.error("rotary_dim", f"but {found.dim} of {head_dim} dims rotate")
    return found


def config_of_gguf(keys: ArchitectureKeys) -> DecoderConfig:
    """What the keys of a GGUF file say."""
    base = gguf_base(keys, Form("minimax-m2", features=("experts",)))
    if keys.integer("expert_gating_func") != 2:
        raise keys.error("expert_gating_func", "expected 2, sigmoid")
    scale = keys.number_or_none("expert_weights_scale") or 1.0
    experts = gguf_mixture(keys, score="sigmoid", correction=True, scaling_factor=scale)
    return gguf_decoder(
        base,
        mixers=(gguf_attention(base, wide_norms=True),) * base.layers,
        feed_forwards=(experts,) * base.layers,
    )


ARCHITECTURES = (
    folder_architecture(
        "minimax-m2",
        "minimax_m2",
        Folder(
            config_of,
            names=NORMS | ATTENTION | HEAD_NORMS | EXPERTS,
            others=OTHERS,
            layout=Layout(experts="single"),
            harmless=TRAINING | HARMLESS,
            without=WITHOUT,
        ),
        OfGGUF("minimax-m2", config_of_gguf),
    ),
)
