"""The tensors of Qwen3-VL's tower, by their names in GGUF files.

    v.patch_embd v.position_embd        the patches and their places
    v.blk.{i}.*                         blocks
    v.post_ln mm.0 mm.2                 the merger: its norm, up and down
    v.deepstack.{i}.*                   the mergers behind some blocks

Folders have the frames of a patch in one tensor, and count the mergers behind blocks;
GGUF files have a tensor for each frame, and call such a merger as its block.
"""

import jax.numpy as jnp

from jaxkern.models.architecture import Tensor
from jaxkern.models.vision_tower import (
    BlockWeights,
    MergerWeights,
    Norm,
    Product,
    VisionConfig,
    VisionWeights,
)
from jaxkern.models.weight_reader import WeightReader

FRAMES = ("v.patch_embd.weight", "v.patch_embd.weight.1")
MERGER = ("v.post_ln", "mm.0", "mm.2")


def deep_mergers(config: VisionConfig, *, gguf: bool) -> list[tuple[str, str, str]]:
    """Norm, up and down of each merger behind a block."""
    numbers = config.deep if gguf else range(len(config.deep))
    at = [f"v.deepstack.{i}" for i in numbers]
    return [(f"{name}.norm", f"{name}.fc1", f"{name}.fc2") for name in at]


def vision_tensors(config: VisionConfig, *, gguf: bool = False) -> dict[str, Tensor]:
    """Every tensor of the tower, in a folder or in a GGUF file."""
    d, wide, f = config.d_model, config.merge**2 * config.d_model, config.width
    square = (config.patch, config.patch)
    found: dict[str, tuple[int, ...]] = {
        FRAMES[0]: (d, config.channels, config.frames, *square),
        "v.patch_embd.bias": (d,),
        "v.position_embd.weight": (config.side**2, d),
    }
    if gguf:
        found |= dict.fromkeys(FRAMES, (d, config.channels, *square))

    def add(name: str, *shape: int) -> None:
        found[f"{name}.weight"], found[f"{name}.bias"] = shape, shape[:1]

    for i in range(config.blocks):
        blk = f"v.blk.{i}"
        add(f"{blk}.ln1", d)
        add(f"{blk}.attn_qkv", 3 * d, d)
        add(f"{blk}.attn_out", d, d)
        add(f"{blk}.ln2", d)
        add(f"{blk}.ffn_up", f, d)
        add(f"{blk}.ffn_down", d, f)
    for norm, up, down in (MERGER, *deep_mergers(config, gguf=gguf)):
        add(norm, d if norm == MERGER[0] else wide)
        add(up, wide, wide)
        add(down, config.d_text, wide)
    return {name: Tensor(shape) for name, shape in found.items()}


def vision_weights(config: VisionConfig, reader: WeightReader) -> VisionWeights:
    """The weights as the tower takes them."""
    gguf = not reader.from_folder

    def norm(name: str) -> Norm:
        return Norm(reader.vector(f"{name}.weight"), reader.vector(f"{name}.bias"))

    def product(name: str) -> Product:
        rows = reader.matrices(f"{name}.weight")
        return Product(rows, reader.vector(f"{name}.bias"))

    def block(blk: str) -> BlockWeights:
        return BlockWeights(
            norm(f"{blk}.ln1"),
            product(f"{blk}.attn_qkv"),
            product(f"{blk}.attn_out"),
            norm(f"{blk}.ln2"),
            product(f"{blk}.ffn_up"),
            product(f"{blk}.ffn_down"),
        )

    def merger(names: tuple[str, str, str]) -> MergerWeights:
        return MergerWeights(norm(names[0]), product(names[1]), product(names[2]))

    if gguf:
        patch = jnp.moveaxis(reader.stacked(*FRAMES), 0, 2)
    else:
        patch = reader.array(FRAMES[0])
    return VisionWeights(
        patch=patch.reshape(config.d_model, -1),
        patch_bias=reader.vector("v.patch_embd.bias"),
        places=reader.array("v.position_embd.weight"),
        blocks=tuple(block(f"v.blk.{i}") for i in range(config.blocks)),
        merger=merger(MERGER),
        deep=tuple(map(merger, deep_mergers(config, gguf=gguf))),
    )
