"""What GGUF files say of the Gemma 4 page.

Keys and values of layers that see all are longer than those of layers with the window
(`attention.key_length`, `_swa`). Which pairs of a long head rotate says the tensor
`rope_freqs`: those whose frequency is divided by 1, the others by 1e30. Where a layer
has no `attn_v` its keys are its values; `feed_forward_length` may differ by layer.
"""

from typing import Any

import numpy as np

from jaxkern.formats.architecture_keys import ArchitectureKeys
from jaxkern.formats.gguf import GGUFFile
from jaxkern.models.architecture import Described, Tensor
from jaxkern.models.decoder_gguf import gguf_mixture, gguf_table
from jaxkern.models.folder_keys import positive
from jaxkern.models.gemma4 import Gemma4Config
from jaxkern.models.gemma4_tensors import model_tensors
from jaxkern.models.gemma4_weights import Heads

FACTORS = "rope_freqs.weight"
STILL = 1e29  # frequencies divided by more do not turn


def config_of_gguf(keys: ArchitectureKeys, windowed: tuple[bool, ...]) -> Gemma4Config:
    """The config of a file of which these layers see the window."""
    file = keys.file
    assert isinstance(file, GGUFFile)
    vocabulary, d_model = gguf_table(keys)
    layers, heads = len(windowed), positive(keys, "attention.head_count")
    shared = keys.integer("attention.shared_kv_layers", 0)
    if shared >= layers or {*windowed} - {*windowed[: layers - shared]}:
        raise keys.error(
            "attention.shared_kv_layers", "some have no layer to read keys of"
        )
    theta = keys.number("rope.freq_base", 10000.0)
    near_theta = keys.number("rope.freq_base_swa", theta)
    near_dim, far_dim = length_of(keys, "_swa"), length_of(keys, "")
    near_heads, far_heads = (
        key_heads(keys, [i for i in range(layers) if windowed[i] == kind], heads)
        for kind in (True, False)
    )
    own = [i for i in range(layers - shared) if not windowed[i]]
    with_values = [f"blk.{i}.attn_v.weight" in file.tensors for i in own]
    if len({*with_values}) > 1:
        raise file.error("some layers that see all have attn_v and some have not")
    experts: dict[str, Any] = {}
    if keys.integer("expert_count", 0):
        found = gguf_mixture(keys)
        experts = dict(
            experts=found.experts, chosen=found.chosen, expert_width=found.width
        )
    return Gemma4Config(
        architecture=keys.arch,
        context=positive(keys, "context_length"),
        layers=layers,
        d_model=d_model,
        heads=heads,
        vocabulary=vocabulary,
        eps=keys.number("attention.layer_norm_rms_epsilon"),
        window=positive(keys, "attention.sliding_window"),
        windowed=windowed,
        near=Heads(near_heads, near_dim, near_theta, near_dim // 2),
        far=Heads(
            far_heads,
            far_dim,
            theta,
            rotated_pairs(file, far_dim // 2) if own else far_dim // 2,
            keys_as_values=bool(own) and not any(with_values),
        ),
        shared=shared,
        per_layer=keys.integer("embedding_length_per_layer_input", 0),
        logit_softcap=keys.number_or_none("final_logit_softcapping"),
        **experts,
    )


def windows_of(keys: ArchitectureKeys) -> tuple[bool, ...]:
    """Which layers see the window, one answer for each layer."""
    layers = positive(keys, "block_count")
    if layers > len(keys.file.tensors):
        raise keys.error(
            "block_count", f"the file has {len(keys.file.tensors)} tensors"
        )
    found = keys.flags("attention.sliding_window_pattern")
    if len(found) != layers:
        raise keys.error(
            "attention.sliding_window_pattern",
            f"expected true or false for each of {layers} layers",
        )
    return tuple(found)


def length_of(keys: ArchitectureKeys, end: str) -> int:
    """Dims of a head, all of which the rotation knows."""
    length = positive(keys, f"attention.key_length{end}")
    for key in (f"attention.value_length{end}", f"rope.dimension_count{end}"):
        if keys.integer(key, length) != length or length % 2:
            raise keys.error(key, f"expected the even length of a key, {length}")
    return length


def key_heads(keys: ArchitectureKeys, layers: list[int], heads: int) -> int:
    """Key heads of these layers, which have as many each."""
    key = "attention.head_count_kv"
    said = keys.per_layer(key) or [heads]
    found = {said[i % len(said)] for i in layers} or {heads}
    if (len(said) > 1 and len(said) <= max(layers, default=0)) or len(found) != 1:
        raise keys.error(key, "expected one number for all layers of a kind")
    (number,) = found
    if number < 1 or heads % number:
        raise keys.error(key, f"{heads} heads cannot share them")
    return number


def rotated_pairs(file: GGUFFile, pairs: int) -> int:
    """How many of the first pairs rotate, by the factors in the file."""
    info = file.tensors.get(FACTORS)
    if info is None or info.qtype != "F32" or info.shape != (pairs,):
        raise file.error(f"has no tensor {FACTORS} of {pairs} numbers in F32")
    factors = np.asarray(file.view(FACTORS))
    count = int((factors == 1).sum())
    if not (factors[:count] == 1).all() or not (factors[count:] > STILL).all():
        raise file.error(f"tensor {FACTORS} has other numbers than 1, then 1e30")
    return count


def widths_of(keys: ArchitectureKeys, layers: int) -> list[int]:
    """Of the dense block of each layer."""
    said = keys.per_layer("feed_forward_length") or []
    if len(said) not in (1, layers) or min(said) < 1:
        raise keys.error("feed_forward_length", f"expected one for {layers} layers")
    return said if len(said) == layers else said * layers


def described_gguf(keys: ArchitectureKeys) -> Described:
    """The config, and exactly the tensors that the keys say."""
    config = config_of_gguf(keys, windows_of(keys))
    names = keys.file.tensors
    tensors = model_tensors(
        config,
        widths_of(keys, config.layers),
        tied="output.weight" not in names,
        rows=config.vocabulary,
        apart=any(name.endswith(".ffn_gate_exps.weight") for name in names),
    )
    tensors[FACTORS] = Tensor((config.far.head_dim // 2,), needed=False, used=False)
    return config, tensors
