"""A training step of a hybrid and of a mixture of experts, beside references.

    python -m benchmarks train_references [--model hybrid,experts] [--batch 4x2048]

A few layers of the pages that `jaxkern train` trains, in the sizes of Qwen3.5 (three
gated delta nets for each attention) and of Qwen3-MoE (8 of 64 experts). "jaxkern" takes
the kernels that `explain` names, "references" is the same step under
`backend("xla")`, where XLA compiles each operator's formula. Random weights and tokens,
AdamW, bfloat16 products; losses of the first steps are compared before anything is
timed, as in train_step.py.
"""

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks._records import Row, write_run
from benchmarks.train_step import DECAY, OURS, Stepper, compiled, measure, record
from jaxkern import backend
from jaxkern.train import AdamW, next_token_loss, train_step
from jaxkern.train.new_model import NewModel, NewWeights, new_model
from jaxkern.train.train_step import COMPILER_OPTIONS

REFERENCES = "references"
RATE = 1e-5  # so small that the model does not learn the one batch by heart
LARGE = 2**18  # elements of what is drawn on the device
COMMON = {
    "hidden_size": 2048,
    "vocab_size": 32000,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "hybrid": COMMON
    | {
        "model_type": "qwen3_5_text",
        "head_dim": 256,
        "intermediate_size": 6144,
        "num_hidden_layers": 4,
        "layer_types": 3 * ["linear_attention"] + ["full_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "rope_parameters": {
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e7,
            "rope_type": "default",
        },
    },
    "experts": COMMON
    | {
        "model_type": "qwen3_moe",
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_local_experts": 64,
        "num_hidden_layers": 2,
        "norm_topk_prob": True,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    },
}


class Undrawn(NewModel):
    """A new model whose large tensors are zeros until they are on the device."""

    def view(self, name: str) -> np.ndarray:
        shape = self.tensors[name].shape
        if math.prod(shape) > LARGE:
            return np.zeros(shape, np.float32)
        return super().view(name)


def drawn(keys: dict[str, Any]) -> tuple[Any, Any]:
    """Config and float32 weights of a new model."""
    model = new_model(keys, seed=0)
    fields = {name: getattr(model.file, name) for name in model.file.__match_args__}
    reader = NewWeights(Undrawn(**fields), model.tensors, "train")
    weights = model.architecture.weights(model.config, reader)
    numbers = iter(range(10**6))

    def draw(w: jax.Array) -> jax.Array:
        if w.size <= LARGE:
            return w
        return 0.02 * jax.random.normal(jax.random.key(next(numbers)), w.shape)

    return replace(model.config, **reader.numerics), jax.tree.map(draw, weights)


def stepper(config: Any, weights: Any, tokens: Any, kernels: str) -> Stepper:
    made = train_step(next_token_loss(config), AdamW(RATE, weight_decay=DECAY))

    def step(state, tokens):
        state, metrics = made.update(state, tokens)
        return state, metrics.loss

    with backend(kernels):
        return compiled(step, made.init(weights), tokens, COMPILER_OPTIONS)


def row(name: str, batch: int, length: int) -> Row:
    """A line of the record, printed as well."""
    config, weights = drawn(MODELS[name])
    tokens = jax.random.randint(jax.random.key(1), (batch, length), 0, 32000)
    sides = {OURS: "auto", REFERENCES: "xla"}
    made = {
        who: stepper(config, weights, tokens, kernels) for who, kernels in sides.items()
    }
    found = measure(made, tokens)
    for who, seconds in found.items():
        print(
            f"  {who}: {1e3 * seconds:.1f} ms, {made[who].gigabytes:.0f} GB, "
            f"{batch * length / seconds:.0f} tokens/s",
            flush=True,
        )
    print(f"  {found[REFERENCES] / found[OURS]:.2f} times as fast", flush=True)
    by = {who: {"value": round(1e3 * s, 1)} for who, s in found.items()}
    held = {f"GB, {who}": round(s.gigabytes) for who, s in made.items()}
    layers = MODELS[name]["num_hidden_layers"]
    case = f"{name}, {layers} layers, {batch}x{length}"
    return {"case": case, "pass": "step", "by": by, "beside": held}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks train_references", description=__doc__
    )
    parser.add_argument("--model", default=",".join(MODELS))
    parser.add_argument("--batch", default="4x2048")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if jax.default_backend() != "gpu":
        print(f"{parser.prog}: needs a GPU, found {jax.default_backend()}.")
        return 2
    rows = []
    for name in options.model.split(","):
        print(f"{name}, {options.batch}", flush=True)
        rows.append(row(name, *map(int, options.batch.split("x"))))
    if options.out:
        title = "training step of a hybrid and of experts"
        found = record(rows, "train_references", title, (REFERENCES,))
        write_run(found, options.out)
    return 0
