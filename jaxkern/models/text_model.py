"""`open_model`: weights and tokenizer of a GGUF file or a Hugging Face folder."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from jaxkern.formats.gguf import GGUFFile
from jaxkern.models import loader
from jaxkern.models.architecture import ModelConfig, ModelFile
from jaxkern.models.registry import described
from jaxkern.models.sampling import Sampling
from jaxkern.models.tokenizer import GGUFTokenizer
from jaxkern.models.weight_reader import choose_policy


@dataclass(frozen=True)
class TextModel:
    """All that text to text takes; see `open_model`.

    Attributes:
      policy, reason: how the weights are kept, and why.
      sampling: what the files recommend.
      nbytes: of the weights in the files.
      seconds: that loading took.
    """

    path: str
    config: ModelConfig
    weights: Any
    tokenizer: GGUFTokenizer
    policy: str
    reason: str
    sampling: Sampling
    nbytes: int
    seconds: float


def open_model(
    path: str | PathLike[str],
    policy: str = "auto",
    *,
    tower: str | PathLike[str] | None = None,
    adapter: str | PathLike[str] | None = None,
    merge: bool = False,
) -> TextModel:
    """Loads a model and its tokenizer.

    Args:
      path: a GGUF file; or a folder with config.json, safetensors, tokenizer.json.
      policy, tower, adapter, merge: see `jaxkern.models.load`.

    Raises:
      ValueError: the files are damaged, not understood or contradict each other.
      OSError: they cannot be opened.
    """
    path, start = fspath(path), time.perf_counter()
    options: dict = dict(adapter=adapter, merge=merge)
    parts = _parts(loader.open_model(path, tower), policy, options)
    tokenizer, config = parts["tokenizer"], parts["config"]
    if tokenizer.num_tokens > config.vocabulary:
        raise ValueError(
            f"{path}: the tokenizer has {tokenizer.num_tokens} tokens, the model knows "
            f"{config.vocabulary}."
        )
    stops = frozenset(i for i in tokenizer.stop_ids if i < config.vocabulary)
    if stops != tokenizer.stop_ids:
        raise ValueError(
            f"{path}: the tokens that end an answer are {sorted(tokenizer.stop_ids)}, "
            f"the model knows {config.vocabulary}."
        )
    return TextModel(path=path, seconds=time.perf_counter() - start, **parts)


def _parts(file: ModelFile, policy: Any, options: dict) -> Mapping[str, Any]:
    """Of a `TextModel`; another model is refused before its tokenizer."""
    policy, reason = choose_policy(described(file).file, policy)
    tokenizer, sampling = _words(file)
    config, weights = loader.load_file(file, policy, **options)
    return dict(
        config=config,
        weights=weights,
        tokenizer=tokenizer,
        policy=policy,
        reason=reason,
        sampling=sampling,
        nbytes=file.nbytes,
    )


def _words(file: ModelFile) -> tuple[GGUFTokenizer, Sampling]:
    """The tokenizer, and what the files say of sampling."""
    if isinstance(file, GGUFFile):
        from jaxkern.models.tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(file.metadata), Sampling()
    from jaxkern.models.hugging_face_tokenizer import (
        sampling_from_folder,
        tokenizer_from_folder,
    )

    return tokenizer_from_folder(file.path), sampling_from_folder(file.path)
