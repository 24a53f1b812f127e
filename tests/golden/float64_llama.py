"""Llama-like models in float64 NumPy, from the file's bytes: the tests' truth.

Nothing of jaxkern or JAX is used. Weights come from `gguf.quants.dequantize`; a step is
written out per head, as in the papers, slow and plain.

    python -m tests.golden.float64_llama MODEL.gguf

writes `float64_smollm2.npz`: for each of the prompts 64 greedy tokens, and at each of
these positions the 8 likeliest tokens and their log-probabilities.
"""

import sys
from pathlib import Path

import gguf
import numpy as np

from tests.golden.prompts import NEW_TOKENS

HERE = Path(__file__).parent
TOP = 8


class Float64Llama:
    """Logits of one sequence, token by token; `forward` goes on where it was."""

    def __init__(self, path: str | Path):
        reader = gguf.GGUFReader(path)
        arch = reader.fields["general.architecture"].contents()

        def metadata(key: str, default=None):
            field = reader.fields.get(f"{arch}.{key}")
            return default if field is None else field.contents()

        self.weights = {
            t.name: gguf.quants.dequantize(t.data, t.tensor_type)
            .reshape(t.shape[::-1])
            .astype(np.float64)
            for t in reader.tensors
        }
        self.interleaved = arch == "llama"
        self.layers = metadata("block_count")
        self.heads = metadata("attention.head_count")
        self.kv_heads = metadata("attention.head_count_kv", self.heads)
        self.eps = metadata("attention.layer_norm_rms_epsilon")
        self.theta = metadata("rope.freq_base", 10000.0)
        self.window = metadata("attention.sliding_window")
        self.head_dim = metadata(
            "attention.key_length", metadata("embedding_length") // self.heads
        )
        self.rotary_dim = metadata("rope.dimension_count", self.head_dim)
        self.linear_factor = (
            metadata("rope.scaling.factor", 1.0)
            if metadata("rope.scaling.type") == "linear"
            else 1.0
        )
        self.reset()

    def reset(self) -> None:
        self.keys = [[] for _ in range(self.layers)]  # per layer: [kv heads, head dim]
        self.values = [[] for _ in range(self.layers)]

    def forward(self, tokens) -> np.ndarray:
        """Logits `[t, vocabulary]` after each of the tokens."""
        return np.array([self.step(int(token)) for token in tokens])

    def step(self, token: int) -> np.ndarray:
        w = self.weights
        x = w["token_embd.weight"][token]
        for i in range(self.layers):
            x = x + self.attention(i, self.norm(x, f"blk.{i}.attn_norm.weight"))
            y = self.norm(x, f"blk.{i}.ffn_norm.weight")
            gate = w[f"blk.{i}.ffn_gate.weight"] @ y
            up = w[f"blk.{i}.ffn_up.weight"] @ y
            x = x + w[f"blk.{i}.ffn_down.weight"] @ (gate / (1 + np.exp(-gate)) * up)
        x = self.norm(x, "output_norm.weight")
        return w.get("output.weight", w["token_embd.weight"]) @ x

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x) + self.eps) * self.weights[name]

    def attention(self, i: int, x: np.ndarray) -> np.ndarray:
        w = self.weights
        position = len(self.keys[i])

        def heads_of(name: str, heads: int) -> list[np.ndarray]:
            y = w[f"blk.{i}.attn_{name}.weight"] @ x
            y = y + w.get(f"blk.{i}.attn_{name}.bias", 0.0)
            rows = list(y.reshape(heads, -1))
            norm = f"blk.{i}.attn_{name}_norm.weight"
            return [self.norm(row, norm) for row in rows] if norm in w else rows

        queries = [self.rope(q, position) for q in heads_of("q", self.heads)]
        self.keys[i].append(
            [self.rope(k, position) for k in heads_of("k", self.kv_heads)]
        )
        self.values[i].append(heads_of("v", self.kv_heads))
        first = 0 if self.window is None else max(0, position + 1 - self.window)
        outputs = []
        for head, query in enumerate(queries):
            kv_head = head // (self.heads // self.kv_heads)
            keys = np.array([row[kv_head] for row in self.keys[i][first:]])
            values = np.array([row[kv_head] for row in self.values[i][first:]])
            scores = keys @ query / np.sqrt(query.size)
            p = np.exp(scores - scores.max())
            outputs.append(p @ values / p.sum())
        return w[f"blk.{i}.attn_output.weight"] @ np.concatenate(outputs)

    def rope(self, x: np.ndarray, position: int) -> np.ndarray:
        half = self.rotary_dim // 2
        frequency = self.theta ** (-np.arange(half) / half) / self.linear_factor
        frequency = frequency / self.weights.get("rope_freqs.weight", 1.0)
        angle = position * frequency
        y = x.copy()
        if self.interleaved:  # pairs (0, 1), (2, 3) ...: how llama files store q and k
            first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        else:  # pairs (0, half), (1, half + 1) ...
            first, second = slice(0, half), slice(half, 2 * half)
        y[first] = x[first] * np.cos(angle) - x[second] * np.sin(angle)
        y[second] = x[first] * np.sin(angle) + x[second] * np.cos(angle)
        return y


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def main(path: str) -> None:
    model = Float64Llama(path)
    prompts = np.load(HERE / "llama_cpp_smollm2.npz")
    arrays = {}
    for i in range(8):
        model.reset()
        logits = model.forward(prompts[f"prompt_{i}"])[-1]
        tokens, top_ids, top_log_p = [], [], []
        for _ in range(NEW_TOKENS):
            log_p = log_softmax(logits)
            top = np.argsort(-log_p, kind="stable")[:TOP]
            tokens.append(top[0])
            top_ids.append(top)
            top_log_p.append(log_p[top])
            logits = model.step(int(top[0]))
        arrays[f"tokens_{i}"] = np.array(tokens, np.int32)
        arrays[f"top_ids_{i}"] = np.array(top_ids, np.int32)
        arrays[f"top_log_probabilities_{i}"] = np.array(top_log_p)
        print(i, np.diff(-arrays[f"top_log_probabilities_{i}"][:, :2]).min())
    np.savez_compressed(HERE / "float64_smollm2.npz", **arrays)


if __name__ == "__main__":
    main(sys.argv[1])
