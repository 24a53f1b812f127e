"""What GGUF files of the llama page's architectures say, each key checked."""

import math
from dataclasses import replace

from jaxkern import LinearScaling, YarnScaling
from jaxkern.formats.architecture_keys import ArchitectureKeys
from jaxkern.formats.gguf import GGUFFile
from jaxkern.models.architecture import Described
from jaxkern.models.llama import LlamaConfig
from jaxkern.models.llama_form import Form, every, tensors_of
from jaxkern.primitives.rope.rope_frequencies import RopeScaling


def described_gguf(form: Form, keys: ArchitectureKeys) -> Described:
    """The config, and which tensors the file may have.

    Raises:
      GGUFError: a feature that is not built here, or metadata that are missing or
        contradict the weights.
    """
    file = keys.file
    assert isinstance(file, GGUFFile)
    config = config_of_keys(form, keys, file)
    gate = "ffn_up" if form.fused else "ffn_gate"
    infos = [file.tensors.get(f"blk.{i}.{gate}.weight") for i in range(config.layers)]
    rows = [info.shape[0] if info else -1 for info in infos]
    return config, tensors_of(
        config,
        form,
        [n // 2 for n in rows] if form.fused else rows,
        needed=(*form.products, *form.norms, *form.needed),
        optional=[name for name in form.optional if name not in form.needed],
    )


def config_of_keys(form: Form, keys: ArchitectureKeys, file: GGUFFile) -> LlamaConfig:
    if keys.integer("expert_count", 0):
        raise file.error("a mixture of experts, which is not built here")
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise file.error("has no tensor token_embd.weight of two dims")
    heads, d_model = keys.integer("attention.head_count"), table.shape[1]
    if keys.integer("embedding_length", d_model) != d_model:
        raise keys.error(
            "embedding_length", f"the rows of token_embd.weight have {d_model} elements"
        )
    kv_heads = keys.integer("attention.head_count_kv", heads)
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise file.error(f"{heads} heads cannot share {kv_heads} key/value heads")
    layers = keys.integer("block_count")
    if not 1 <= layers <= len(file.tensors):
        raise keys.error("block_count", f"the file has {len(file.tensors)} tensors")
    _check_widths(file, keys, layers)
    head_dim = keys.integer("attention.key_length", d_model // heads)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise file.error("keys and values differ in length")
    rotary_dim = keys.integer("rope.dimension_count", head_dim)
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise keys.error(
            "rope.dimension_count",
            f"expected an even number of the {head_dim} dims of a head",
        )
    context = keys.integer("context_length")
    theta = keys.number("rope.freq_base", 10000.0)
    return LlamaConfig(
        architecture=keys.arch,
        context=context,
        layers=layers,
        d_model=d_model,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=table.shape[0],
        eps=keys.number("attention.layer_norm_rms_epsilon"),
        rotary_dim=rotary_dim,
        theta=theta,
        pairing=form.pairing,
        scaling=_rope_scaling(keys, context, theta),
        window=keys.integer("attention.sliding_window", 0) or None,
        attention_scale=keys.number_or_none("attention.scale"),
        attention_softcap=keys.number_or_none("attn_logit_softcapping"),
        logit_softcap=keys.number_or_none("final_logit_softcapping"),
        rotated=every(form.rope_step, layers),
        activation=form.activation,
        embedding_scale=d_model**0.5 if form.scaled_embedding else None,
    )


def _check_widths(file: GGUFFile, keys: ArchitectureKeys, layers: int) -> None:
    """feed_forward_length, of all layers or of each, is what the weights have."""
    widths = keys.per_layer("feed_forward_length") or []
    if len(widths) not in (0, 1, layers):
        raise keys.error("feed_forward_length", f"expected one for {layers} layers")
    for i in range(layers if widths else 0):
        up = file.tensors.get(f"blk.{i}.ffn_up.weight")
        if up is not None and up.shape[0] != widths[i % len(widths)]:
            raise keys.error(
                "feed_forward_length", f"blk.{i}.ffn_up.weight has {up.shape[0]} rows"
            )


def _rope_scaling(
    keys: ArchitectureKeys, context: int, theta: float
) -> RopeScaling | None:
    """How the rotation is stretched, with the defaults and meanings of llama.cpp.

        f'  = (1 - m) f / factor + m f        m = ext_factor * (1 - ramp) of YaRN
        cos, sin times attn_factor, and times 1 + 0.1 ln(factor) if ext_factor > 0

    A missing type is "linear", a factor of 0 is 1, ext_factor is 1 for "yarn" and else
    0, the original context is the whole one. yarn_log_multiplier is DeepSeek's
    mscale_all_dim, with an mscale of 1.
    """
    kind = keys.string("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise keys.error("rope.scaling.type", "known are none, linear and yarn")
    old = keys.number_or_none("rope.scale_linear")
    new = keys.number_or_none("rope.scaling.factor")
    if old and keys.has("rope.scaling.factor") and old != new:
        raise keys.error("rope.scale_linear", f"but rope.scaling.factor is {new}")
    factor = 1.0 if kind == "none" else (new or old or 1.0)
    original = keys.integer("rope.scaling.original_context_length", 0) or context
    fast = keys.number("rope.scaling.yarn_beta_fast", 32.0)
    slow = keys.number("rope.scaling.yarn_beta_slow", 1.0)
    mscale_all_dim = keys.number_or_none("rope.scaling.yarn_log_multiplier")
    attention_factor = keys.number("rope.scaling.attn_factor", 1.0)
    yarn_attention_factor = keys.number("rope.scaling.yarn_attn_factor", 1.0)
    extrapolation = keys.number_unless_negative("rope.scaling.yarn_ext_factor")
    if extrapolation is None:
        extrapolation = float(kind == "yarn")
    if extrapolation not in (0.0, 1.0):
        raise keys.error(
            "rope.scaling.yarn_ext_factor",
            "known are 0 (no ramp), 1 (YaRN's ramp) and negative (as the type says)",
        )
    # Converters write the whole factor of cos and sin, or 1 for no other than YaRN's.
    # Programs differ in what they make of it, but not where both are the same.
    usual = (1.0, 1 + 0.1 * math.log(max(factor, 1.0)))
    if not any(math.isclose(yarn_attention_factor, u, rel_tol=1e-3) for u in usual):
        raise keys.error(
            "rope.scaling.yarn_attn_factor",
            f"expected 1 or the usual {usual[1]:.4f}. Programs read another value as "
            "different models: say it with rope.scaling.attn_factor, which multiplies",
        )
    if extrapolation == 0.0:
        if attention_factor != 1.0:
            raise keys.error(
                "rope.scaling.attn_factor", "which is built here with YaRN alone"
            )
        return None if factor == 1.0 else LinearScaling(factor)
    if fast < slow or original <= 2 * math.pi * slow or theta <= 1:
        raise keys.file.error(
            f"YaRN from {slow} to {fast} turns in {original} tokens, "
            f"{keys.arch}.rope.freq_base {theta}: expected beta_slow < beta_fast, less "
            "turns than tokens, and a base above 1"
        )
    scaling = YarnScaling(
        factor,
        original,
        beta_fast=fast,
        beta_slow=slow,
        mscale=mscale_all_dim and 1.0,
        mscale_all_dim=mscale_all_dim,
    )
    return replace(scaling, attention_factor=scaling.magnitude * attention_factor)
