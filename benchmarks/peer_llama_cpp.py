"""llama.cpp for `cpu_generate`: reads prompts, one JSON list a line; answers speeds.

Runs alone, in an interpreter that has llama-cpp-python and need not have jaxkern.
"""

import json
import sys
import time

import numpy as np
from llama_cpp import Llama


def main(path: str, threads: str, new_tokens: str) -> None:
    llm = Llama(
        path,
        n_ctx=512,
        n_threads=int(threads),
        n_threads_batch=int(threads),
        verbose=False,
    )
    print("ready", flush=True)
    for line in sys.stdin:
        prompt = json.loads(line)
        llm.reset()
        start = time.perf_counter()
        llm.eval(prompt)
        token = likeliest(llm)
        read = time.perf_counter()
        for _ in range(int(new_tokens)):
            llm.eval([token])
            token = likeliest(llm)
        end = time.perf_counter()
        speeds = len(prompt) / (read - start), int(new_tokens) / (end - read)
        print(json.dumps(speeds), flush=True)


def likeliest(llm: Llama) -> int:
    logits = llm._ctx.get_logits()  # of the last token
    return int(np.argmax(np.ctypeslib.as_array(logits, (llm.n_vocab(),))))


if __name__ == "__main__":
    main(*sys.argv[1:])
