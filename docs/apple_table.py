"""Writes the counts of docs/apple.md: operations and fused calls of one token.

python docs/apple_table.py
"""

import contextlib
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxkern import quantize_affine
from jaxkern.lowering.apple import assume_jax_mps, check
from jaxkern.models.apple_check import model_calls
from jaxkern.models.llama import Layer, LlamaConfig, LlamaWeights

PAGE = Path(__file__).parent / "apple.md"
BEGIN, END = "<!-- counts -->\n", "<!-- end of counts -->\n"
SMOLLM2_135M = LlamaConfig(
    architecture="llama",
    context=8192,
    layers=30,
    d_model=576,
    heads=9,
    kv_heads=3,
    head_dim=64,
    vocabulary=49152,
    eps=1e-5,
    rotary_dim=64,
    theta=1e5,
    pairing="interleaved",
)


def weights(config: LlamaConfig, affine: bool) -> LlamaWeights:
    """Shapes of the weights of SmolLM2-135M, dense or of 4 bits in groups of 32."""

    def vector(n: int) -> jax.Array:
        return jnp.zeros(n)

    def matrix(f: int, d: int):
        w = jnp.zeros((f, d))
        return quantize_affine(w, group_size=32) if affine else w

    def layer() -> Layer:
        d, kv = config.d_model, config.kv_heads * config.head_dim
        return Layer(
            attention_norm=vector(d),
            qkv=(matrix(d, d), matrix(kv, d), matrix(kv, d)),
            qkv_bias=None,
            q_norm=None,
            k_norm=None,
            attention_output=(matrix(d, d),),
            ffn_norm=vector(d),
            gate_up=(matrix(1536, d), matrix(1536, d)),
            down=(matrix(d, 1536),),
        )

    def all_of() -> LlamaWeights:
        table = matrix(config.vocabulary, config.d_model)
        layers = tuple(layer() for _ in range(config.layers))
        return LlamaWeights(table, layers, vector(config.d_model), (table,), None)

    return jax.eval_shape(all_of)


def table() -> str:
    lines = [
        "| weights | platform | operations | fused calls, by kind |",
        "|---|---|---|---|",
    ]
    for affine in (False, True):
        calls = model_calls(SMOLLM2_135M, weights(SMOLLM2_135M, affine))
        f, args = calls["one token"]
        for platform, fused in (("mps", False), ("mps", True), ("metal", False)):
            with assume_jax_mps() if fused else contextlib.nullcontext():
                report = check(f, *args, platform=platform)
            assert not report.hard
            total = sum(n for op, n in report.operations.items() if op not in FREE)
            kinds = [f"{n} {op}" for op, n in report.fused_kinds.items()]
            name = f"{platform}, fused rows" if fused else f"{platform}, references"
            kind = "affine, 4 bits" if affine else "float32"
            lines.append(f"| {kind} | {name} | {total} | {', '.join(kinds) or '-'} |")
    return "\n".join(lines) + "\n"


FREE = ("stablehlo.constant", "stablehlo.return", "func.return")  # no work


def page(text: str) -> str:
    """The page with its table made anew."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return head + BEGIN + table() + END + tail


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
