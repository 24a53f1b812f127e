"""llama.cpp for `compare_llama_cpp`: the logits of some tokens, twice.

Runs alone, in an interpreter that has llama-cpp-python and need not have jaxkern. It
writes float32 `[2, t, vocabulary]`: of all tokens in one batch, then one at a time.
"""

import json
import sys
from typing import Any

import numpy as np
from llama_cpp import Llama

F32 = 0  # of ggml_type
OF_THE_FILE = -1.0
EXACT: dict[str, Any] = {
    "type_k": F32,
    "type_v": F32,
    "yarn_ext_factor": OF_THE_FILE,
    "yarn_attn_factor": OF_THE_FILE,
    "yarn_beta_fast": OF_THE_FILE,
    "yarn_beta_slow": OF_THE_FILE,
}


def main(path: str, tokens: str, out: str) -> None:
    ids = json.loads(tokens)
    logits = []
    for n_batch in (len(ids), 1):
        llm = Llama(path, n_ctx=512, n_batch=n_batch, logits_all=True, **EXACT)
        llm.eval(ids)
        logits.append(np.array(llm.scores[: len(ids)]))
    np.save(out, np.stack(logits))


if __name__ == "__main__":
    main(*sys.argv[1:])
