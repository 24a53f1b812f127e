"""gpt-oss: sinks, windows in every other layer, experts with biases and a clamped gate.

    scores get one more logit a head, the sink, that takes weight and has no value
    expert(x) = down ((up x + 1) * gate x * sigmoid(1.702 gate x)), clamped to the limit
    weights   = softmax over the k largest of router x + bias

The experts of the published files are MXFP4: `*_blocks` and `*_scales`, each group of
32 along the inputs. In every folder the rows of gate and up alternate; GGUF files have
them apart.
https://arxiv.org/abs/2508.10925
"""

from dataclasses import replace

from jaxkern import YarnScaling
from jaxkern.formats.architecture_keys import ArchitectureKeys
from jaxkern.models.decoder import DecoderConfig
from jaxkern.models.decoder_files import (
    ATTENTION,
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
    head_size,
    layer_types,
    mixture,
    num_layers,
    positive,
    rotation,
    shared_keys,
)
from jaxkern.models.llama_form import Form
from jaxkern.models.mixers.layout import Layout

HARMLESS = {
    "experts_per_token": "num_experts_per_tok once more",
    "initial_context_length": "rope_scaling says it too",
    "quantization_config.modules_to_not_convert": "the tensors say it",
}
KINDS = {"full_attention": "full", "sliding_attention": "window"}
OTHERS = {"self_attn.sinks": "attn_sinks.weight"} | {
    f"mlp.experts.{x}_proj{a}": f"ffn_{x}_exps.{b}"
    for x in ("gate_up", "down")
    for a, b in {
        "": "weight",
        "_bias": "bias",
        "_blocks": "blocks",
        "_scales": "scales",
    }.items()
}


def config_of(keys: ArchitectureKeys) -> DecoderConfig:
    """What config.json says."""
    layers, head_dim = num_layers(keys), head_size(keys)
    turns = rotation(keys, head_dim, theta=150000.0)
    window = positive(keys, "sliding_window", 128)
    alternating = ["sliding_attention", "full_attention"] * layers
    kinds = layer_types(keys, layers, KINDS, alternating[:layers])
    bias = keys.flag("attention_bias", True)
    full, near = (
        attention(keys, turns, head_dim, window=seen, bias=bias, sinks=True)
        for seen in (None, window)
    )
    width = positive(keys, "intermediate_size")
    method = keys.string("quantization_config.quant_method", "none")
    packed = any(name.endswith(".blocks") for name in keys.file.tensors)
    if method != ("mxfp4" if packed else "none"):
        raise keys.error(
            "quantization_config.quant_method",
            f"but the experts are {'' if packed else 'not '}in groups of MXFP4",
        )
    if packed and (keys.integer("hidden_size") % 32 or width % 32):
        raise keys.error("intermediate_size", "expected whole groups of 32 for MXFP4")
    experts = mixture(
        keys,
        positive(keys, "num_local_experts"),
        width,
        router_bias=True,
        bias=True,
        alpha=keys.number("swiglu_alpha", 1.702),
        limit=keys.number("swiglu_limit", 7.0),
        up_offset=1.0,
    )
    return DecoderConfig(
        **shared_keys(keys),
        eps=keys.number("rms_norm_eps"),
        mixers=tuple(full if kind == "full" else near for kind in kinds),
        feed_forwards=(experts,) * layers,
    )


def config_of_gguf(keys: ArchitectureKeys) -> DecoderConfig:
    """What the keys of a GGUF file say; alpha and limit are the published ones."""
    base = gguf_base(keys, Form("gpt-oss", pattern=2, features=("experts",)))
    if base.window is None or base.windowed is None:
        raise keys.error("attention.sliding_window", "expected a window")
    scaling = base.scaling
    if isinstance(scaling, YarnScaling):  # GGUF has no key that says so
        scaling = replace(scaling, truncate=False)
    windowed, base = base.windowed, replace(base, scaling=scaling)
    full, near = (
        gguf_attention(base, window=seen, bias=True, sinks=True)
        for seen in (None, base.window)
    )
    experts = gguf_mixture(
        keys, router_bias=True, bias=True, alpha=1.702, limit=7.0, up_offset=1.0
    )
    return gguf_decoder(
        base,
        mixers=tuple(near if sees_window else full for sees_window in windowed),
        feed_forwards=(experts,) * base.layers,
    )


ARCHITECTURES = (
    folder_architecture(
        "gpt-oss",
        "gpt_oss",
        Folder(
            config_of,
            names=NORMS | ATTENTION | {"mlp.router": "ffn_gate_inp"},
            others=OTHERS,
            layout=Layout(experts="alternating"),
            packed=Layout(experts="mxfp4"),
            harmless=TRAINING | HARMLESS,
        ),
        OfGGUF("gpt-oss", config_of_gguf, Layout(ffn_norm="post_attention_norm")),
    ),
)
