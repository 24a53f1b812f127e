"""What GGUF files of the llama page's architectures say, each key checked."""

import math
from dataclasses import replace

from jaxkern import LinearScaling, LongRopeScaling, YarnScaling
from jaxkern.formats.architecture_keys import ArchitectureKeys
from jaxkern.formats.gguf import GGUFFile
from jaxkern.models.architecture import Described, Tensor
from jaxkern.models.llama import LlamaConfig, Rotation
from jaxkern.models.llama_form import Form, every, tensors_of
from jaxkern.primitives.rope.rope_frequencies import RopeScaling

FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")


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
    tensors = tensors_of(
        config,
        form,
        [n // 2 for n in rows] if form.fused else rows,
        needed=(*form.products, *form.norms, *form.needed),
        optional=[name for name in form.optional if name not in form.needed],
    )
    if isinstance(config.scaling, LongRopeScaling):  # they are read already
        tensors |= dict.fromkeys(FACTORS, Tensor(used=False))
    return config, tensors


def config_of_keys(form: Form, keys: ArchitectureKeys, file: GGUFFile) -> LlamaConfig:
    """What the keys say, checked against each other; an error names the key."""
    if "experts" not in form.features and keys.integer("expert_count", 0):
        raise file.error("a mixture of experts, which is not built here")
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise file.error("has no tensor token_embd.weight of two dims")
    heads, d_model = keys.integer("attention.head_count"), table.shape[1]
    if keys.integer("embedding_length", d_model) != d_model:
        raise keys.error(
            "embedding_length", f"the rows of token_embd.weight have {d_model} elements"
        )
    if "layer_heads" in form.features:  # 0 in layers that have no attention
        kv_heads = max(keys.per_layer("attention.head_count_kv") or [heads])
    else:
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
    scaling = longrope(keys, file, context) or gguf_rope_scaling(keys, context, theta)
    window, windowed = windows_of(form, keys, layers)
    local = None
    if "local_rope" in form.features:
        local = Rotation(keys.number("rope.freq_base_swa", 10000.0))
    elif windowed is not None and scaling is not None:  # scaled where all is seen
        local = Rotation(theta)
    of_width = layers == form.scale_of_width
    usual = (d_model // heads) ** -0.5 if of_width else None
    cap = keys.number if form.name == "gemma2" else keys.number_or_none
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
        scaling=scaling,
        window=window,
        windowed=windowed,
        local=local,
        attention_scale=keys.number_or_none("attention.scale") or usual,
        attention_softcap=cap("attn_logit_softcapping"),
        logit_softcap=cap("final_logit_softcapping"),
        rotated=every(form.rope_step, layers),
        activation=form.activation,
        embedding_scale=d_model**0.5 if form.scaled_embedding else None,
    )


def windows_of(
    form: Form, keys: ArchitectureKeys, layers: int
) -> tuple[int | None, tuple[bool, ...] | None]:
    """The window, and which layers have it; files seldom say more than the window."""
    default = None if "tied" in form.features and form.pattern else 0
    window = keys.integer("attention.sliding_window", default) or None
    if not form.pattern or window is None:
        return window, None
    windowed = every(form.pattern, layers)
    key = "attention.sliding_window_pattern"
    if keys.has(key):
        found = keys.flags(key)
        if len(found) != layers:
            raise keys.error(key, f"expected true or false for each of {layers} layers")
        windowed = tuple(found)
    return window, windowed


def longrope(
    keys: ArchitectureKeys, file: GGUFFile, context: int
) -> LongRopeScaling | None:
    """The factors of Phi-3, which are tensors, or None for a file without them."""
    if not any(name in file.tensors for name in FACTORS):
        return None
    kind = keys.string("rope.scaling.type", "longrope")
    if kind not in ("none", "longrope"):
        raise keys.error("rope.scaling.type", f"but there is a tensor {FACTORS[0]}")
    for name in FACTORS:
        info = file.tensors.get(name)
        if info is None or info.qtype != "F32" or len(info.shape) != 1:
            raise file.error(f"has no tensor {name} of numbers in F32")
    long, short = (tuple(map(float, file.view(name))) for name in FACTORS)
    if (
        len(long) != len(short)
        or not 0 < min(*long, *short) <= max(*long, *short) < 1e9
    ):
        raise file.error(
            f"{FACTORS[0]} and {FACTORS[1]} are no factors of one rotation"
        )
    original = keys.integer("rope.scaling.original_context_length", 0) or context
    factor = keys.number("rope.scaling.attn_factor", 1.0)
    return LongRopeScaling(short, long, original, attention_factor=factor)


def _check_widths(file: GGUFFile, keys: ArchitectureKeys, layers: int) -> None:
    """feed_forward_length, of all layers or of each, is what the weights have."""
    widths = keys.per_layer("feed_forward_length") or []
    if len(widths) not in (0, 1, layers):
        raise keys.error("feed_forward_length", f"expected one for {layers} layers")
    for i in range(layers if widths else 0):
        down = file.tensors.get(f"blk.{i}.ffn_down.weight")
        if down is not None and down.shape[-1] != widths[i % len(widths)]:
            raise keys.error(
                "feed_forward_length",
                f"the rows of blk.{i}.ffn_down.weight have {down.shape[-1]} elements",
            )


def gguf_rope_scaling(
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
    # Converters write Hugging Face's attention_factor: all of what multiplies cos and
    # sin, or 1 for no other than YaRN's. llama.cpp first multiplied YaRN's own by it;
    # since its pull request 17945 it computes the factor and reads none. A file with
    # another value is three models, and does not say which one was meant.
    usual = (1.0, 1 + 0.1 * math.log(max(factor, 1.0)))
    if not any(math.isclose(yarn_attention_factor, u, rel_tol=1e-3) for u in usual):
        raise keys.error(
            "rope.scaling.yarn_attn_factor",
            f"expected 1 or the usual {usual[1]:.4f}. Another value replaces that one, "
            "multiplies it or is ignored, by who reads it: say it with "
            "rope.scaling.attn_factor, which multiplies",
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
