"""A training step over all GPUs of a host: data parallel, FSDP and tensor parallel.

    python -m benchmarks train_devices [--model 1.3B] [--batch 8x2048] [--out DIR]

The steps are those of `train_step.py`, ours alone, called as a user calls them. The
batch is that of each GPU with data parallelism and FSDP, and of all together with
tensor parallelism. Efficiency is the time of one GPU with the same work for each, over
the time of n; of tensor parallelism the speedup is named. The loss of each first step
is compared with that of one GPU for the same rows.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks._records import Row, write_run
from benchmarks.train_step import (
    CHECKED,
    DECAY,
    QUEUED,
    RATE,
    ROUNDS,
    SHAPES,
    TOLERANCE,
    Shape,
    config_of,
    drawn,
    record,
    side_by_side,
)
from jaxkern.models.llama import LlamaWeights
from jaxkern.train import AdamW, next_token_loss, train_step, whole_weights

ONE, DATA, FSDP, TENSOR = "one GPU", "data parallel", "FSDP", "tensor parallel"


def cut_by_heads(weights: LlamaWeights) -> Any:
    """Of each matrix the dim that a layer's two halves have between them."""

    def layer(w: Any) -> Any:
        specs = jax.tree.map(lambda _: P(), w)
        return specs._replace(
            qkv=tuple(P("x") for _ in w.qkv),
            gate_up=tuple(P("x") for _ in w.gate_up),
            attention_output=(P(None, "x"),),
            down=(P(None, "x"),),
        )

    specs = jax.tree.map(lambda _: P(), weights._replace(layers=()))
    return specs._replace(layers=tuple(map(layer, weights.layers)))


def placed(kind: str, weights: LlamaWeights, mesh: Any) -> LlamaWeights:
    if kind == TENSOR:  # each matrix is cut by heads: apart
        specs = cut_by_heads(weights)
    else:
        weights = side_by_side(weights)
        whole = kind != FSDP
        specs = jax.tree.map(lambda w: P() if whole or w.ndim < 2 else P("x"), weights)
    cut = jax.tree.map(lambda s: NamedSharding(mesh, s), specs)
    return jax.device_put(weights, cut)


def seconds_and_loss(
    kind: str, shape: Shape, tokens: jax.Array, devices: list
) -> tuple[float, float]:
    """Median seconds of a step, and the loss of the first."""
    mesh = jax.make_mesh((len(devices),), ("x",), (AxisType.Auto,), devices=devices)
    loss = next_token_loss(config_of(shape))
    if kind == FSDP:
        loss = whole_weights(loss, mesh)
    made = train_step(loss, AdamW(RATE, weight_decay=DECAY))
    state = made.init(placed(kind, drawn(shape), mesh))
    rows = P() if kind == TENSOR else P("x")
    tokens = jax.device_put(tokens, NamedSharding(mesh, rows))
    first, seconds = None, []
    for _ in range(CHECKED):
        state, metrics = made(state, tokens)
        first = float(metrics.loss) if first is None else first
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(QUEUED):
            state, metrics = made(state, tokens)
        metrics.loss.block_until_ready()
        seconds.append((time.perf_counter() - begin) / QUEUED)
    assert first is not None
    return statistics.median(seconds), first


def row(name: str, batch: int, length: int, kinds: list[str]) -> Row:
    shape, devices = SHAPES[name], jax.devices()
    n = len(devices)
    # rows of n GPUs repeat those of one: so the losses must agree
    tokens = jax.random.randint(jax.random.key(1), (batch, length), 0, shape.vocabulary)
    one, loss = seconds_and_loss(ONE, shape, tokens, devices[:1])
    by = {f"jaxkern, {ONE}": {"value": round(1e3 * one, 1)}}
    print(
        f"  {ONE}: {1e3 * one:.1f} ms, {batch * length / one:.0f} tokens/s", flush=True
    )
    for kind in kinds:
        whole = tokens if kind == TENSOR else jnp.tile(tokens, (n, 1))
        seconds, its = seconds_and_loss(kind, shape, whole, devices)
        if not abs(its - loss) <= TOLERANCE * loss:
            raise ValueError(f"train_devices: {kind} gives a loss of {its}, not {loss}")
        times = one / seconds
        share = 100 * times / (n if kind == TENSOR else 1)
        by[f"jaxkern, {kind}"] = {
            "value": round(1e3 * seconds, 1),
            "share": round(share, 1),
        }
        print(
            f"  {kind}, {n} GPUs: {1e3 * seconds:.1f} ms, {share:.1f} % of {n} times, "
            f"{whole.size / seconds:.0f} tokens/s",
            flush=True,
        )
    return {"case": f"{name}, {batch}x{length}, {n} GPUs", "pass": "step", "by": by}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks train_devices", description=__doc__
    )
    parser.add_argument("--model", default="1.3B")
    parser.add_argument("--batch", default="8x2048")
    parser.add_argument("--kinds", default=",".join((DATA, FSDP, TENSOR)))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if jax.default_backend() != "gpu" or jax.device_count() < 2:
        print(f"{parser.prog}: needs two GPUs, found {jax.devices()}.")
        return 2
    rows = []
    for name in options.model.split(","):
        print(f"{name}, {options.batch}", flush=True)
        b, t = map(int, options.batch.split("x"))
        rows.append(row(name, b, t, options.kinds.split(",")))
    if options.out:
        title = "training step over the GPUs of a host"
        write_run(record(rows, "train_devices", title, ()), options.out)
    return 0
