"""Texts for training: from files or records, as tokens."""

import glob
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int32

from jaxkern.train.run_config import Data

LONGEST_FILE = 2**34  # bytes of one text file
END = "<|endoftext|>"  # of a text of bytes
BYTES = 256


class Tokenizer(Protocol):
    """What is read of a model's tokenizer."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def eos_id(self) -> int | None: ...
    def encode(self, text: str) -> list[int]: ...


class ByteTokenizer:
    """A token for each byte of UTF-8, and one for the end of a text."""

    num_tokens = BYTES + 1
    eos_id = BYTES

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def save(self, folder: str) -> None:
        """As `tokenizer.json`: byte-level BPE without merges."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        alphabet = {character_of(b): b for b in range(BYTES)}
        tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=False
        )
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(END, special=True)])
        tokenizer.save(os.path.join(folder, "tokenizer.json"))
        with open(os.path.join(folder, "tokenizer_config.json"), "w") as file:
            file.write('{"eos_token": "<|endoftext|>"}\n')


def character_of(byte: int) -> str:
    """GPT-2's printable character for a byte."""
    if 33 <= byte < 127 or 161 <= byte < 173 or 174 <= byte:
        return chr(byte)
    unprintable = [*range(33), *range(127, 161), 173]
    return chr(BYTES + unprintable.index(byte))


def tokenizer_of(name: str, model: str | None) -> Any:
    """The tokenizer that `data.tokenizer` names.

    Args:
      name: see `Data`.
      model: the path of the model, None for a new one.

    Raises:
      ValueError: a new model has none of its own.
    """
    if name == "bytes":
        return ByteTokenizer()
    path = model if name == "model" else name
    if path is None:
        raise ValueError(
            'data.tokenizer is "model", but the model is new. Give "bytes", or a '
            "folder or GGUF file with a tokenizer."
        )
    if os.path.isdir(path):
        from jaxkern.models.hugging_face_tokenizer import tokenizer_from_folder

        return tokenizer_from_folder(path)
    from jaxkern.formats.gguf import read_gguf
    from jaxkern.models.tokenizer import tokenizer_from_gguf

    return tokenizer_from_gguf(read_gguf(path).metadata)


def texts_of(data: Data) -> Iterator[str]:
    """Every text, files in the order of their names, then records."""
    for path in named_files(data.files, "data.files"):
        yield from cut(text_of(path), data.documents)
    if data.records:
        try:
            from grain.sources import (  # pyright: ignore[reportMissingImports]
                ArrayRecordDataSource,
            )
        except ModuleNotFoundError:
            raise ValueError(
                "data.records are read by grain, which is not installed: pip install "
                "grain."
            ) from None
        paths = named_files(data.records, "data.records")
        source: Any = ArrayRecordDataSource(paths)
        for i in range(len(source)):
            try:
                yield source[i].decode()
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"data.records: record {i} is not UTF-8 at byte {error.start}."
                ) from None


def named_files(patterns: Sequence[str], key: str) -> list[str]:
    """The files of these names, each once and sorted within a pattern."""
    found: dict[str, None] = {}
    for pattern in patterns:
        paths = [p for p in sorted(glob.glob(pattern)) if os.path.isfile(p)]
        if not paths:
            raise ValueError(f"{key}: there is no file {pattern}.")
        found |= dict.fromkeys(paths)
    return [*found]


def text_of(path: str) -> str:
    """A whole file of UTF-8."""
    if (size := os.path.getsize(path)) > LONGEST_FILE:
        raise ValueError(f"{path}: has {size} bytes, expected at most {LONGEST_FILE}.")
    with open(path, "rb") as file:
        try:
            return file.read().decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: is not UTF-8 at byte {error.start}.") from None


def cut(text: str, documents: str) -> Iterator[str]:
    """The texts of a file; empty ones are none."""
    parts = [text]
    if documents == "lines":
        parts = text.splitlines()
    elif documents == "paragraphs":
        parts = re.split(r"\n\s*\n", text)
    yield from (part for part in parts if part.strip())


def encoded(
    texts: Iterator[str], tokenizer: Tokenizer, vocabulary: int
) -> list[Int32[np.ndarray, " t"]]:
    """Tokens of each text, with the token of its end where there is one.

    Raises:
      ValueError: the model knows fewer tokens than the tokenizer.
    """
    if tokenizer.num_tokens > vocabulary:
        raise ValueError(
            f"data.tokenizer: has {tokenizer.num_tokens} tokens, the model knows "
            f"{vocabulary}."
        )
    end, found = tokenizer.eos_id, []
    for text in texts:
        ids = tokenizer.encode(text)
        if end is not None and ids[-1:] != [end]:
            ids = [*ids, end]
        found.append(np.array(ids, np.int32))
    return found
