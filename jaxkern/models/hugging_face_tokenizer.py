"""The tokenizer of a Hugging Face folder, and what its files say of sampling.

tokenizer.json           read by the `tokenizers` library
tokenizer_config.json    chat_template, bos_token, eos_token
chat_template.jinja      comes before the template above
generation_config.json   eos_token_id, temperature, top_k, top_p, min_p, penalty
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from tokenizers import Tokenizer

from jaxkern.formats.safetensors import LONGEST_JSON, SafetensorsError
from jaxkern.models.sampling import Sampling
from jaxkern.models.tokenizer import END_TOKENS, GGUFTokenizer, check_text

LONGEST_TEMPLATE = 2**20  # bytes


@dataclass(frozen=True)
class FolderTokenizer(GGUFTokenizer):
    """A tokenizer whose own `post_processor` puts tokens at the ends of a text."""

    no_template = (
        "the folder has no chat_template.jinja, and tokenizer_config.json no "
        "chat_template"
    )

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids; a text with control tokens is a template's, which has its ends."""
        check_text(text)
        self.tokenizer.encode_special_tokens = not special
        return self.tokenizer.encode(text, add_special_tokens=not special).ids


def tokenizer_from_folder(path: str | PathLike[str]) -> FolderTokenizer:
    """The tokenizer of a folder with `tokenizer.json`.

    Raises:
      SafetensorsError: a file is missing, damaged, or says something that is not
        understood.
    """
    path = fspath(path)
    text = _text(path, "tokenizer.json", LONGEST_JSON)
    if text is None:
        raise SafetensorsError(
            f"{path}: has no file tokenizer.json. Other forms of tokenizers are not "
            "read: save it with transformers' fast tokenizer."
        )
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises no narrower kind
        raise SafetensorsError(f"{path}: tokenizer.json: {error}.") from None
    tokenizer.no_truncation()  # of training; a prompt is read whole
    tokenizer.no_padding()
    said = _json(path, "tokenizer_config.json")
    bos, eos = (
        _token_id(path, tokenizer, said, name) for name in ("bos_token", "eos_token")
    )
    return FolderTokenizer(
        tokenizer,
        add_bos=False,
        add_eos=False,
        bos_id=bos,
        eos_id=eos,
        stop_ids=_stop_ids(path, tokenizer, eos),
        chat_template=_template(path, said),
    )


def sampling_from_folder(path: str | PathLike[str]) -> Sampling:
    """What generation_config.json says; without it or `do_sample` the likeliest token.

    Raises:
      SafetensorsError: a value is not of its type.
    """
    path = fspath(path)
    said = _json(path, "generation_config.json")

    def number(name: str, default: float | None) -> Any:
        value = said.get(name)
        if value is None:
            return default
        known = isinstance(value, int | float) and not isinstance(value, bool)
        if not known or not abs(value) <= sys.float_info.max:  # which JSON can exceed
            raise SafetensorsError(
                f"{path}: key {name} of generation_config.json is {value!r}, expected "
                "a number."
            )
        return value

    penalty = float(number("repetition_penalty", 1.0))
    if said.get("do_sample") is not True:
        return Sampling(repetition=penalty)
    top_k = number("top_k", None)
    return Sampling(
        temperature=float(number("temperature", 1.0)),
        top_k=None if top_k is None else int(top_k) or None,
        top_p=number("top_p", None),
        min_p=number("min_p", None),
        repetition=penalty,
    )


def _text(path: str, name: str, longest: int) -> str | None:
    """Of a file of the folder; None where it is missing."""
    place = os.path.join(path, name)
    if not os.path.lexists(place):
        return None
    if not os.path.isfile(place):
        raise SafetensorsError(f"{path}: {name} is not a regular file.")
    if (size := os.path.getsize(place)) > longest:
        raise SafetensorsError(
            f"{path}: {name} has {size} bytes, expected at most {longest}."
        )
    try:
        with open(place, encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError:
        raise SafetensorsError(f"{path}: {name} is not UTF-8.") from None


def _json(path: str, name: str) -> Mapping[str, Any]:
    """The object in a JSON file, empty where there is none."""
    text = _text(path, name, LONGEST_JSON)
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SafetensorsError(f"{path}: {name} is not JSON: {error}.") from None
    if not isinstance(found, dict):
        raise SafetensorsError(f"{path}: {name} is not a JSON object.")
    return found


def _token_id(
    path: str, tokenizer: Tokenizer, said: Mapping[str, Any], name: str
) -> int | None:
    """Of a token given as text, or as an object with its text as `content`."""
    token = said.get(name)
    if isinstance(token, dict):
        token = token.get("content")
    if token is None:
        return None
    found = tokenizer.token_to_id(token) if isinstance(token, str) else None
    if found is None:
        raise SafetensorsError(
            f"{path}: key {name} of tokenizer_config.json is {token!r}, which is no "
            "token of tokenizer.json."
        )
    return found


def _stop_ids(path: str, tokenizer: Tokenizer, eos: int | None) -> frozenset[int]:
    """What generation_config.json or config.json names, `eos_token`, and known ends."""
    named = _json(path, "generation_config.json").get("eos_token_id")
    if named is None:
        named = _json(path, "config.json").get("eos_token_id")
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise SafetensorsError(
            f"{path}: eos_token_id is {named!r}, expected a token id or a list of them."
        )
    added = tokenizer.get_added_tokens_decoder()
    ends = {i for i, t in added.items() if t.special and t.content in END_TOKENS}
    return frozenset({*ids, *ends, *(() if eos is None else (eos,))})


def _template(path: str, said: Mapping[str, Any]) -> str | None:
    """The file's own, else the one in the configuration; of several the default."""
    if (text := _text(path, "chat_template.jinja", LONGEST_TEMPLATE)) is not None:
        return text
    found = said.get("chat_template")
    if isinstance(found, list):  # [{"name": "default", "template": "..."}, ...]
        named = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
        found = named.get("default")
    if found is not None and not isinstance(found, str):
        raise SafetensorsError(
            f"{path}: chat_template of tokenizer_config.json must be text."
        )
    return found
