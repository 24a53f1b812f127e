"""What llama.cpp says: greedy tokens, log-probabilities and token ids, for the tests.

    python -m tests.golden.make_llama_cpp_golden MODEL.gguf

needs `llama-cpp-python` (the committed files are from 0.3.36), which takes many minutes
to compile; so its answers are stored beside this script and the tests read those:

- `llama_cpp_smollm2.npz`: for each of the prompts, the prompt's tokens and 64 greedy
  tokens; for each of these positions the 8 likeliest tokens and their log-probabilities
  (the first is the greedy token itself).
- `llama_cpp_tokens.json`: texts and their token ids, once as
  plain text and once with the special tokens recognised.
"""

import json
import sys
from pathlib import Path

import numpy as np
from llama_cpp import Llama

from tests.golden.prompts import NEW_TOKENS, PROMPTS, TEXTS

HERE = Path(__file__).parent
TOP = 8


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
    tokens = [
        {
            "text": text,
            "plain": llm.tokenize(text.encode(), add_bos=False, special=False),
            "special": llm.tokenize(text.encode(), add_bos=False, special=True),
        }
        for text in (*PROMPTS, *TEXTS)
    ]
    lines = ",\n".join(json.dumps(row) for row in tokens)
    (HERE / "llama_cpp_tokens.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main(sys.argv[1])
