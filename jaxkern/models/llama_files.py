"""The architectures of the llama page, and their weights from files."""

from dataclasses import replace
from functools import partial

from jaxkern.models.architecture import Architecture
from jaxkern.models.llama import Layer, LlamaConfig, LlamaWeights
from jaxkern.models.llama_config import described_gguf
from jaxkern.models.llama_folder import described_folder, folder_names
from jaxkern.models.llama_form import (
    BIASES,
    HEAD_NORMS,
    POST_NORMS,
    PRE_NORMS,
    QKV_BIASES,
    Form,
)
from jaxkern.models.weight_reader import WeightReader

UNREAD_WINDOW = {
    "sliding_window": "only read with use_sliding_window",
    "max_window_layers": "only read with use_sliding_window",
}
USUAL = (*BIASES, *HEAD_NORMS)  # what some files of these names lack

OLMO = Form(
    "olmo2",
    norms=(*POST_NORMS, *HEAD_NORMS),
    wide_norms=True,
    pattern=4,
    features=("attention_bias",),
)
GEMMA = Form(
    "gemma2",
    norms=(*PRE_NORMS, *POST_NORMS),
    plus_one=True,
    activation="gelu_tanh",
    scaled_embedding=True,
    pattern=2,
    scale_of_width=46,
    features=(
        *("window", "softcaps", "query_pre_attn_scalar"),
        *("attention_bias", "tied", "head_dim"),
    ),
    without={
        "hidden_act": ("gelu_pytorch_tanh",),
        "use_bidirectional_attention": (False,),
    },
)

# `general.architecture` or None, `model_type` or None, and what follows from them
FORMS: tuple[tuple[str | None, str | None, Form], ...] = (
    (
        "llama",
        "llama",
        Form(
            "llama",
            optional=USUAL,
            pairing="interleaved",
            features=("attention_bias", "mlp_bias"),
            harmless=UNREAD_WINDOW,
        ),
    ),
    (None, "mistral", Form("mistral", features=("window",))),  # GGUF files say llama
    (
        "qwen2",
        "qwen2",
        Form("qwen2", optional=USUAL, needed=QKV_BIASES, harmless=UNREAD_WINDOW),
    ),
    (
        "qwen3",
        "qwen3",
        Form(
            "qwen3",
            norms=(*PRE_NORMS, *HEAD_NORMS),
            optional=BIASES,
            features=("attention_bias", "head_dim"),
            harmless=UNREAD_WINDOW,
        ),
    ),
    (
        "smollm3",
        "smollm3",
        Form(
            "smollm3",
            pairing="interleaved",
            rope_step=4,
            features=("attention_bias", "mlp_bias", "tied"),
            harmless=UNREAD_WINDOW,
        ),
    ),
    ("olmo2", "olmo2", OLMO),
    (
        None,  # GGUF files say olmo2, with a window
        "olmo3",
        replace(
            OLMO,
            name="olmo3",
            features=("attention_bias", "window", "local_rope"),
        ),
    ),
    (
        "phi3",
        "phi3",
        Form(
            "phi3",
            fused=True,
            features=("window", "partial_rotary"),
            harmless={
                "resid_pdrop": "of training",
                "embd_pdrop": "of training",
                "original_max_position_embeddings": "only read with longrope",
            },
        ),
    ),
    ("gemma2", "gemma2", GEMMA),
    (
        "gemma3",
        "gemma3_text",
        replace(
            GEMMA,
            name="gemma3",
            norms=(*GEMMA.norms, *HEAD_NORMS),
            pattern=6,
            scale_of_width=62,
            features=(*GEMMA.features, "local_rope"),
        ),
    ),
)


def weights_of(form: Form, config: LlamaConfig, reader: WeightReader) -> LlamaWeights:
    """The weights as the page takes them."""
    plus = 1.0 if form.plus_one and reader.from_folder else 0.0
    embedding, output = reader.table_and_output()
    return LlamaWeights(
        embedding=embedding,
        layers=tuple(
            layer_of(form, reader, f"blk.{i}", plus) for i in range(config.layers)
        ),
        output_norm=reader.vector("output_norm.weight", plus=plus),
        output=output,
        rope_factors=reader.vectors("rope_freqs.weight"),
    )


def layer_of(form: Form, reader: WeightReader, blk: str, plus: float) -> Layer:
    def norm(name: str):
        return reader.vectors(f"{blk}.{name}.weight", plus=plus)

    qkv = ("attn_qkv",) if form.fused else ("attn_q", "attn_k", "attn_v")
    gate_up = ("ffn_up",) if form.fused else ("ffn_gate", "ffn_up")
    return Layer(
        attention_norm=norm("attn_norm"),
        qkv=reader.matrices(*(f"{blk}.{name}.weight" for name in qkv)),
        qkv_bias=reader.vectors(*(f"{blk}.{name}.bias" for name in qkv)),
        q_norm=norm("attn_q_norm"),
        k_norm=norm("attn_k_norm"),
        attention_output=reader.matrices(f"{blk}.attn_output.weight"),
        ffn_norm=norm("ffn_norm"),
        gate_up=reader.matrices(*(f"{blk}.{name}.weight" for name in gate_up)),
        down=reader.matrices(f"{blk}.ffn_down.weight"),
        attention_output_bias=reader.vectors(f"{blk}.attn_output.bias"),
        gate_up_bias=reader.vectors(*(f"{blk}.{name}.bias" for name in gate_up)),
        down_bias=reader.vectors(f"{blk}.ffn_down.bias"),
        attention_post_norm=norm("post_attention_norm"),
        ffn_post_norm=norm("post_ffw_norm"),
    )


ARCHITECTURES = tuple(
    Architecture(
        name=form.name,
        weights=partial(weights_of, form),
        gguf=gguf,
        model_type=model_type,
        from_gguf=partial(described_gguf, form) if gguf else None,
        from_folder=partial(described_folder, form) if model_type else None,
        names=folder_names(form),
        harmless=form.harmless,
        without=form.without,
    )
    for gguf, model_type, form in FORMS
)
