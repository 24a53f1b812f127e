"""What llama.cpp says: greedy tokens, log-probabilities and token ids, for the tests.

    python -m tests.golden.make_llama_cpp_golden MODEL.gguf

needs `llama-cpp-python` (the committed files are from 0.3.36), which takes many minutes
to compile; so its answers are stored beside this script and the tests read those:

- `llama_cpp_smollm2.npz`: for each of the prompts, the prompt's tokens and 64 greedy
  tokens; for each of these positions the 8 likeliest tokens and their log-probabilities
  (the first is the greedy token itself).
- `llama_cpp_forms_smollm2.npz`: for each form in which llama.cpp can read the same
  tokens (`FORMS`) the likeliest token at these positions, `[8, 64]`. Its own forms
  agree in 97 to 98 % of them: 8-bit rounding turns last bits into other codes.
- `llama_cpp_tokens.json`: texts and their token ids, once as plain text and once with
  the special tokens recognised.
- `llama_cpp_sentencepiece_tokens.json`: the same for a small SentencePiece vocabulary.
- `llama_cpp_pieces_tokens.json`: plain texts in SmolLM2's vocabulary, cut as other
  models cut them.
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from llama_cpp import Llama

from tests.golden.prompts import NEW_TOKENS, PROMPTS, TEXTS, sentencepiece_metadata

HERE = Path(__file__).parent
TOP = 8
F32 = 0  # of ggml_type
FORMS: dict[str, dict[str, Any]] = {  # arguments of Llama
    "batch": {},
    "single": {"n_batch": 1},
    "flash": {"flash_attn": True},
    "f32_cache": {"type_k": F32, "type_v": F32},
}


def greedy(llm: Llama, prompt: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """64 greedy tokens `[t]`, and the top tokens and log-probabilities `[t, 8]`."""
    llm.reset()
    llm.eval(prompt)
    ids, log_probabilities = [], []
    for _ in range(NEW_TOKENS):
        logits = np.asarray(llm.scores[llm.n_tokens - 1], np.float64)
        log_p = logits - logits.max()
        log_p -= np.log(np.exp(log_p).sum())
        top = np.argsort(-log_p, kind="stable")[:TOP]
        ids.append(top)
        log_probabilities.append(log_p[top])
        llm.eval([int(top[0])])  # also past the end of text: every position counts
    return np.array(ids)[:, 0], np.array(ids), np.array(log_probabilities)


def forms(path: str, greedy: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The likeliest tokens, teacher-forced, in each form."""
    likeliest = {}
    for name, options in FORMS.items():
        llm = Llama(
            path, n_ctx=512, n_threads=2, logits_all=True, verbose=False, **options
        )
        rows = []
        for i in range(len(PROMPTS)):
            prompt = greedy[f"prompt_{i}"].tolist()
            llm.reset()
            llm.eval([*prompt, *greedy[f"tokens_{i}"].tolist()])
            first = len(prompt) - 1
            rows.append(np.argmax(llm.scores[first : first + NEW_TOKENS], axis=-1))
        likeliest[name] = np.array(rows, np.int32)
    return likeliest


def main(path: str) -> None:
    llm = Llama(path, n_ctx=512, n_threads=2, logits_all=True, verbose=False)
    arrays = {}
    for i, text in enumerate(PROMPTS):
        prompt = llm.tokenize(text.encode(), add_bos=False, special=True)
        tokens, top_ids, top_log_p = greedy(llm, prompt)
        arrays[f"prompt_{i}"] = np.array(prompt, np.int32)
        arrays[f"tokens_{i}"] = tokens.astype(np.int32)
        arrays[f"top_ids_{i}"] = top_ids.astype(np.int32)
        arrays[f"top_log_probabilities_{i}"] = top_log_p.astype(np.float32)
        print(repr(llm.detokenize(tokens.tolist()).decode(errors="replace")))
    np.savez_compressed(HERE / "llama_cpp_smollm2.npz", **arrays)
    np.savez_compressed(HERE / "llama_cpp_forms_smollm2.npz", **forms(path, arrays))
    write_rows("llama_cpp_tokens.json", token_rows(llm, add_bos=False))
    sentencepiece = vocabulary_only(sentencepiece_metadata())
    write_rows(
        "llama_cpp_sentencepiece_tokens.json", token_rows(sentencepiece, add_bos=True)
    )
    fields = gguf.GGUFReader(path).fields.items()
    metadata = {k: f.contents() for k, f in fields if k.startswith("tokenizer.ggml.")}
    cuts = {
        pre: token_rows(
            vocabulary_only(metadata | {"tokenizer.ggml.pre": pre}), add_bos=False
        )
        for pre in ("gpt-2", "llama-bpe", "qwen2", "tekken", "default")
    }
    pieces = [
        {"text": text, **{pre: rows[i]["plain"] for pre, rows in cuts.items()}}
        for i, text in enumerate((*PROMPTS, *TEXTS))
    ]
    write_rows("llama_cpp_pieces_tokens.json", pieces)


def token_rows(llm: Llama, *, add_bos: bool) -> list[dict]:
    return [
        {
            "text": text,
            "plain": llm.tokenize(text.encode(), add_bos=add_bos, special=False),
            "special": llm.tokenize(text.encode(), add_bos=add_bos, special=True),
        }
        for text in (*PROMPTS, *TEXTS)
    ]


def write_rows(name: str, rows: list[dict]) -> None:
    lines = ",\n".join(json.dumps(row) for row in rows)
    (HERE / name).write_text(f"[\n{lines}\n]\n")


def vocabulary_only(metadata: Mapping[str, Any]) -> Llama:
    """llama.cpp with this tokenizer and no weights."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/vocabulary.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_context_length(512)
        for key, value in metadata.items():
            if isinstance(value, list):
                writer.add_array(key, value)
            elif isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            else:
                writer.add_string(key, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return Llama(path, vocab_only=True, verbose=False)


if __name__ == "__main__":
    main(sys.argv[1])
