"""Files of `decoder.py`'s architectures: names, tensors and weights they share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jaxkern.formats.architecture_keys import ArchitectureKeys
from jaxkern.models.architecture import Architecture, Described, Tensor
from jaxkern.models.decoder import DecoderConfig, DecoderWeights, LayerWeights
from jaxkern.models.mixers.layout import Layout, Shapes
from jaxkern.models.weight_reader import WeightReader

PLAIN = Layout()
MODEL_NAMES = {"embed_tokens": "token_embd", "norm": "output_norm"}
NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
ATTENTION = {f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"}
ATTENTION |= {"self_attn.o_proj": "attn_output"}
HEAD_NORMS = {f"self_attn.{x}_norm": f"attn_{x}_norm" for x in "qk"}
DENSE = {f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")}
EXPERTS = {
    f"mlp.experts.{{j}}.{x}_proj": f"ffn_{x}_exps.{{j}}" for x in ("gate", "up", "down")
}
ENDS = ("weight", "bias")
ROUTER = {"mlp.gate": "ffn_gate_inp"}


def shared_expert(at: str) -> dict[str, str]:
    """Names of the block that every token passes, under the prefix `at`."""
    return {f"{at}.{x}_proj": f"ffn_{x}_shexp" for x in ("gate", "up", "down")}


@dataclass(frozen=True)
class Folder:
    """What an architecture's folders have.

    Attributes:
      config: reads config.json.
      names: of products and norms in a layer, which end in weight or bias.
      others: of what is in a layer and ends otherwise.
      model: of what is outside layers, beside the output.
      output: of the product to logits.
      at: where names of layers and the model are.
      keys_at: where config.json describes the text model, if not outside.
      ignored: templates of whole names that change nothing in the logits.
      further_layers: how many layers behind the last one do so too.
      layout: of the weights; or of what config.json says.
      tied: whether the output is the embedding where no key says it.
    """

    config: Callable[[ArchitectureKeys], DecoderConfig]
    names: Mapping[str, str]
    others: Mapping[str, str] = field(default_factory=dict)
    model: Mapping[str, str] = field(default_factory=lambda: MODEL_NAMES)
    output: str = "lm_head.weight"
    at: str = "model"
    keys_at: str = ""
    ignored: tuple[str, ...] = ()
    further_layers: Callable[[ArchitectureKeys], int] = lambda keys: 0
    layout: Layout = PLAIN
    packed: Layout | None = None
    tied: bool = False
    tied_keys: tuple[str, ...] = ("tie_word_embeddings",)
    harmless: Mapping[str, str] = field(default_factory=dict)
    without: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class OfGGUF:
    """What an architecture's GGUF files have.

    Attributes:
      name: `general.architecture`.
      config: reads the keys.
      layout: of the weights.
      further_layers: how many behind the last one change nothing in the logits.
      also: other names that files say.
    """

    name: str
    config: Callable[[ArchitectureKeys], DecoderConfig]
    layout: Layout = PLAIN
    further_layers: Callable[[ArchitectureKeys], int] = lambda keys: 0
    also: tuple[str, ...] = ()


def folder_architecture(
    name: str, model_type: str, folder: Folder, gguf: OfGGUF | None = None
) -> Architecture:
    """The entry of an architecture that is read from folders, or GGUF files too."""
    return Architecture(
        gguf=gguf.name if gguf else None,
        gguf_also=gguf.also if gguf else (),
        from_gguf=partial(described_gguf, gguf) if gguf else None,
        name=name,
        weights=partial(weights_of, folder, gguf),
        model_type=model_type,
        from_folder=partial(described_folder, folder),
        names=template_names(folder),
        harmless=folder.harmless,
        without=folder.without,
    )


def template_names(folder: Folder) -> dict[str, str]:
    """See `Architecture.names`; what is ignored keeps its name."""
    layer = {
        f"{a}.{end}": f"{b}.{end}" for a, b in folder.names.items() for end in ENDS
    }
    layer |= folder.others
    at = folder.at
    return {
        folder.output: "output.weight",
        **{f"{at}.{a}.weight": f"{b}.weight" for a, b in folder.model.items()},
        **{f"{at}.layers.{{i}}.{a}": f"blk.{{i}}.{b}" for a, b in layer.items()},
        **{name: f"ignored.{name}" for name in folder.ignored},
    }


def described_folder(folder: Folder, keys: ArchitectureKeys) -> Described:
    """The config, and exactly the tensors that config.json says."""
    text = keys.within(folder.keys_at) if folder.keys_at else keys
    config, layout = folder.config(text), layout_of(folder, keys.file.tensors)
    tensors = tensors_of(config, layout, tied=is_tied(folder, keys, text))
    further = range(config.layers, config.layers + folder.further_layers(keys))
    left_out = ("ignored.", *(f"blk.{i}." for i in further))
    for name in keys.file.tensors:
        if name.startswith(left_out):
            tensors[name] = Tensor(used=False)
    return config, tensors


def is_tied(folder: Folder, keys: ArchitectureKeys, text: ArchitectureKeys) -> bool:
    """Whether the output is the embedding, as all keys that say it do."""
    said = {
        where.flag(key, False)
        for where in (keys, text)
        for key in folder.tied_keys
        if where.has(key)
    }
    if len(said) > 1:
        raise keys.error(folder.tied_keys[0], "which another key contradicts")
    return said.pop() if said else folder.tied


def described_gguf(of_gguf: OfGGUF, keys: ArchitectureKeys) -> Described:
    """The config, and exactly the tensors that the keys say."""
    config, tied = of_gguf.config(keys), "output.weight" not in keys.file.tensors
    tensors = tensors_of(config, of_gguf.layout, tied=tied)
    further = range(config.layers, config.layers + of_gguf.further_layers(keys))
    left_out = tuple(f"blk.{i}." for i in further)
    unused = [name for name in keys.file.tensors if name.startswith(left_out)]
    return config, tensors | dict.fromkeys(unused, Tensor(used=False))


def layout_of(folder: Folder, names: Mapping[str, Any]) -> Layout:
    """The packed one where there are such tensors."""
    packed = any(name.endswith(".blocks") for name in names)
    return folder.packed if packed and folder.packed else folder.layout


def tensors_of(
    config: DecoderConfig, layout: Layout, *, tied: bool
) -> dict[str, Tensor]:
    """Every tensor of a model, by its name in GGUF files."""
    d, table = config.d_model, (config.vocabulary, config.d_model)
    found = {
        "token_embd.weight": Tensor(table),
        f"{layout.output_norm}.weight": Tensor((d,)),
        "output.weight": Tensor(table, needed=not tied, used=not tied),
    }
    blocks = zip(config.mixers, config.feed_forwards, strict=True)
    for i, (mixer, feed_forward) in enumerate(blocks):
        layer: Shapes = {}
        for norm, block in zip(layout.norms, (mixer, feed_forward), strict=True):
            if block is not None:
                layer |= {norm: (d,)} | block.tensors(d, layout)
        for name, shape in layer.items():
            codes = name.endswith((".blocks", ".scales"))
            found[f"blk.{i}.{name}"] = Tensor(shape, codes=codes)
    return found


def weights_of(
    folder: Folder, gguf: OfGGUF | None, config: DecoderConfig, reader: WeightReader
) -> DecoderWeights:
    """The weights as the page takes them."""
    layout = layout_of(folder, reader.file.tensors)
    if gguf is not None and not reader.from_folder:
        layout = gguf.layout

    def layer(i: int) -> LayerWeights:
        mixer_norm, ffn_norm = layout.norms
        mixed = read(i, mixer_norm, config.mixers[i])
        return LayerWeights(*mixed, *read(i, ffn_norm, config.feed_forwards[i]))

    def read(i: int, norm: str, block: Any) -> tuple[Any, Any]:
        if block is None:
            return None, None
        weight = reader.vector(f"blk.{i}.{norm}", plus=layout.plus)
        return weight, block.read(reader, f"blk.{i}", layout)

    embedding, output = reader.table_and_output()
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(layer(i) for i in range(config.layers)),
        output_norm=reader.vector(f"{layout.output_norm}.weight", plus=layout.plus),
        output=output,
    )
