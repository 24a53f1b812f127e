"""Qwen3-MoE: Qwen3's attention, and experts in the layers that config.json names.

x = x + attention(rms_norm(x))          heads of q and k normalised, then rotated
x = x + experts(rms_norm(x))            softmax over all experts, then the best k
"""

from jaxkern.formats.architecture_keys import ArchitectureKeys
from jaxkern.models.decoder import DecoderConfig
from jaxkern.models.decoder_files import (
    ATTENTION,
    DENSE,
    EXPERTS,
    HEAD_NORMS,
    NORMS,
    ROUTER,
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
    head_size,
    mixture,
    num_layers,
    positive,
    rotation,
    shared_keys,
    sparse_layers,
)
from jaxkern.models.llama_form import Form
from jaxkern.models.mixers.layout import Layout

HARMLESS = {
    "sliding_window": "only read with use_sliding_window",
    "max_window_layers": "only read with use_sliding_window",
}


def config_of(keys: ArchitectureKeys) -> DecoderConfig:
    """What config.json says."""
    layers, head_dim = num_layers(keys), head_size(keys)
    bias = keys.flag("attention_bias", False)
    mixer = attention(
        keys, rotation(keys, head_dim), head_dim, bias=bias, head_norms=True
    )
    name = "num_experts" if keys.has("num_experts") else "num_local_experts"
    sparse = mixture(
        keys,
        positive(keys, name),
        positive(keys, "moe_intermediate_size"),
        normalize=keys.flag("norm_topk_prob", False),
    )
    return DecoderConfig(
        **shared_keys(keys),
        eps=keys.number("rms_norm_eps"),
        mixers=(mixer,) * layers,
        feed_forwards=sparse_layers(keys, layers, sparse),
    )


def config_of_gguf(keys: ArchitectureKeys) -> DecoderConfig:
    """What the keys of a GGUF file say; the weights of experts are normalised."""
    base = gguf_base(keys, Form("qwen3moe", features=("experts",)))
    return gguf_decoder(
        base,
        mixers=(gguf_attention(base, head_norms=True),) * base.layers,
        feed_forwards=(gguf_mixture(keys),) * base.layers,
    )


ARCHITECTURES = (
    folder_architecture(
        "qwen3moe",
        "qwen3_moe",
        Folder(
            config_of,
            names=NORMS | ATTENTION | HEAD_NORMS | DENSE | EXPERTS | ROUTER,
            layout=Layout(experts="single"),
            harmless=TRAINING | HARMLESS,
        ),
        OfGGUF("qwen3moe", config_of_gguf),
    ),
)
