"""Keys of GGUF files that mixtures share, each checked."""

from typing import Any

from jaxkern.formats.architecture_keys import ArchitectureKeys
from jaxkern.formats.gguf import GGUFFile
from jaxkern.models.decoder import DecoderConfig, FeedForward, Mixer
from jaxkern.models.feed_forward import Mixture
from jaxkern.models.folder_keys import positive
from jaxkern.models.llama import LlamaConfig
from jaxkern.models.llama_config import config_of_keys
from jaxkern.models.llama_form import Form
from jaxkern.models.mixers.full_attention import FullAttention
from jaxkern.models.mixers.mixing import Rotation


def gguf_base(keys: ArchitectureKeys, form: Form) -> LlamaConfig:
    """What attention and embeddings are, which all architectures say the same way."""
    file = keys.file
    assert isinstance(file, GGUFFile)
    base = config_of_keys(form, keys, file)
    if base.attention_softcap or base.logit_softcap:
        raise file.error(f"soft caps, which {keys.arch} here does not have")
    if base.window and not form.pattern:
        raise keys.error("attention.sliding_window", "expected no window")
    return base


def gguf_table(keys: ArchitectureKeys) -> tuple[int, int]:
    """Tokens and width of the embedding, which the keys do not contradict."""
    table = keys.file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise keys.file.error("has no tensor token_embd.weight of two dims")
    if keys.integer("embedding_length", table.shape[1]) != table.shape[1]:
        raise keys.error(
            "embedding_length",
            f"the rows of token_embd.weight have {table.shape[1]} elements",
        )
    return table.shape


def gguf_attention(
    base: LlamaConfig, *, rotated: bool = True, **options: Any
) -> FullAttention:
    """Grouped attention, rotated in halves unless the options say otherwise."""
    turns = Rotation(base.rotary_dim, base.theta, base.scaling)
    return FullAttention(
        base.heads,
        base.kv_heads,
        base.head_dim,
        turns if rotated else None,
        scale=base.attention_scale,
        **options,
    )


def gguf_mixture(
    keys: ArchitectureKeys, *, width: int | None = None, **options: Any
) -> Mixture:
    """`expert_count` experts, of which `expert_used_count` are chosen."""
    experts, chosen = (positive(keys, f"expert_{n}count") for n in ("", "used_"))
    if chosen > experts:
        raise keys.error("expert_used_count", f"there are {experts} experts")
    width = width or positive(keys, "expert_feed_forward_length")
    return Mixture(experts, width, chosen, **options)


def further_layers(keys: ArchitectureKeys) -> int:
    """How many layers at the end predict further tokens."""
    return keys.integer("nextn_predict_layers", 0)


def own_layers(keys: ArchitectureKeys, base: LlamaConfig) -> int:
    """How many layers stand before those."""
    layers = base.layers - further_layers(keys)
    if layers < 1:
        raise keys.error("nextn_predict_layers", f"of {base.layers} layers")
    return layers


def gguf_decoder(
    base: LlamaConfig,
    *,
    mixers: tuple[Mixer | None, ...],
    feed_forwards: tuple[FeedForward | None, ...],
) -> DecoderConfig:
    """The config of the page."""
    return DecoderConfig(
        architecture=base.architecture,
        context=base.context,
        d_model=base.d_model,
        vocabulary=base.vocabulary,
        eps=base.eps,
        mixers=mixers,
        feed_forwards=feed_forwards,
    )
