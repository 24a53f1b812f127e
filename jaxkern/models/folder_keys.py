"""Keys of `config.json` that mixtures and hybrids share, each checked."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxkern.formats.architecture_keys import ArchitectureKeys
from jaxkern.models.feed_forward import Dense, Mixture
from jaxkern.models.hugging_face import rope_of
from jaxkern.models.mixers.full_attention import FullAttention
from jaxkern.models.mixers.mixing import Rotation

TRAINING = {
    "output_router_logits": "of training",
    "router_aux_loss_coef": "of training",
    "auto_map": "the class in Python",
}


def shared_keys(keys: ArchitectureKeys) -> dict[str, Any]:
    """What every `DecoderConfig` has, but for its layers and eps."""
    return dict(
        architecture=keys.arch,
        context=keys.integer("max_position_embeddings"),
        d_model=positive(keys, "hidden_size"),
        vocabulary=keys.integer("vocab_size"),
    )


def positive(keys: ArchitectureKeys, key: str, default: int | None = None) -> int:
    """An integer above 0."""
    value = keys.integer(key, default)
    if value < 1:
        raise keys.error(key, "expected 1 or more")
    return value


def check_said(keys: ArchitectureKeys, *names: str) -> None:
    """That integers are there whose default does not follow from others.

    Raises:
      SafetensorsError: one of them is missing.
    """
    for name in names:
        keys.integer(name)


def num_layers(keys: ArchitectureKeys) -> int:
    """num_hidden_layers, which a file of so many tensors can have."""
    layers, num_tensors = keys.integer("num_hidden_layers"), len(keys.file.tensors)
    if not 1 <= layers <= num_tensors:
        raise keys.error("num_hidden_layers", f"the files have {num_tensors} tensors")
    return layers


def layer_types(
    keys: ArchitectureKeys,
    layers: int,
    known: Mapping[str, str],
    default: list[str],
    key: str = "layer_types",
) -> list[str]:
    """The kind of each layer, by the names that `known` gives to those of the file."""
    found = keys.strings(key) or default
    if len(found) != layers or not {*found} <= {*known}:
        raise keys.error(
            key, f"expected {' or '.join(known)} for each of {layers} layers"
        )
    return [known[kind] for kind in found]


def rotation(
    keys: ArchitectureKeys,
    head_dim: int,
    *,
    theta: float = 10000.0,
    share: float | None = None,
) -> Rotation:
    """The rotation of a head; with `share` config.json may say how many dims turn."""
    theta, scaling = rope_of(keys, keys.integer("max_position_embeddings"), theta)
    dim = head_dim
    if share is not None:
        share = keys.number("partial_rotary_factor", share)
        share = keys.number("rope_parameters.partial_rotary_factor", share)
        dim = int(head_dim * share)
    if not 2 <= dim <= head_dim or dim % 2:
        raise keys.error(
            "partial_rotary_factor", f"{dim} of {head_dim} dims cannot rotate"
        )
    return Rotation(dim, theta, scaling)


def head_size(keys: ArchitectureKeys) -> int:
    """head_dim, else the model's width by its heads."""
    d, heads = keys.integer("hidden_size"), positive(keys, "num_attention_heads")
    head_dim = keys.integer("head_dim", d // heads)
    if head_dim < 2 or head_dim % 2:
        raise keys.error("head_dim", f"expected an even number, got {head_dim}")
    return head_dim


def attention(
    keys: ArchitectureKeys, rotation: Rotation | None, head_dim: int, **options: Any
) -> FullAttention:
    """The heads of grouped attention."""
    heads = positive(keys, "num_attention_heads")
    kv_heads = keys.integer("num_key_value_heads", heads)
    if kv_heads < 1 or heads % kv_heads:
        raise keys.error("num_key_value_heads", f"{heads} heads cannot share them")
    return FullAttention(heads, kv_heads, head_dim, rotation, **options)


def mixture(
    keys: ArchitectureKeys,
    experts: int,
    width: int,
    *,
    chosen_key: str = "num_experts_per_tok",
    groups_key: str = "n_group",
    **options: Any,
) -> Mixture:
    """So many experts, of which as many are chosen as `chosen_key` says."""
    found = Mixture(experts, width, positive(keys, chosen_key), **options)
    groups, top = found.num_groups, found.top_groups
    if experts % groups or not top <= groups:
        raise keys.error(groups_key, f"{experts} experts, of which {top} groups count")
    if found.chosen > experts // groups * top:
        raise keys.error(chosen_key, f"there are {experts} experts")
    return found


def sparse_layers(
    keys: ArchitectureKeys, layers: int, sparse: Mixture
) -> tuple[Dense | Mixture, ...]:
    """Qwen's rule of which layers have experts."""
    step = positive(keys, "decoder_sparse_step", 1)
    dense = keys.value("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise keys.error("mlp_only_layers", "expected a list of layers")
    is_sparse = [i not in dense and (i + 1) % step == 0 for i in range(layers)]
    other = Dense(keys.integer("intermediate_size", 0))
    if not all(is_sparse):
        other = replace(other, width=positive(keys, "intermediate_size"))
    return tuple(sparse if chosen else other for chosen in is_sparse)
