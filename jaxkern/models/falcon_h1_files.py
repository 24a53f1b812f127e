"""Falcon-H1: attention and Mamba-2 beside each other in every layer, with factors.

    x = embedding(tokens) * embedding_multiplier
    x = x + attention(rms_norm(x)) + mamba2(rms_norm(x))   https://arxiv.org/abs/2507.22448
    x = x + swiglu(rms_norm(x))
    logits = rms_norm(x) @ output * lm_head_multiplier

What attention reads has a factor, its keys another and its result a third. The scores
take those of queries and keys, the result those of values and its own. Likewise
silu(m gate) is m times gate * sigmoid(m gate). In GGUF files the weights have all
factors in them.
"""

from dataclasses import replace

from jaxkern.formats.architecture_keys import ArchitectureKeys
from jaxkern.models.decoder import DecoderConfig
from jaxkern.models.decoder_files import (
    ATTENTION,
    Folder,
    OfGGUF,
    folder_architecture,
)
from jaxkern.models.decoder_gguf import gguf_attention, gguf_base, gguf_decoder
from jaxkern.models.feed_forward import Dense
from jaxkern.models.folder_keys import (
    attention,
    check_said,
    head_size,
    num_layers,
    positive,
    rotation,
    shared_keys,
)
from jaxkern.models.granite_hybrid_files import (
    MAMBA,
    OTHERS,
    mamba_of_gguf,
    step_limits,
)
from jaxkern.models.llama_form import Form
from jaxkern.models.mixers.layout import Layout
from jaxkern.models.mixers.mamba2 import Mamba2
from jaxkern.models.mixers.parallel import Parallel

HARMLESS = {
    "mamba_chunk_size": "how it is computed",
    "num_logits_to_keep": "how it is run",
    "mamba_expand": "only read without mamba_d_ssm",
    "mamba_norm_before_gate": "only read with mamba_rms_norm",
}
WITHOUT = {
    "mamba_proj_bias": (False,),
    "mamba_use_mlp": (True,),
    "projectors_bias": (False,),
}
NAMES = {
    **ATTENTION,
    **MAMBA,
    **{f"feed_forward.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
    "input_layernorm": "attn_norm",
    "pre_ff_layernorm": "ffn_norm",
}


def config_of(keys: ArchitectureKeys) -> DecoderConfig:
    """What config.json says."""
    check_said(keys, "num_key_value_heads")
    layers, head_dim = num_layers(keys), head_size(keys)
    enters = keys.number("attention_in_multiplier", 1.0)
    full = attention(
        keys,
        rotation(keys, head_dim),
        head_dim,
        scale=head_dim**-0.5 * enters**2 * keys.number("key_multiplier", 1.0),
    )
    leaves = enters * keys.number("attention_out_multiplier", 1.0)
    scales = leaves, keys.number("ssm_out_multiplier", 1.0)
    gate, down = factors_of(keys, "mlp_multipliers", 2)
    block = Dense(positive(keys, "intermediate_size"), alpha=gate, scale=gate * down)
    return DecoderConfig(
        **shared_keys(keys),
        eps=keys.number("rms_norm_eps"),
        mixers=(Parallel(full, mamba_of(keys), scales),) * layers,
        feed_forwards=(block,) * layers,
        embedding_scale=keys.number("embedding_multiplier", 1.0),
        logit_scale=keys.number("lm_head_multiplier", 1.0),
    )


def factors_of(keys: ArchitectureKeys, key: str, many: int) -> list[float]:
    """So many positive numbers, or 1 for each."""
    found = keys.numbers(key) or [1.0] * many
    if len(found) != many or min(found) <= 0:
        raise keys.error(key, f"expected {many} positive numbers")
    return found


def mamba_of(keys: ArchitectureKeys) -> Mamba2:
    """The sizes of Mamba-2, and its factors."""
    heads, groups = positive(keys, "mamba_n_heads"), positive(keys, "mamba_n_groups", 1)
    if keys.has("mamba_d_ssm"):
        width = positive(keys, "mamba_d_ssm")
    else:
        width = positive(keys, "mamba_expand", 2) * keys.integer("hidden_size")
    auto = keys.value("mamba_d_head", "auto") == "auto"
    head_dim = width // heads if auto else positive(keys, "mamba_d_head")
    if heads * head_dim != width or heads % groups:
        raise keys.error("mamba_n_heads", f"{groups} groups, {width} channels")
    gate = "alone"
    if keys.flag("mamba_rms_norm", False):
        behind = keys.flag("mamba_norm_before_gate", True)
        gate = "behind" if behind else "before"
    enters = keys.number("ssm_in_multiplier", 1.0)
    factors = [enters * factor for factor in factors_of(keys, "ssm_multipliers", 5)]
    return Mamba2(
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state_dim=positive(keys, "mamba_d_state"),
        taps=positive(keys, "mamba_d_conv"),
        limits=step_limits(keys),
        conv_bias=keys.flag("mamba_conv_bias", True),
        gate=gate,
        factors=tuple(factors),
    )


def config_of_gguf(keys: ArchitectureKeys) -> DecoderConfig:
    """What the keys of a GGUF file say; whether there is a norm its tensors do."""
    base, mamba = gguf_base(keys, Form("falcon-h1")), mamba_of_gguf(keys)
    if "blk.0.ssm_norm.weight" not in keys.file.tensors:
        mamba = replace(mamba, gate="alone")
    mixer = Parallel(gguf_attention(base), mamba)
    return gguf_decoder(
        base,
        mixers=(mixer,) * base.layers,
        feed_forwards=(Dense(positive(keys, "feed_forward_length")),) * base.layers,
    )


ARCHITECTURES = (
    folder_architecture(
        "falcon-h1",
        "falcon_h1",
        Folder(
            config_of,
            names=NAMES,
            others=OTHERS,
            model={"embed_tokens": "token_embd", "final_layernorm": "output_norm"},
            harmless=HARMLESS,
            without=WITHOUT,
        ),
        OfGGUF(
            "falcon-h1",
            config_of_gguf,
            Layout(flat_taps=True, rates=True, bare_ffn_norm=True),
        ),
    ),
)
