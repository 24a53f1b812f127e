"""What folders of Hugging Face say of the llama page's architectures."""

from jaxkern.formats.architecture_keys import ArchitectureKeys
from jaxkern.formats.safetensors import SafetensorsFolder
from jaxkern.models.architecture import Described, Tensor
from jaxkern.models.hugging_face import rope_of, rope_scaling
from jaxkern.models.llama import LlamaConfig, Rotation
from jaxkern.models.llama_form import (
    FFN_BIASES,
    HEAD_NORMS,
    POST_NORMS,
    PRE_NORMS,
    QKV_BIASES,
    Form,
    every,
    tensors_of,
)

MODEL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
PRODUCTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
HEADS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
ORDERS = {  # of a layer, by which of them it has
    PRE_NORMS: ("input_layernorm", "post_attention_layernorm"),
    POST_NORMS: ("post_attention_layernorm", "post_feedforward_layernorm"),
    (*PRE_NORMS, *POST_NORMS): (
        "input_layernorm",
        "pre_feedforward_layernorm",
        "post_attention_layernorm",
        "post_feedforward_layernorm",
    ),
}
ENDS = ("weight", "bias")
SAME_HEADS = ("llama", "smollm3", "olmo2", "olmo3", "phi3")  # where keys do not say
GELU = "gelu_pytorch_tanh"
COMPUTED = "rotary_emb.inv_freq"  # in old files


def folder_names(form: Form) -> dict[str, str]:
    """Names of a folder's tensors, see `Architecture.names`."""
    names = dict(MODEL_NAMES)
    layer = {f"{a}.{end}": f"{b}.{end}" for a, b in PRODUCTS.items() for end in ENDS}
    layer |= {f"{a}.weight": f"{b}.weight" for a, b in HEADS.items()}
    norms = tuple(name for name in form.norms if name not in HEAD_NORMS)
    layer |= {f"{a}.weight": b for a, b in zip(ORDERS[norms], norms, strict=True)}
    layer[f"self_attn.{COMPUTED}"] = COMPUTED
    return names | {
        f"model.layers.{{i}}.{a}": f"blk.{{i}}.{b}" for a, b in layer.items()
    }


def described_folder(form: Form, keys: ArchitectureKeys) -> Described:
    """The config, and exactly the tensors that config.json says.

    Raises:
      SafetensorsError: a feature that is not built here, or keys that are missing or
        contradict the weights.
    """
    folder = keys.file
    assert isinstance(folder, SafetensorsFolder)
    config = config_of_keys(form, keys, len(folder.tensors))
    bias = "attention_bias" in form.features and keys.flag("attention_bias", False)
    wide = "mlp_bias" in form.features and keys.flag("mlp_bias", False)
    here = {
        **dict.fromkeys((*form.products, *form.norms, *form.needed)),
        **dict.fromkeys((*QKV_BIASES, "attn_output.bias") if bias else ()),
        **dict.fromkeys(FFN_BIASES if wide else ()),
    }
    tied = keys.flag("tie_word_embeddings", "tied" in form.features)
    widths = [keys.integer("intermediate_size")] * config.layers
    output = () if tied else ("output.weight",)
    tensors = tensors_of(config, form, widths, needed=[*here], model=output)
    del tensors["rope_freqs.weight"]
    if tied:
        tensors["output.weight"] = Tensor(used=False)
    for i in range(config.layers):
        tensors[f"blk.{i}.{COMPUTED}"] = Tensor(used=False)
    return config, tensors


def config_of_keys(form: Form, keys: ArchitectureKeys, num_tensors: int) -> LlamaConfig:
    """What the keys say, checked against each other; an error names the key."""
    d_model, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    many = heads if form.name in SAME_HEADS else None  # else the default is another
    kv_heads = keys.integer("num_key_value_heads", many)
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise keys.error("num_key_value_heads", f"{heads} heads cannot share them")
    own = "head_dim" in form.features  # its default is not what follows
    head_dim = keys.integer("head_dim", None if own else d_model // heads)
    if head_dim < 2 or head_dim % 2:
        raise keys.error("head_dim", f"expected an even number, got {head_dim}")
    layers = keys.integer("num_hidden_layers")
    if not 1 <= layers <= num_tensors:
        raise keys.error("num_hidden_layers", f"the files have {num_tensors} tensors")
    context = keys.integer("max_position_embeddings")
    window, windowed = windows_of(form, keys, layers)
    rotation, local = rotations_of(form, keys, context)
    part = 1.0
    if "partial_rotary" in form.features:
        part = keys.number("rope_parameters.partial_rotary_factor", 1.0)
        part = keys.number("partial_rotary_factor", part)
    rotary_dim = int(head_dim * part)
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise keys.error(
            "partial_rotary_factor", f"{rotary_dim} of {head_dim} dims cannot rotate"
        )
    capped = "softcaps" in form.features
    cap = keys.number if form.name == "gemma2" else keys.number_or_none
    gelu = form.activation == "gelu_tanh"
    if gelu and keys.string("hidden_activation", GELU) != GELU:
        raise keys.error("hidden_activation", f"expected {GELU}")
    scale = None
    if "query_pre_attn_scalar" in form.features:
        scale = keys.number("query_pre_attn_scalar") ** -0.5
    return LlamaConfig(
        architecture=keys.arch,
        context=context,
        layers=layers,
        d_model=d_model,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=keys.integer("vocab_size"),
        eps=keys.number("rms_norm_eps"),
        rotary_dim=rotary_dim,
        theta=rotation.theta,
        pairing="neox",
        scaling=rotation.scaling,
        window=window,
        windowed=windowed,
        local=local,
        rotated=rotated_of(form, keys, layers),
        attention_scale=scale,
        attention_softcap=cap("attn_logit_softcapping") if capped else None,
        logit_softcap=cap("final_logit_softcapping") if capped else None,
        activation=form.activation,
        embedding_scale=d_model**0.5 if form.scaled_embedding else None,
    )


def windows_of(
    form: Form, keys: ArchitectureKeys, layers: int
) -> tuple[int | None, tuple[bool, ...] | None]:
    """The window, and which layers have it."""
    kinds = keys.strings("layer_types")
    if "window" not in form.features:
        if any(kind != "full_attention" for kind in kinds):
            raise keys.error("layer_types", "expected full_attention in every layer")
        return None, None
    window = keys.integer("sliding_window", 0) or None
    step = form.pattern
    for name in ("sliding_window_pattern", "_sliding_window_pattern") if step else ():
        step = keys.integer(name, step)  # of files before layer_types, which say more
    if not kinds or not step:
        return window, every(step, layers)
    if {*kinds} - {"full_attention", "sliding_attention"} or len(kinds) != layers:
        raise keys.error(
            "layer_types",
            "expected full_attention or sliding_attention for each layer",
        )
    return window, tuple(kind == "sliding_attention" for kind in kinds)


def rotations_of(
    form: Form, keys: ArchitectureKeys, context: int
) -> tuple[Rotation, Rotation | None]:
    """Of layers that see every key, and of those with the window if it is another."""
    if "local_rope" not in form.features:
        return Rotation(*rope_of(keys, context)), None
    far, near = (f"rope_parameters.{kind}_attention" for kind in ("full", "sliding"))
    base = 10000.0 if form.name == "gemma3" else None
    if keys.has_within(far):
        theta = keys.number(f"{far}.rope_theta")
        scaling = rope_scaling(keys, far, context, theta)
        local = keys.number(f"{near}.rope_theta", base)
        return Rotation(theta, scaling), Rotation(
            local, rope_scaling(keys, near, context, local)
        )
    theta, scaling = rope_of(keys, context, 1e6 if base else None)
    local = theta if base is None else keys.number("rope_local_base_freq", base)
    return Rotation(theta, scaling), Rotation(local)


def rotated_of(
    form: Form, keys: ArchitectureKeys, layers: int
) -> tuple[bool, ...] | None:
    """Which layers rotate."""
    if not form.rope_step:
        return None
    step = keys.integer("no_rope_layer_interval", form.rope_step)
    rotates = keys.per_layer("no_rope_layers")
    if rotates is None:
        return every(step, layers)
    if len(rotates) != layers or {*rotates} - {0, 1}:
        raise keys.error("no_rope_layers", "expected 0 or 1 for each layer")
    return tuple(map(bool, rotates))
