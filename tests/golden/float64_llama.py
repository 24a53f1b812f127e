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
        self.attention_scale = metadata("attention.scale", 0.0)
        self.attention_cap = metadata("attn_logit_softcapping", 0.0)
        self.logit_cap = metadata("final_logit_softcapping", 0.0)
        half = self.rotary_dim // 2
        frequency = self.theta ** (-np.arange(half) / half)
        self.frequency, self.magnitude = scaled(frequency, self.theta, metadata)
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
            gate, up = (self.linear(y, f"blk.{i}.ffn_{n}") for n in ("gate", "up"))
            hidden = gate / (1 + np.exp(-gate)) * up
            x = x + self.linear(hidden, f"blk.{i}.ffn_down")
        x = self.norm(x, "output_norm.weight")
        logits = w.get("output.weight", w["token_embd.weight"]) @ x
        return capped(logits, self.logit_cap)

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        w = self.weights
        return w[f"{name}.weight"] @ x + w.get(f"{name}.bias", 0.0)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x) + self.eps) * self.weights[name]

    def attention(self, i: int, x: np.ndarray) -> np.ndarray:
        w = self.weights
        position = len(self.keys[i])

        def heads_of(name: str, heads: int) -> list[np.ndarray]:
            rows = list(self.linear(x, f"blk.{i}.attn_{name}").reshape(heads, -1))
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
            scores = keys @ query * (self.attention_scale or query.size**-0.5)
            scores = capped(scores, self.attention_cap)
            p = np.exp(scores - scores.max())
            outputs.append(p @ values / p.sum())
        return self.linear(np.concatenate(outputs), f"blk.{i}.attn_output")

    def rope(self, x: np.ndarray, position: int) -> np.ndarray:
        half = self.rotary_dim // 2
        frequency = self.frequency / self.weights.get("rope_freqs.weight", 1.0)
        angle = position * frequency
        cos, sin = np.cos(angle) * self.magnitude, np.sin(angle) * self.magnitude
        y = x.copy()
        if self.interleaved:  # pairs (0, 1), (2, 3) ...: how llama files store q and k
            first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        else:  # pairs (0, half), (1, half + 1) ...
            first, second = slice(0, half), slice(half, 2 * half)
        y[first] = x[first] * cos - x[second] * sin
        y[second] = x[first] * sin + x[second] * cos
        return y


def capped(x: np.ndarray, cap: float) -> np.ndarray:
    return cap * np.tanh(x / cap) if cap else x


def scaled(frequency: np.ndarray, theta: float, metadata) -> tuple[np.ndarray, float]:
    """The frequencies as llama.cpp scales them, and what multiplies cos and sin.

    Written from llama-context.cpp and ggml's `rope_yarn`, in their order: a magnitude
    that is made for the whole of YaRN, divided by what the operator multiplies again.
    """
    kind = metadata("rope.scaling.type", "linear")
    factor = metadata("rope.scaling.factor", metadata("rope.scale_linear", 1.0)) or 1.0
    factor = 1.0 if kind == "none" else factor
    extrapolation = metadata("rope.scaling.yarn_ext_factor", -1.0)
    if extrapolation < 0:
        extrapolation = 1.0 if kind == "yarn" else 0.0
    magnitude = metadata("rope.scaling.attn_factor", 1.0)
    if extrapolation == 0:
        return frequency / factor, magnitude

    def grown(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * np.log(factor) + 1.0

    mscale_all_dim = metadata("rope.scaling.yarn_log_multiplier", 0.0)
    magnitude *= grown(1.0) / (grown(mscale_all_dim) if mscale_all_dim else 1.0)
    magnitude /= 1 + 0.1 * np.log(factor)
    dims = 2 * len(frequency)
    original = metadata("rope.scaling.original_context_length") or metadata(
        "context_length"
    )

    def pair(turns: float) -> float:
        return dims * np.log(original / (turns * 2 * np.pi)) / (2 * np.log(theta))

    low = max(0.0, np.floor(pair(metadata("rope.scaling.yarn_beta_fast", 32.0))))
    high = np.ceil(pair(metadata("rope.scaling.yarn_beta_slow", 1.0)))
    high = min(dims - 1.0, high)
    ramp = (np.arange(len(frequency)) - low) / max(0.001, high - low)
    mix = (1 - np.clip(ramp, 0, 1)) * extrapolation
    magnitude *= 1 + 0.1 * np.log(factor)
    return frequency / factor * (1 - mix) + frequency * mix, magnitude


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
