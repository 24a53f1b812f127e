"""ERNIE 4.5, dense and with experts: neighbours of a head turn together.

    x = x + attention(rms_norm(x))
    x = x + block(rms_norm(x))

Experts are chosen by a softmax plus a correction; the weights of the chosen ones are
normalised, and a shared block stands beside them. The first layers are dense, and of
the others all but every so many. What predicts further tokens (`mtp_*`) is left out.
"""

from collections.abc import Callable

from jaxkern.formats.architecture_keys import ArchitectureKeys
from jaxkern.models.decoder import DecoderConfig, FeedForward
from jaxkern.models.decoder_files import (
    ATTENTION,
    DENSE,
    EXPERTS,
    NORMS,
    ROUTER,
    Folder,
    OfGGUF,
    folder_architecture,
    shared_expert,
)
from jaxkern.models.decoder_gguf import (
    gguf_attention,
    gguf_base,
    gguf_decoder,
    gguf_mixture,
)
from jaxkern.models.feed_forward import Dense, Mixture
from jaxkern.models.folder_keys import (
    TRAINING,
    attention,
    check_said,
    head_size,
    mixture,
    num_layers,
    positive,
    rotation,
    shared_keys,
)
from jaxkern.models.llama_form import Form
from jaxkern.models.mixers.layout import Layout

HARMLESS = TRAINING | {
    "moe_capacity": "of training",
    "num_nextn_predict_layers": "of what is left out",
}
WITHOUT = {
    "use_bias": (False,),
    "use_rmsnorm": (True,),
    "moe_gate": ("topk",),
    "moe_use_aux_free": (True,),
}
OTHERS = {"mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias"}
SMALLEST = 1e-9  # sum of the chosen scores, above which a bound changes nothing


def config_of(keys: ArchitectureKeys) -> DecoderConfig:
    """What config.json says."""
    experts = keys.arch == "ernie4_5_moe"
    check_said(keys, "num_key_value_heads", *(() if experts else ("head_dim",)))
    layers, head_dim = num_layers(keys), head_size(keys)
    turns = rotation(keys, head_dim, theta=500000.0)
    mixer = attention(keys, turns, head_dim, pairing="interleaved")
    block = Dense(positive(keys, "intermediate_size"))
    blocks: tuple[FeedForward, ...] = (block,) * layers
    if experts:
        sparse, is_sparse = experts_of(keys), sparse_rule(keys, layers)
        blocks = tuple(sparse if is_sparse(i) else block for i in range(layers))
    return DecoderConfig(
        **shared_keys(keys),
        eps=keys.number("rms_norm_eps"),
        mixers=(mixer,) * layers,
        feed_forwards=blocks,
    )


def experts_of(keys: ArchitectureKeys) -> Mixture:
    """The experts, and the block that every token passes."""
    width = positive(keys, "moe_intermediate_size")
    if keys.number("moe_norm_min", 1e-12) > SMALLEST:
        raise keys.error("moe_norm_min", f"expected {SMALLEST} or less")
    return mixture(
        keys,
        positive(keys, "moe_num_experts"),
        width,
        chosen_key="moe_k",
        correction=True,
        shared=Dense(width * positive(keys, "moe_num_shared_experts", 2), "_shexp"),
    )


def sparse_rule(keys: ArchitectureKeys, layers: int) -> Callable[[int], bool]:
    """Which layers have experts."""
    step = positive(keys, "moe_layer_interval", 1)
    first, last = (
        keys.value(f"moe_layer_{end}_index", default)
        for end, default in (("start", 1), ("end", -1))
    )
    for end, i, least in (("start", first, 0), ("end", last, -1)):
        if type(i) is not int or not least <= i < layers:
            raise keys.error(
                f"moe_layer_{end}_index", f"expected the number of one of {layers}"
            )
    last = layers - 1 if last == -1 else last
    return lambda i: first <= i <= last and (i + 1) % step == 0


def config_of_gguf(keys: ArchitectureKeys) -> DecoderConfig:
    """What the keys of a GGUF file say."""
    experts = keys.arch == "ernie4_5-moe"
    base = gguf_base(keys, Form(keys.arch, features=("experts",) if experts else ()))
    block = Dense(positive(keys, "feed_forward_length"))
    blocks: tuple[FeedForward, ...] = (block,) * base.layers
    if experts:
        shared = keys.integer("expert_shared_feed_forward_length", 0)
        keys.integer("expert_shared_count", 0)  # the width says it
        beside = Dense(shared, "_shexp") if shared else None
        sparse = gguf_mixture(keys, correction=True, shared=beside)
        first = keys.integer("leading_dense_block_count", 0)
        step = positive(keys, "interleave_moe_layer_step")
        blocks = tuple(
            sparse if i >= first and (i + 1) % step == 0 else block
            for i in range(base.layers)
        )
    mixer = gguf_attention(base, pairing="interleaved")
    return gguf_decoder(base, mixers=(mixer,) * base.layers, feed_forwards=blocks)


ARCHITECTURES = tuple(
    folder_architecture(
        gguf,
        model_type,
        Folder(
            config_of,
            names=NORMS | ATTENTION | DENSE | blocks,
            others=OTHERS if blocks else {},
            ignored=("model.mtp_{rest}",) if blocks else (),
            layout=Layout(experts="single", correction_row=True),
            tied=True,
            harmless=HARMLESS,
            without=WITHOUT,
        ),
        OfGGUF(gguf, config_of_gguf),
    )
    for gguf, model_type, blocks in (
        ("ernie4_5", "ernie4_5", {}),
        (
            "ernie4_5-moe",
            "ernie4_5_moe",
            EXPERTS | ROUTER | shared_expert("mlp.shared_experts"),
        ),
    )
)
