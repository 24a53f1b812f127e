"""What an architecture is: a page that computes, and an entry that reads files for it.

A page is a module with a frozen dataclass `...Config` and

    empty_cache(config, batch, slots, dtype)               one cache for each layer
    hidden_states(config, weights, tokens, cache, new_lengths, segment_ids)
    logits(config, weights, hidden)

`jaxkern.models.cached_steps` makes `prefill` and `decode` of these. An entry is an
`Architecture`; the list of them is `jaxkern.models.registry.ARCHITECTURES`.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int32

from jaxkern.formats.architecture_keys import ArchitectureKeys
from jaxkern.formats.gguf import GGUFFile
from jaxkern.formats.safetensors import SafetensorsFolder
from jaxkern.primitives.turboquant.vector_codec import VectorCodec

ModelFile = GGUFFile | SafetensorsFolder


class ModelConfig(Protocol):
    """What the config of every page has; a frozen dataclass, so static under `jit`."""

    @property
    def architecture(self) -> str: ...
    @property
    def context(self) -> int: ...  # longest text in training, in tokens
    @property
    def layers(self) -> int: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def eps(self) -> float: ...  # of the norms
    @property
    def dtype(self) -> str: ...  # of activations
    @property
    def product_dtype(self) -> str | None: ...  # see `WeightReader.numerics`
    @property
    def fused(self) -> bool: ...


class LayerCache(Protocol):
    """What a layer keeps of the tokens it has read: a dataclass that is a pytree."""

    @property
    def lengths(self) -> Int32[Array, " b"]: ...  # tokens read, alike in all layers


CacheForm = DTypeLike | VectorCodec
"""What keys and values are kept in; `jaxkern.models.cache_kind` has names for it."""

Cache = tuple[Any, ...]
"""One `LayerCache` for each layer; they may differ in kind."""


class Page(Protocol):
    """The functions of a page."""

    def empty_cache(
        self, config: Any, batch: int, slots: int, dtype: CacheForm = ...
    ) -> Cache: ...

    def hidden_states(
        self,
        config: Any,
        weights: Any,
        tokens: Int32[Array, "b t"],
        cache: Cache | None = None,
        new_lengths: Int[Array, " b"] | None = None,
        segment_ids: Int[Array, "b t"] | None = None,
    ) -> tuple[Float[Array, "b t d"], Cache | None]:
        """Normalised outputs of the last layer, and the cache with the new tokens.

        `new_lengths` says how many of the t tokens count, 0 ... t, default all: what
        stands behind leaves no trace in the cache. Without a cache it is the forward
        pass of training, whose rows may hold several texts, told apart by segment_ids.
        A page that reads images also takes `images`, what `cached_steps.prefill` gives.
        """
        ...

    def logits(
        self, config: Any, weights: Any, x: Float[Array, "... d"]
    ) -> Float[Array, "... v"]: ...


def page_of(config: ModelConfig) -> Page:
    """The functions that compute with this config: those of its module.

    Raises:
      ValueError: its weights lie as training keeps them.
    """
    if config.dtype == "train":
        raise ValueError(
            f"{config.architecture}: the weights lie as training keeps them. Take "
            "config and weights of jaxkern.train.readable(config, weights)."
        )
    return importlib.import_module(type(config).__module__)  # pyright: ignore[reportReturnType]


class Tensor(NamedTuple):
    """A tensor that a file of this model has.

    Attributes:
      shape: as stored.
      needed: without it the file is refused.
      used: if not, it changes nothing in the logits: a repetition, or of training.
      codes: bytes of a packed format, not numbers.
    """

    shape: tuple[int, ...] = ()
    needed: bool = True
    used: bool = True
    codes: bool = False


Described = tuple[Any, Mapping[str, Tensor]]
"""Config of a page, and every tensor that a file of this model may have, by its name
in GGUF files; a file with any other one is refused."""


@dataclass(frozen=True)
class Architecture:
    """How files of one architecture become the config and weights of a page.

    Both kinds of files come to one set of names, those of GGUF.

    Attributes:
      name: in the docs and of the golden files in tests.
      weights: of a config and a `WeightReader`.
      gguf: `general.architecture` of GGUF files, or None.
      gguf_also: other names that such files say.
      model_type: of config.json, or None.
      from_gguf: reads the keys of a GGUF file, whose tensors are at `keys.file`.
      from_folder: reads config.json; `keys.file` has the names of a GGUF file.
      with_tower: of the text's config and the keys of a GGUF file that has a tower: the
        config of both, and the tensors of the tower; None: it has no such file.
      names: of the folder's tensors, `{i}` and `{j}` numbers: "model.layers.{i}.x":
        "blk.{i}.y".
      harmless, without: more keys of config.json, see `architecture_keys`.
    """

    name: str
    weights: Callable[[Any, Any], Any]
    gguf: str | None = None
    gguf_also: tuple[str, ...] = ()
    model_type: str | None = None
    from_gguf: Callable[[ArchitectureKeys], Described] | None = None
    from_folder: Callable[[ArchitectureKeys], Described] | None = None
    with_tower: Callable[[Any, ArchitectureKeys], Described] | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    harmless: Mapping[str, str] = field(default_factory=dict)
    without: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
