"""OLMoE: experts in every layer, q and k normalised over all heads at once.

x = x + attention(rms_norm(x))      https://arxiv.org/abs/2409.02060
x = x + experts(rms_norm(x))        the best k of a softmax over all, as they are
"""

from jaxkern.formats.architecture_keys import ArchitectureKeys
from jaxkern.models.decoder import DecoderConfig
from jaxkern.models.decoder_files import (
    ATTENTION,
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
)
from jaxkern.models.llama_form import Form
from jaxkern.models.mixers.layout import Layout


def config_of(keys: ArchitectureKeys) -> DecoderConfig:
    """What config.json says."""
    layers, head_dim = num_layers(keys), head_size(keys)
    bias = keys.flag("attention_bias", False)
    turns = rotation(keys, head_dim)
    mixer = attention(keys, turns, head_dim, bias=bias, wide_norms=True)
    experts = mixture(
        keys,
        positive(keys, "num_experts"),
        positive(keys, "intermediate_size"),
        normalize=keys.flag("norm_topk_prob", False),
    )
    return DecoderConfig(
        **shared_keys(keys),
        eps=keys.number("rms_norm_eps"),
        mixers=(mixer,) * layers,
        feed_forwards=(experts,) * layers,
    )


def config_of_gguf(keys: ArchitectureKeys) -> DecoderConfig:
    """What the keys of a GGUF file say; the weights of experts stay as they are."""
    base = gguf_base(keys, Form("olmoe", features=("experts",)))
    if keys.flag("expert_weights_norm", False):
        raise keys.error("expert_weights_norm", "expected weights as they are")
    width = positive(keys, "feed_forward_length")
    experts = gguf_mixture(keys, width=width, normalize=False)
    return gguf_decoder(
        base,
        mixers=(gguf_attention(base, wide_norms=True),) * base.layers,
        feed_forwards=(experts,) * base.layers,
    )


ARCHITECTURES = (
    folder_architecture(
        "olmoe",
        "olmoe",
        Folder(
            config_of,
            names=NORMS | ATTENTION | HEAD_NORMS | EXPERTS | ROUTER,
            layout=Layout(experts="single"),
            harmless=TRAINING,
        ),
        OfGGUF("olmoe", config_of_gguf),
    ),
)
