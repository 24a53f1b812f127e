"""Keys of `config.json` that the pages of mixtures and hybrids share."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxkern.formats.architecture_keys import ArchitectureKeys
from jaxkern.models import hugging_face
from jaxkern.models.feed_forward import Dense, Mixture
from jaxkern.models.mixers.full_attention import FullAttention
from jaxkern.models.mixers.mixing import Rotation

# Keys that change nothing in the logits, and why.
HARMLESS: Mapping[str, str] = {
    **hugging_face.HARMLESS,
    "output_router_logits": "of training",
    "router_aux_loss_coef": "of training",
    "auto_map": "the class in Python",
}
WITHOUT: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "use_sliding_window": (False,),
    "mlp_bias": (False,),
}


class Widths(NamedTuple):
    """What the tensors' shapes follow from, beside the `DecoderConfig`.

    Attributes:
      dense, expert, shared: of the feed-forward blocks.
      experts: how many a layer has.
      tied: the output is the embedding.
      bias: the projections of attention have biases.
      packed: experts are MXFP4.
    """

    dense: int = 0
    expert: int = 0
    shared: int = 0
    experts: int = 0
    tied: bool = False
    bias: bool = False
    packed: bool = False


def shared_keys(keys: ArchitectureKeys) -> dict[str, Any]:
    """What every `DecoderConfig` has, but for its layers."""
    return dict(
        architecture=keys.arch,
        context=keys.integer("max_position_embeddings"),
        d_model=keys.integer("hidden_size"),
        vocabulary=keys.integer("vocab_size"),
    )


def num_layers(keys: ArchitectureKeys, num_tensors: int) -> int:
    """num_hidden_layers, which a file of so many tensors can have."""
    layers = keys.integer("num_hidden_layers")
    if not 1 <= layers <= num_tensors:
        raise keys.error("num_hidden_layers", f"the files have {num_tensors} tensors")
    return layers


def layer_types(
    keys: ArchitectureKeys, layers: int, known: Mapping[str, str], default: list[str]
) -> list[str]:
    """The kind of each layer, by the names that `known` gives to those of the file."""
    found = keys.strings("layer_types") or default
    if len(found) != layers or not {*found} <= {*known}:
        raise keys.error(
            "layer_types", f"expected {' or '.join(known)} for each of {layers} layers"
        )
    return [known[kind] for kind in found]


def rope_key(keys: ArchitectureKeys) -> str:
    """Where the rotation is described: older files say rope_scaling."""
    prefix = f"{keys.arch}.rope_parameters."
    found = any(name.startswith(prefix) for name in keys.file.metadata)
    return "rope_parameters" if found else "rope_scaling"


def rotation(
    keys: ArchitectureKeys, head_dim: int, *, theta: float = 10000.0, share: float = 1.0
) -> Rotation:
    """The rotation of a head, of which only a share of the dims may turn."""
    context = keys.integer("max_position_embeddings")
    where = rope_key(keys)
    theta = keys.number(f"{where}.rope_theta", keys.number("rope_theta", theta))
    share = keys.number("partial_rotary_factor", share)
    share = keys.number(f"{where}.partial_rotary_factor", share)
    dim = int(head_dim * share)
    if not 2 <= dim <= head_dim or dim % 2:
        raise keys.error(
            f"{where}.partial_rotary_factor", f"{dim} of {head_dim} dims cannot rotate"
        )
    scaling = hugging_face._rope_scaling(keys, where, context, theta)
    return Rotation(dim, theta, scaling)


def attention(
    keys: ArchitectureKeys, rotation: Rotation | None, head_dim: int, **options: Any
) -> FullAttention:
    """The heads of grouped attention."""
    heads = keys.integer("num_attention_heads")
    kv_heads = keys.integer("num_key_value_heads", heads)
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise keys.error("num_key_value_heads", f"{heads} heads cannot share them")
    return FullAttention(heads, kv_heads, head_dim, rotation, **options)


def head_size(keys: ArchitectureKeys) -> int:
    """head_dim, else the model's width by its heads."""
    d, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    head_dim = keys.integer("head_dim", d // max(heads, 1))
    if head_dim < 2 or head_dim % 2:
        raise keys.error("head_dim", f"expected an even number, got {head_dim}")
    return head_dim


def positive(keys: ArchitectureKeys, key: str, default: int | None = None) -> int:
    """An integer above 0."""
    value = keys.integer(key, default)
    if value < 1:
        raise keys.error(key, "expected 1 or more")
    return value


def choice(keys: ArchitectureKeys, experts: int, **options: Any) -> Mixture:
    """The choice of num_experts_per_tok of so many experts."""
    chosen = positive(keys, "num_experts_per_tok")
    groups, top = options.get("num_groups", 1), options.get("top_groups", 1)
    if groups < 1 or experts % groups or not 1 <= top <= groups:
        raise keys.error("n_group", f"{experts} experts, of which {top} groups count")
    if chosen > experts // groups * top:
        raise keys.error("num_experts_per_tok", f"there are {experts} experts")
    return Mixture(chosen, **options)


def sparse_layers(
    keys: ArchitectureKeys, layers: int, mixture: Mixture
) -> list[Dense | Mixture]:
    """Qwen's rule of which layers have experts."""
    step = positive(keys, "decoder_sparse_step", 1)
    dense = keys.value("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(isinstance(i, int) for i in dense):
        raise keys.error("mlp_only_layers", "expected a list of layers")
    return [
        mixture if i not in dense and (i + 1) % step == 0 else Dense()
        for i in range(layers)
    ]
