"""GGUF files of Qwen3-VL: the text model, and its tower in a file of its own.

    qwen3vl.* qwen3vlmoe.*      the text, as of Qwen3; how many pairs turn by time, row
                                and column; how many levels of features it adds
    clip.*                      the tower and its pixels

The text model alone reads text. A converter writes neither how large an image may be
nor how it is resized: that is as in the published folders, 256 x 256 to 4096 x 4096
pixels by a bicubic filter, unless the tower's keys name other bounds. It writes the eps
of the text's norms in the place of the tower's, so it must be the tower's own.
"""

import math

from jaxkern.formats.architecture_keys import ArchitectureKeys, architecture_keys
from jaxkern.formats.gguf import GGUFFile
from jaxkern.models.architecture import Described
from jaxkern.models.decoder import DecoderConfig
from jaxkern.models.decoder_files import OfGGUF
from jaxkern.models.decoder_gguf import (
    gguf_attention,
    gguf_base,
    gguf_decoder,
    gguf_mixture,
)
from jaxkern.models.feed_forward import Dense, Mixture
from jaxkern.models.folder_keys import positive
from jaxkern.models.image_rule import ImageRule
from jaxkern.models.llama_form import Form
from jaxkern.models.qwen3_vl import rotation_of, seeing
from jaxkern.models.vision_files import vision_tensors
from jaxkern.models.vision_tower import EPS, VisionConfig

LEAST, MOST = 256**2, 4096**2  # pixels of an image
FRAMES, CHANNELS = 2, 3  # of a patch: a file has a tensor for each frame
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
TOWER, PROJECTOR = "clip", "qwen3vl_merger"
SECTIONS, LEVELS = "rope.dimension_sections", "n_deepstack_layers"
WITHOUT = {  # of the tower
    "has_audio_encoder": (False,),
    "has_text_encoder": (False,),
    "has_llava_projector": (False,),
    "use_silu": (False,),
    "vision.projector_type": (PROJECTOR,),
}


def text_of_gguf(keys: ArchitectureKeys) -> DecoderConfig:
    """What the keys of the text model say; a layer without a router is dense."""
    sparse = keys.arch == "qwen3vlmoe"
    base = gguf_base(keys, Form(keys.arch, features=("experts",) if sparse else ()))
    sections_of(keys, base.rotary_dim)
    if keys.integer(LEVELS, 0) > base.layers:
        raise keys.error(LEVELS, f"there are {base.layers} layers")
    experts = gguf_mixture(keys) if sparse else None

    def block(i: int) -> Dense | Mixture:
        if experts and f"blk.{i}.ffn_gate_inp.weight" in keys.file.tensors:
            return experts
        return Dense(positive(keys, "feed_forward_length"))

    return gguf_decoder(
        base,
        mixers=(gguf_attention(base, head_norms=True),) * base.layers,
        feed_forwards=tuple(map(block, range(base.layers))),
    )


GGUF_TEXT = OfGGUF("qwen3vl", text_of_gguf)


def sections_of(keys: ArchitectureKeys, rotary_dim: int) -> tuple[int, int, int]:
    """How many pairs turn by time, row and column; a fourth number is 0."""
    found = keys.per_layer(SECTIONS) or []
    if len(found) != 4 or min(found) < 0 or found[3]:
        raise keys.error(SECTIONS, "expected three numbers of pairs, and 0")
    if 2 * sum(found) != rotary_dim:
        raise keys.error(SECTIONS, f"expected {rotary_dim // 2} pairs in all")
    return found[0], found[1], found[2]


def with_tower(text: DecoderConfig, keys: ArchitectureKeys) -> Described:
    """The config of both, and the tensors of the tower, which fits the text."""
    assert isinstance(keys.file, GGUFFile) and keys.file.tower is not None
    tower = keys.file.tower
    if tower.architecture != TOWER:
        raise tower.error(
            f"general.architecture is {tower.architecture!r}, expected {TOWER!r}: the "
            "tower of a model that reads images"
        )
    with architecture_keys(tower, {}, WITHOUT) as said:
        if said.string("projector_type", "") != PROJECTOR:
            raise said.error("projector_type", f"{keys.arch} has {PROJECTOR!r}")
        for key in ("has_vision_encoder", "use_gelu"):
            if not said.flag(key, False):
                raise said.error(key, "expected true")
        vision = vision_of(said.within("vision"))
        rule = rule_of(said.within("vision"))
        if vision.d_text != text.d_model:
            raise said.error("vision.projection_dim", f"the text has {text.d_model}")
    if keys.integer(LEVELS, 0) != len(vision.deep):
        raise keys.error(LEVELS, f"the tower {tower.path} has {len(vision.deep)}")
    config = seeing(
        text,
        vision=vision,
        sections=sections_of(keys, rotation_of(text).dim),
        image_token=token_of(keys.file, IMAGE),
        video_token=token_of(keys.file, VIDEO),
        image_rule=rule,
    )
    return config, vision_tensors(vision, gguf=True)


def token_of(file: GGUFFile, token: str) -> int:
    """The id of a placeholder."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or tokens.count(token) != 1:
        raise file.error(
            f"key tokenizer.ggml.tokens has not one {token}, the placeholder that "
            "images need"
        )
    return tokens.index(token)


def vision_of(keys: ArchitectureKeys) -> VisionConfig:
    """What the keys `clip.vision.*` say of the tower."""
    heads, d = (
        positive(keys, "attention.head_count"),
        positive(keys, "embedding_length"),
    )
    if d % (4 * heads):
        raise keys.error(
            "attention.head_count", f"{d} dims are no multiple of 4 for each of them"
        )
    blocks, patch = positive(keys, "block_count"), positive(keys, "patch_size")
    if blocks > (count := len(keys.file.tensors)):
        raise keys.error("block_count", f"the file has {count} tensors")
    if (size := positive(keys, "image_size")) % patch:
        raise keys.error("image_size", f"expected a multiple of patches of {patch}")
    deep = keys.flags("is_deepstack_layers")
    if len(deep) != blocks:
        raise keys.error(
            "is_deepstack_layers", f"expected true or false for each of {blocks} blocks"
        )
    eps = "attention.layer_norm_epsilon"
    if not math.isclose(keys.number(eps), EPS, rel_tol=1e-6):
        raise keys.error(eps, f"the norms of this tower have {EPS}")
    return VisionConfig(
        blocks=blocks,
        d_model=d,
        heads=heads,
        width=positive(keys, "feed_forward_length"),
        patch=patch,
        frames=FRAMES,
        channels=CHANNELS,
        merge=positive(keys, "spatial_merge_size", 2),
        side=size // patch,
        deep=tuple(i for i in range(blocks) if deep[i]),
        d_text=positive(keys, "projection_dim"),
    )


def rule_of(keys: ArchitectureKeys) -> ImageRule:
    """What the keys `clip.vision.*` say of pixels."""
    least = positive(keys, "image_min_pixels", LEAST)
    most = positive(keys, "image_max_pixels", max(least, MOST))
    if least > most:
        raise keys.error("image_min_pixels", f"image_max_pixels is {most}")
    mean, deviation = (keys.numbers(f"image_{name}") for name in ("mean", "std"))
    if len(mean) != 3:
        raise keys.error("image_mean", "expected three numbers")
    if len(deviation) != 3 or min(deviation) <= 0:
        raise keys.error("image_std", "expected three positive numbers")
    return ImageRule(least, most, tuple(mean), tuple(deviation))
