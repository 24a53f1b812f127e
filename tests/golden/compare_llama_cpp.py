"""Whether llama.cpp and `jaxkern.models.load` compute the same from GGUF files.

    python -m tests.golden.compare_llama_cpp --llama-python PYTHON FILE.gguf ...

PYTHON is an interpreter that has `llama-cpp-python`. Files of every architecture are
left behind by the tests:

    python -m pytest --basetemp=FOLDER tests/models -k "gguf or files"

A file is copied first: its tensors decoded to float32, since llama.cpp rounds what it
multiplies with blocks or 16 bits, and without a tokenizer. `--set KEY=VALUE` replaces a
key of the architecture in the copy, `--set KEY=` leaves it out. Both programs read 40
random tokens, llama.cpp in one batch and one at a time, with a float32 cache. A line
for each file says the largest difference of a logit beside their standard deviation, or
who refuses it and why.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np

from jaxkern.formats.gguf import GGUFError, GGUFFile, read_gguf
from jaxkern.models import load
from jaxkern.models.architecture import page_of
from tests.models.tiny_gguf import add_key

CHILD = Path(__file__).with_name("llama_cpp_logits.py")
TOKENS = 40
NEAR = 1e-2  # a gelu of llama.cpp is a table of float16


def copied(file: GGUFFile, path: Path, changes: Mapping[str, Any]) -> None:
    """The file in float32 without its tokenizer, keys replaced or left out."""
    kind = file.architecture
    left_out = ("general.architecture", "tokenizer.", "GGUF.", "split.")
    keys = {k: v for k, v in file.metadata.items() if not k.startswith(left_out)}
    keys |= {f"{kind}.{key}": value for key, value in changes.items()}
    keys["tokenizer.ggml.model"] = "no_vocab"
    keys[f"{kind}.vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    writer = gguf.GGUFWriter(path, kind)
    for key, value in keys.items():
        value = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
        if value is not None and value != []:
            add_key(writer, key, value)
    reader = gguf.GGUFReader(file.path)
    for tensor in reader.tensors:
        w = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, np.ascontiguousarray(w, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def ours(path: Path, tokens: np.ndarray) -> np.ndarray:
    """Logits `[t, vocabulary]` of the forward pass without a cache."""
    config, weights = load(path, "f32")
    page = page_of(config)

    @jax.jit
    def forward(weights, tokens):
        x, _ = page.hidden_states(config, weights, tokens[None])
        return page.logits(config, weights, x)[0]

    return np.asarray(forward(weights, tokens))


def theirs(python: str, path: Path, tokens: np.ndarray) -> np.ndarray | str:
    """Logits `[2, t, vocabulary]`, or what llama.cpp says against the file."""
    out = path.with_suffix(".npy")
    command = [python, CHILD, path, json.dumps(tokens.tolist()), out]
    run = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, errors="replace"
    )
    if run.returncode == 0:
        return np.load(out)
    said = [line for line in run.stderr.splitlines() if line.strip()]
    causes = [line for line in said if "error loading" in line or "ASSERT" in line]
    return (causes or said or [f"exit status {run.returncode}"])[-1]


def verdict(python: str, path: Path, changes: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether both agree, and a line that says how nearly."""
    file = read_gguf(path)
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, file.tensors["token_embd.weight"].shape[0], TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "m.gguf"
        copied(file, copy, changes)
        said = theirs(python, copy, tokens)
        try:
            logits = ours(copy, tokens)
        except GGUFError as error:
            also = f"; llama.cpp: {said}" if isinstance(said, str) else ""
            return False, f"jaxkern refuses: {error}{also}"
    if isinstance(said, str):
        return False, f"llama.cpp refuses: {said}"
    errors = np.abs(said - logits).max((1, 2))
    agrees = bool(errors.max() < NEAR)
    batch, single = (f"{e:.0e}" for e in errors)
    word = "agrees" if agrees else "differs"
    return agrees, f"{word}, {batch} in a batch, {single} singly of {logits.std():.1f}"


def changes_of(pairs: list[str]) -> dict[str, Any]:
    """{key: value}, read as JSON, else text; None leaves the key out."""
    found = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        try:
            found[key] = json.loads(value) if value else None
        except json.JSONDecodeError:
            found[key] = value
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama-python", required=True)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args(arguments)
    changes = changes_of(options.set)
    agree = []
    for path in options.files:
        agrees, line = verdict(options.llama_python, path, changes)
        agree.append(agrees)
        print(f"{path.parent.name}/{path.name}: {line}", flush=True)
    return 0 if all(agree) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
