"""A training step of a whole llama on a GPU, beside plain JAX with cuDNN and optax.

    python -m benchmarks train_step [--model 1.3B,350M] [--batch 8x2048] [--out DIR]
        [--fp8] [--no-plain]

Random weights and tokens, AdamW, float32 weights, bfloat16 products. "plain" is a step
as users write it: `jax.nn.dot_product_attention` by cuDNN, norms and rotations as
formulas, all logits, `optax.adamw`; its layers are scanned and keep what products
without a batch give, or they are unrolled and keep everything. "jaxkern" is
`jaxkern.train.train_step` of the llama page, compiled as a call of it is, for each
`remat`, and with "--fp8" once more with products of 8-bit floats. All begin with the
same weights and the losses of their first steps are compared before anything is timed;
then each makes three steps a round, queued as a training loop does, by the host's clock
until the last loss is there, and a figure is the median of the rounds. The share is of
989 TFLOP/s, also for fp8, with

    flops = 6 matrices batch length + 6 layers batch length^2 heads head_dim

where the table counts once as the output, attention half as it is causal, and nothing
that is computed again counts.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax import lax

from benchmarks._records import Row, write_run
from benchmarks._report import machine, versions
from jaxkern.models.llama import Layer, LlamaConfig, LlamaWeights
from jaxkern.models.remat import Remat
from jaxkern.train import AdamW, next_token_loss, train_step
from jaxkern.train.train_step import COMPILER_OPTIONS

RATE, DECAY = 3e-4, 0.1  # of AdamW
PEAK = 989e12  # flops a second of bfloat16, by the data sheet
CHECKED, ROUNDS, QUEUED = 3, 5, 3  # steps, rounds, steps a round
TOLERANCE = 3e-3  # relative, of a loss in bfloat16
TOLERANCE_FP8 = 3e-2  # from one of bfloat16
PLAIN = "plain, scanned", "plain, unrolled"
FP8 = "jaxkern, fp8"
OURS = "jaxkern"  # what it takes by default: everything is kept


class Shape(NamedTuple):
    layers: int
    d: int
    ff: int
    heads: int
    head_dim: int
    vocabulary: int = 32000

    @property
    def matrices(self) -> int:
        """Elements of all matrices, the table once."""
        layer = 4 * self.d * self.heads * self.head_dim + 3 * self.d * self.ff
        return self.layers * layer + self.vocabulary * self.d

    def flops(self, batch: int, length: int) -> float:
        scores = self.layers * batch * length**2 * self.heads * self.head_dim
        return 6.0 * self.matrices * batch * length + 6.0 * scores


SHAPES = {
    "1.3B": Shape(24, 2048, 5632, 16, 128),
    "350M": Shape(24, 1024, 2816, 16, 64),
}


class Stepper(NamedTuple):
    """A compiled step: `step(state, tokens)` gives the new state and the loss."""

    step: Callable[[Any, Any], tuple[Any, Any]]
    state: Any
    gigabytes: float  # of what the device holds during a step


def drawn(shape: Shape) -> LlamaWeights:
    """Float32 weights, output-major, each matrix of its own."""

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def matrix(key, f, d):
        return 0.02 * jax.random.normal(key, (f, d))

    keys = iter(jax.random.split(jax.random.key(0), 7 * shape.layers + 1))
    d, wide, ff = shape.d, shape.heads * shape.head_dim, shape.ff

    def layer() -> Layer:
        return Layer(
            attention_norm=jnp.ones(d),
            qkv=tuple(matrix(next(keys), wide, d) for _ in range(3)),
            qkv_bias=None,
            q_norm=None,
            k_norm=None,
            attention_output=(matrix(next(keys), d, wide),),
            ffn_norm=jnp.ones(d),
            gate_up=tuple(matrix(next(keys), ff, d) for _ in range(2)),
            down=(matrix(next(keys), d, ff),),
        )

    layers = tuple(layer() for _ in range(shape.layers))
    table = matrix(next(keys), shape.vocabulary, d)
    return LlamaWeights(table, layers, jnp.ones(d), (), None)


def side_by_side(weights: LlamaWeights) -> LlamaWeights:
    """Matrices with one input as one, as `load(path, "train")` gives them."""

    def joined(layer: Layer) -> Layer:
        qkv, gate_up = (jnp.concatenate(x) for x in (layer.qkv, layer.gate_up))
        return layer._replace(qkv=(qkv,), gate_up=(gate_up,))

    return weights._replace(layers=tuple(map(joined, weights.layers)))


def config_of(shape: Shape) -> LlamaConfig:
    return LlamaConfig(
        *("llama", 8192, shape.layers, shape.d, shape.heads, shape.heads),
        *(shape.head_dim, shape.vocabulary, 1e-5, shape.head_dim, 1e4, "neox"),
        dtype="train",
    )


def norm(x, w):
    x32 = x.astype(jnp.float32)
    y = x32 * lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + 1e-5)
    return (y * w).astype(x.dtype)


def rotated(x):
    h = x.shape[-1]
    frequencies = 1e4 ** (-jnp.arange(0, h, 2) / h)
    angles = jnp.arange(x.shape[1])[:, None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def plain_layer(head_dim: int, x, w: Layer):
    def product(y, m):
        return y @ m.astype(jnp.bfloat16).T

    y = norm(x, w.attention_norm)
    q, k, v = (product(y, m).reshape(*x.shape[:2], -1, head_dim) for m in w.qkv)
    attention = functools.partial(
        jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"
    )
    y = attention(rotated(q), rotated(k), v).reshape(*x.shape[:2], -1)
    x = x + product(y, w.attention_output[0])
    gate, up = (product(norm(x, w.ffn_norm), m) for m in w.gate_up)
    return x + product(jax.nn.silu(gate) * up, w.down[0])


def plain_loss(shape: Shape, scanned: bool, weights, tokens):
    """`weights.layers` is one layer of stacked arrays where they are scanned."""
    table = weights.embedding.astype(jnp.bfloat16)
    x = table[tokens]
    layer = functools.partial(plain_layer, shape.head_dim)
    if scanned:
        keep = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        layer = jax.checkpoint(layer, policy=keep)
        x, _ = lax.scan(lambda x, w: (layer(x, w), None), x, weights.layers)
    else:
        for w in weights.layers:
            x = layer(x, w)
    x = norm(x, weights.output_norm)[:, :-1]
    logits = (x @ table.T).astype(jnp.float32)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return loss.mean()


def plain(shape: Shape, weights: LlamaWeights, tokens: Any, scanned: bool) -> Stepper:
    if scanned:
        stack = jax.jit(lambda *layers: jax.tree.map(lambda *a: jnp.stack(a), *layers))
        weights = weights._replace(layers=stack(*weights.layers))
    else:
        weights = jax.tree.map(jnp.copy, weights)
    optimizer = optax.adamw(RATE, weight_decay=DECAY)
    loss_of = functools.partial(plain_loss, shape, scanned)

    def step(state, tokens):
        weights, kept = state
        loss, grads = jax.value_and_grad(loss_of)(weights, tokens)
        updates, kept = optimizer.update(grads, kept, weights)
        return (optax.apply_updates(weights, updates), kept), loss

    kept = jax.jit(optimizer.init)(weights)
    return compiled(step, (weights, kept), tokens)


def ours(
    shape: Shape, weights: LlamaWeights, tokens: Any, remat: Remat, fp8: bool = False
) -> Stepper:
    dtype = "float8_e4m3fn" if fp8 else None
    loss = next_token_loss(config_of(shape), remat=remat, product_dtype=dtype)
    made = train_step(loss, AdamW(RATE, weight_decay=DECAY))

    def step(state, tokens):
        state, metrics = made.update(state, tokens)
        return state, metrics.loss

    state = made.init(side_by_side(weights))
    return compiled(step, state, tokens, COMPILER_OPTIONS)


def compiled(
    step: Callable, state: Any, tokens: Any, options: dict[str, bool] | None = None
) -> Stepper:
    jitted = jax.jit(step, donate_argnums=0, compiler_options=options)
    made = jitted.lower(state, tokens).compile()
    memory = made.memory_analysis()
    assert memory is not None  # a GPU says
    held = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return Stepper(made, state, held / 1e9)


def steppers(
    shape: Shape,
    tokens: Any,
    remat: list[Remat],
    beside: tuple[str, ...] = PLAIN,
    fp8: bool = False,
) -> dict[str, Stepper]:
    """Each compiled, with a state of its own."""
    weights = drawn(shape)
    found = {name: plain(shape, weights, tokens, name == PLAIN[0]) for name in beside}
    for keeps in remat:
        name = OURS if keeps == "none" else f"{OURS}, remat={keeps!r}"
        found[name] = ours(shape, weights, tokens, keeps)
    if fp8:
        found[FP8] = ours(shape, weights, tokens, remat[0], fp8=True)
    return found


def measure(steppers: dict[str, Stepper], tokens: Any) -> dict[str, float]:
    """Median seconds of a step of each, after the same losses in the first ones."""
    states = {name: s.state for name, s in steppers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steppers}
    for i in range(CHECKED):
        losses = {}
        for name, s in steppers.items():
            states[name], loss = s.step(states[name], tokens)
            losses[name] = float(loss)
        rounded = losses.pop(FP8, None)
        low, high = min(losses.values()), max(losses.values())
        if not high - low <= TOLERANCE * high:
            raise ValueError(f"train_step: losses of step {i} differ: {losses}")
        text = "" if rounded is None else f", fp8 {rounded:.5f}"
        print(f"  losses of step {i}: {low:.5f} to {high:.5f}{text}", flush=True)
        if rounded is not None and not abs(rounded - low) <= TOLERANCE_FP8 * low:
            raise ValueError(f"train_step: fp8 differs in step {i}: {rounded}")
    for _ in range(ROUNDS):
        for name, s in steppers.items():
            begin, loss = time.perf_counter(), jnp.zeros(())
            for _ in range(QUEUED):
                states[name], loss = s.step(states[name], tokens)
            loss.block_until_ready()
            seconds[name].append((time.perf_counter() - begin) / QUEUED)
    return {name: statistics.median(s) for name, s in seconds.items()}


def row(
    name: str,
    batch: int,
    length: int,
    remat: list[Remat],
    layers: int | None = None,
    beside: tuple[str, ...] = PLAIN,
    fp8: bool = False,
) -> Row:
    """A line of the record, printed as well; `layers` of the model, or all."""
    shape = SHAPES[name]
    if layers is not None:
        shape, name = shape._replace(layers=layers), f"{layers} layers of {name}"
    tokens = jax.random.randint(jax.random.key(1), (batch, length), 0, shape.vocabulary)
    made = steppers(shape, tokens, remat, beside, fp8)
    by = {}
    for who, seconds in measure(made, tokens).items():
        share = 100 * shape.flops(batch, length) / seconds / PEAK
        by[who] = {"value": round(1e3 * seconds, 1), "share": round(share, 1)}
        print(
            f"  {who}: {1e3 * seconds:.1f} ms, {share:.1f} %, "
            f"{batch * length / seconds:.0f} tokens/s, {made[who].gigabytes:.0f} GB",
            flush=True,
        )
    held = {f"GB, {who}": round(s.gigabytes) for who, s in made.items()}
    return {"case": f"{name}, {batch}x{length}", "pass": "step", "by": by} | {
        "beside": held
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks train_step", description=__doc__)
    parser.add_argument("--model", default="1.3B")
    parser.add_argument("--batch", default="8x2048")
    parser.add_argument("--remat", default="none", help=", ".join(get_args(Remat)))
    parser.add_argument("--layers", type=int, help="so many, not all of the model")
    parser.add_argument("--fp8", action="store_true", help="8-bit products, too")
    parser.add_argument("--no-plain", action="store_true", help="jaxkern alone")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if jax.default_backend() != "gpu":
        print(f"{parser.prog}: needs a GPU, found {jax.default_backend()}.")
        return 2
    rows = []
    for name in options.model.split(","):
        for batch in options.batch.split(","):
            print(f"{name}, {batch}", flush=True)
            b, t = map(int, batch.split("x"))
            beside = () if options.no_plain else PLAIN
            remat = options.remat.split(",")
            rows.append(row(name, b, t, remat, options.layers, beside, options.fp8))
    if options.out:
        write_run(record(rows), options.out)
    return 0


def record(
    rows: list[Row],
    name: str = "train_step",
    title: str = "training step",
    against: tuple[str, ...] = PLAIN,
) -> dict[str, Any]:
    date = time.strftime("%Y-%m-%d")
    section = {
        "title": title,
        "run": name,
        "date": date,
        "unit": "ms",
        "command": f"python -m benchmarks {name} --out DIR",
        "against": list(against),
        "rows": rows,
    }
    return {
        "name": name,
        "op": name,
        "family": "models",
        "machine": machine(),
        "date": date,
        "versions": versions(),
        "sections": [section],
    }
