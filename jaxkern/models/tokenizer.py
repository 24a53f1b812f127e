"""Text to token ids and back, from a GGUF file's own metadata.

Byte-level BPE (`tokenizer.ggml.model` = "gpt2") and SentencePiece BPE ("llama"), run by
the `tokenizers` library. The file may come from anybody: what it asks for and is not
known here is refused, and its chat template runs within bounds.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from jaxkern.models.chat_template import render

# How a text is cut before BPE, by `tokenizer.ggml.pre`; the cuts of a list follow.
GPT2_PIECES = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)
LLAMA3_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN_PIECES = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PIECES = {
    "gpt-2": [GPT2_PIECES],
    "smollm": [r"\p{N}", GPT2_PIECES],
    "qwen2": [LLAMA3_PIECES.replace("{1,3}", "")],
    "llama-bpe": [LLAMA3_PIECES],
    "tekken": [TEKKEN_PIECES],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2_PIECES, r"\p{N}+", "[0-9][0-9][0-9]"],
}
# Other names of the same cuts, as llama.cpp (src/llama-vocab.cpp) reads them.
LLAMA3_NAMES = "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
SAME_PIECES = {
    "gpt-2": "phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum "
    "modern-bert exaone4 mpt olmo jais trillion granite-docling",
    "smollm": "starcoder refact command-r codeshell exaone minerva-7b",
    "qwen2": "deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan",
    "llama-bpe": f"{LLAMA3_NAMES} dbrx smaug-bpe",
}
PIECES |= {
    other: PIECES[name] for name, same in SAME_PIECES.items() for other in same.split()
}
# A piece that is a token needs no merges, and texts begin with the BOS token unless the
# file says otherwise.
WHOLE_WORDS_FIRST = ADDS_BOS = ("llama-bpe", *LLAMA3_NAMES.split(), "tekken")

# Flags that must not be set: of tokenizers that are not built here.
CHANGES_TEXT = ("normalizer.lowercase", "normalizer.strip_accents", "add_sep_token")

LONGEST_PIECE = 1024  # a piece is tried at each cut

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, _UNUSED, BYTE = range(1, 7)  # token types

# Tokens that end an answer, beside those that the file declares as such.
END_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
)


@dataclass(frozen=True)
class GGUFTokenizer:
    """A model's tokenizer; see `tokenizer_from_gguf`.

    Attributes:
      tokenizer: of the `tokenizers` library.
      add_bos, add_eos: does a text get these tokens at its ends?
      bos_id, eos_id: their ids, or None.
      stop_ids: ids that end an answer.
      chat_template: Jinja source, or None.
    """

    tokenizer: Tokenizer
    add_bos: bool
    add_eos: bool
    bos_id: int | None
    eos_id: int | None
    stop_ids: frozenset[int]
    chat_template: str | None
    no_template = "the file has no tokenizer.chat_template"

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
          text: any string.
          special: read `<|im_end|>` and the like as control tokens. False for text from
            others: it then cannot speak for the system.

        Raises:
          ValueError: the text has half a pair of surrogates.
        """
        check_text(text)
        self.tokenizer.encode_special_tokens = not special
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        return [*ids, self.eos_id] if self.add_eos and self.eos_id is not None else ids

    def continued(self, text: str) -> list[int] | None:
        """Token ids of a text behind another one, control tokens read as such.

        Returns:
          None where the text does not begin with a control token: then its first
          characters could form a token with the last ones of the other text.
        """
        self.tokenizer.encode_special_tokens = False
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        added = self.tokenizer.get_added_tokens_decoder()
        special = ids and ids[0] in added and added[ids[0]].special
        return ids if special else None

    @property
    def num_tokens(self) -> int:
        """Of the vocabulary, control tokens included."""
        return self.tokenizer.get_vocab_size()

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids, without control tokens. Broken UTF-8 becomes U+FFFD."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The messages as the model was trained to read them, ready for its answer.

        Args:
          messages: `{"role": "user", "content": "..."}` and the like, in order.

        Raises:
          ValueError: the file has no chat template, or its template fails.
        """
        if self.chat_template is None:
            raise ValueError(f"chat: {self.no_template}. Use generate --raw.")
        token = self.tokenizer.id_to_token
        try:
            return render(
                self.chat_template,
                messages,
                add_generation_prompt=True,
                bos_token="" if self.bos_id is None else token(self.bos_id),
                eos_token="" if self.eos_id is None else token(self.eos_id),
            )
        except Exception as error:  # the template is anyone's; so is what it provokes
            raise ValueError(f"chat: the file's template fails: {error}") from error


def check_text(text: str) -> None:
    """Raises a ValueError for what UTF-8 cannot hold, as bytes of a shell that are no
    text come to a program."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text: has half a pair of surrogates at character {error.start}, "
            f"{text[error.start]!r}: it is not UTF-8."
        ) from None


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> GGUFTokenizer:
    """Builds the tokenizer that a GGUF file describes.

    Args:
      metadata: of `jaxkern.formats.gguf.read_gguf`.

    Raises:
      ValueError: keys are missing or contradict each other, or the kind of tokenizer
        is not one of those above.
    """
    kind = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
    if not isinstance(kind, str) or kind not in builders:
        raise ValueError(
            f"tokenizer: tokenizer.ggml.model is {kind!r}, known are "
            f"{', '.join(builders)}."
        )
    for name in CHANGES_TEXT:
        if _flag(metadata, name, False):
            raise ValueError(
                f"tokenizer: tokenizer.ggml.{name} is true, which is not built here. "
                "Texts would become other tokens."
            )
    tokens = _strings(metadata, "tokens")
    if not tokens:
        raise ValueError("tokenizer: tokenizer.ggml.tokens is empty or missing.")
    twice, times = Counter(tokens).most_common(1)[0]
    if times > 1:
        raise ValueError(f"tokenizer: token {twice!r} occurs twice.")
    types = _numbers(metadata, "token_type", [NORMAL] * len(tokens), "iu").tolist()
    if len(types) != len(tokens):
        raise ValueError(
            f"tokenizer: {len(tokens)} tokens but {len(types)} token types."
        )
    tokenizer = builders[kind](metadata, tokens, types)
    tokenizer.add_tokens(
        [
            AddedToken(token, special=t == CONTROL, normalized=False)
            for token, t in zip(tokens, types, strict=True)
            if t in (CONTROL, USER_DEFINED) and token
        ]
    )

    def token_id(name: str) -> int | None:
        return _token_id(metadata, name, len(tokens))

    ends = (token_id(name) for name in ("eos", "eot", "eom"))
    declared = {i for i in ends if i is not None}
    named = {
        i
        for i, token in enumerate(tokens)
        if types[i] == CONTROL and token in END_TOKENS
    }
    adds_bos = kind == "llama" or metadata.get("tokenizer.ggml.pre") in ADDS_BOS
    return GGUFTokenizer(
        tokenizer,
        add_bos=_flag(metadata, "add_bos_token", adds_bos),
        add_eos=_flag(metadata, "add_eos_token", False),
        bos_id=token_id("bos"),
        eos_id=token_id("eos"),
        stop_ids=frozenset(declared | named),
        chat_template=metadata.get("tokenizer.chat_template"),
    )


# Entries of the metadata, each of the type that it must have.


def _strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{name}", [])
    if not isinstance(value, list) or not all(isinstance(t, str) for t in value):
        raise ValueError(f"tokenizer: tokenizer.ggml.{name} must be a list of strings.")
    return value


def _numbers(
    metadata: Mapping[str, Any], name: str, default: Any, kinds: str = "iuf"
) -> np.ndarray:
    value = np.asarray(metadata.get(f"tokenizer.ggml.{name}", default))
    if value.ndim != 1 or value.dtype.kind not in kinds:
        what = "numbers" if "f" in kinds else "integers"
        raise ValueError(f"tokenizer: tokenizer.ggml.{name} must be a list of {what}.")
    return value


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, int):  # some files have 0 and 1
        raise ValueError(f"tokenizer: tokenizer.ggml.{name} must be true or false.")
    return bool(value)


def _token_id(metadata: Mapping[str, Any], name: str, num_tokens: int) -> int | None:
    i = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if i is not None and not (isinstance(i, int) and 0 <= i < num_tokens):
        raise ValueError(
            f"tokenizer: {name}_token_id is {i!r}, there are {num_tokens} tokens."
        )
    return i


def _byte_level_bpe(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int]
) -> Tokenizer:
    """BPE over bytes, each byte written as one printable character (GPT-2)."""
    del types
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in PIECES:
        raise ValueError(
            f"tokenizer: tokenizer.ggml.pre is {pre!r}, known are {', '.join(PIECES)}."
        )
    # a merge is "left right"; a space can only stand between them
    merges: list[Any] = [
        tuple(merge.split(" ")) for merge in _strings(metadata, "merges")
    ]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    for merge in merges:
        if len(merge) != 2 or not vocabulary.keys() >= {*merge, "".join(merge)}:
            raise ValueError(f"tokenizer: merge {' '.join(merge)!r} names no tokens.")
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, ignore_merges=pre in WHOLE_WORDS_FIRST)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(p), "isolated") for p in PIECES[pre]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_bpe(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int]
) -> Tokenizer:
    """SentencePiece BPE: the pair whose piece has the highest score is merged first.

    `tokenizers` ranks pairs of pieces instead, so the pairs are listed by the score of
    what they make. Equal scores would be settled by place there and by rank here; such
    a file is refused.
    """
    scores = _numbers(metadata, "scores", np.empty(0))
    if len(scores) != len(tokens):
        raise ValueError(
            f"tokenizer: tokenizer.ggml.scores must be {len(tokens)} numbers, one per "
            "token."
        )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    normal = {t: i for t, i in vocabulary.items() if types[i] == NORMAL}
    if (longest := max(map(len, normal), default=0)) > LONGEST_PIECE:
        raise ValueError(f"tokenizer: a token has {longest} characters.")
    pairs = [
        (token[:cut], token[cut:], float(scores[i]))
        for token, i in normal.items()
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]
    if len({score for *_, score in pairs}) != len({a + b for a, b, _ in pairs}):
        raise ValueError(
            "tokenizer: tokenizer.ggml.scores gives two pieces the same score, so the "
            "order of their merges is not known."
        )
    pairs.sort(key=lambda pair: -pair[2])
    unknown = _token_id(metadata, "unknown", len(tokens)) or 0
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            [(left, right) for left, right, _ in pairs],
            unk_token=tokens[unknown],
            fuse_unk=False,
            byte_fallback=BYTE in types,
        )
    )
    spaces = [normalizers.Replace(" ", "▁")]
    after = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if _flag(metadata, "add_space_prefix", True):
        spaces = [normalizers.Prepend("▁"), *spaces]
        after = [*after, decoders.Strip(" ", 1, 0)]
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(after)
    return tokenizer
