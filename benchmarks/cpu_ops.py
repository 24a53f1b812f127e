"""The C++ kernels of plain operators against XLA:CPU, in one process, round by round.

    python -m benchmarks cpu_ops --only sample,attention

Each round times both sides one after the other, so that both meet the same load of the
machine: the least time of each, and the median of the rounds' ratios. `CPU` is the time
of all threads together, which neighbours on the cores hardly change. `bytes` are those
of the operands and results, read and written once; beside them the share of the rate at
which all threads together read memory, measured first (what fits the caches can pass
it). Products and sums of attention are shown as GFLOP/s. --out DIR leaves runs that
`python -m benchmarks pages --add DIR` brings into the records of --machine.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._cpu_cases import Case, normal
from benchmarks._cpu_hybrids import delta_rule_cases, expert_cases, state_space_cases
from benchmarks._records import OURS, Row, run_on_cpu, write_run
from benchmarks.cpu import read_rate
from benchmarks.cpu_generate import limit_threads

PRIMITIVES = Path(__file__).parents[1] / "jaxkern" / "primitives"
GRADIENT = ", and gradient"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks cpu_ops", description=__doc__)
    parser.add_argument("--only", default="", help="families, by commas")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="folder for the figures")
    parser.add_argument("--machine", default="epyc", help="whose records --out is for")
    options = parser.parse_args(arguments)
    limit_threads(options.threads)
    rate = read_rate(options.threads)
    print(f"memory is read at {rate / 1e9:.1f} GB/s")
    found: dict[str, list[Row]] = {}
    for family, cases in FAMILIES.items():
        if options.only and family not in options.only.split(","):
            continue
        heads = "kernel us | XLA us | ratio | CPU us | ratio | GB/s (share) | GFLOP/s"
        print(f"\n| {family} | {heads} |\n|---|---|---|---|---|---|---|---|")
        for case in cases():
            row = measured(case, options.rounds, rate)
            print(line_of(case, row), flush=True)
            found.setdefault(case.op, []).append(row)
    if options.out:
        command = f"python -m benchmarks cpu_ops --rounds {options.rounds} --out DIR"
        for op, rows in found.items():
            write_run(run_of(op, rows, options.machine, command), options.out)
    return 0


def measured(case: Case, rounds: int, rate: float) -> Row:
    """What a case took, as a row of the records."""
    import jax

    from jaxkern import backend

    runs = {}
    for kind in ("cpp", "xla"):
        with backend(
            kind, strict=kind == "cpp" and case.whole
        ):  # jit would share one trace
            runs[kind] = jax.jit(lambda *a: case.f(*a)).lower(*case.operands).compile()
    results = jax.block_until_ready(runs["xla"](*case.operands))
    jax.block_until_ready(runs["cpp"](*case.operands))
    times = np.array(
        [[timed(run, case.operands) for run in runs.values()] for _ in range(rounds)]
    )
    (ours, xla), (ours_cpu, xla_cpu) = times.min(0).T
    moved = sum(x.nbytes for x in jax.tree.leaves(results))
    if case.bytes_read is None:
        moved += sum(x.nbytes for x in jax.tree.leaves(case.operands))
    else:
        moved += case.bytes_read
    by = {
        name: {
            "value": round(wall * 1e6, 1),
            "median": round(np.median(times[:, k, 0]) * 1e6, 1),
            "cpu": round(cpu * 1e6),
        }
        for k, (name, wall, cpu) in enumerate(
            ((OURS, ours, ours_cpu), ("XLA", xla, xla_cpu))
        )
    }
    by[OURS] |= {
        "gb_s": round(moved / ours / 1e9, 1),
        "share": round(100 * moved / ours / rate),
    }
    ratio = {
        "value": round(xla / ours, 1),
        "median": round(np.median(times[:, 1, 0] / times[:, 0, 0]), 1),
        "cpu": round(xla_cpu / ours_cpu, 1),
    }
    name = case.name.removesuffix(GRADIENT)
    which = "forward" if name == case.name else "both"
    return {"case": name, "pass": which, "by": by, "times": {"XLA": ratio}}


def line_of(case: Case, row: Row) -> str:
    ours, xla = row["by"][OURS], row["by"]["XLA"]
    ratio = row["times"]["XLA"]
    flops = f"{case.flops / ours['value'] / 1e3:.0f}" if case.flops else ""
    return (
        f"| {case.name} | {ours['value']} ({ours['median']}) | "
        f"{xla['value']} ({xla['median']}) | {ratio['value']} ({ratio['median']}) | "
        f"{ours['cpu']}, {xla['cpu']} | {ratio['cpu']} | "
        f"{ours['gb_s']} ({ours['share']}%) | {flops} |"
    )


def run_of(op: str, rows: list[Row], machine: str, command: str) -> dict[str, Any]:
    [file] = PRIMITIVES.glob(f"*/{op}.py")
    section = {
        "title": f"{op} on a CPU",
        "run": f"cpu_ops {op}",
        "unit": "us",
        "command": command,
        "rows": rows,
    }
    return run_on_cpu(op, file.parent.name, machine, section)


def timed(run: Callable, operands: tuple) -> tuple[float, float]:
    """Seconds that pass, and those of all threads."""
    import jax

    start = time.perf_counter(), time.process_time()
    jax.block_until_ready(run(*operands))
    return time.perf_counter() - start[0], time.process_time() - start[1]


def sampling_cases() -> Iterator[Case]:
    import jax.numpy as jnp

    from jaxkern import argmax, top_k
    from jaxkern.primitives.sampling.sample import sample_p

    def drawn(*cuts):
        def f(logits, u):
            rows = logits.shape[0]
            full = [None if c is None else jnp.full(rows, c) for c in cuts]
            return sample_p(logits, u, jnp.full(rows, 0.8), *full)

        return f

    for b, v in ((1, 49152), (1, 128256), (8, 128256)):
        logits, u = normal(b, v, scale=3), jnp.full(b, 0.37)
        size = f"{b}x{v}"
        for cut, f in (
            ("", drawn(None, None, None)),
            (", top_k 40", drawn(40, None, None)),
            (", top_p 0.95", drawn(None, 0.95, None)),
            (", min_p 0.05", drawn(None, None, 0.05)),
            (", all three", drawn(40, 0.95, 0.05)),
        ):
            yield Case("sample", f"sample {size}{cut}", f, (logits, u))
        yield Case("argmax", f"argmax {size}", argmax, (logits,))
        yield Case("top_k", f"top_k {size}, k = 40", lambda x: top_k(x, 40), (logits,))
    for b, v, k in ((512, 64, 8), (64, 1024, 8), (64, 4096, 40), (16, 16384, 40)):
        x, size = normal(b, v), f"{b}x{v}, k = {k}"
        yield Case("top_k", f"top_k {size}", lambda x, k=k: top_k(x, k), (x,))


def attention_cases() -> Iterator[Case]:
    """t queries at the end of s keys, n heads that share k heads of h dims."""
    import jax
    import jax.numpy as jnp

    from jaxkern import (
        IntCodec,
        attention,
        quantize_vectors,
        quantized_cache_attention,
    )

    def case(t, s, n, k, h, dtype, **options):
        def f(query, key, value, lengths):
            op = quantized_cache_attention if dtype == "int8" else attention
            return op(
                query,
                key,
                value,
                kv_lengths=lengths,
                q_offset=lengths - t,
                causal=True,
                **options,
            )

        seen = min(options.get("window", s), s)
        pairs = t * s - t * (t - 1) / 2 if seen == s else t * seen
        name = f"{t} over {s}, {n}/{k} heads of {h}, {dtype}"
        name += "".join(f", {o} {x}" for o, x in options.items())
        of_floats = "float32" if dtype == "int8" else dtype
        q = normal(1, t, n, h, dtype=of_floats)
        caches: list = [normal(1, s, k, h, dtype=of_floats) + i for i in range(2)]
        if dtype == "int8":
            caches = [quantize_vectors(x, IntCodec(8)) for x in caches]
        cached = sum(x.nbytes for x in jax.tree.leaves(caches))
        moved = q.nbytes + cached * min(1, (seen + t - 1) / s)
        return Case(
            "attention", name, f, (q, *caches, jnp.array([s])), 4 * pairs * n * h, moved
        )

    for dtype in ("float32", "bfloat16", "int8"):
        yield case(1, 512, 9, 3, 64, dtype)
        yield case(1, 4096, 9, 3, 64, dtype)
        yield case(1, 4096, 32, 8, 128, dtype)
        yield case(1, 4096, 32, 8, 128, dtype, window=512)
        yield case(1, 4096, 32, 8, 128, dtype, softcap=30.0)
        yield case(256, 256, 9, 3, 64, dtype)
        yield case(1024, 1024, 9, 3, 64, dtype)
        yield case(512, 512, 32, 8, 128, dtype)
        yield case(1024, 1024, 9, 3, 64, dtype, window=256)


def norm_cases() -> Iterator[Case]:
    """Forward, and a training step's two passes; the bytes are those of both."""
    import jax

    from jaxkern import add_rms_norm, layer_norm, rms_norm

    for dtype in ("float32", "bfloat16"):
        for rows, d in ((1, 4096), (256, 576), (256, 4096), (2048, 2048)):
            x, r = (normal(rows, d, dtype=dtype) + i for i in range(2))
            w = normal(d, dtype=dtype)
            for op, operands in (
                (rms_norm, (x, w)),
                (add_rms_norm, (x, r, w)),
                (layer_norm, (x, w, w)),
            ):
                name = f"{op.__name__} {rows}x{d} {dtype}"
                yield Case(op.__name__, name, op, operands)
                if rows > 1:
                    out = jax.eval_shape(op, *operands)
                    cotangents = jax.tree.map(lambda y, x=x: x, out)
                    f = both_passes(op)
                    step = (operands, cotangents)
                    yield Case(op.__name__, name + GRADIENT, f, step)


def both_passes(op):
    """`op` and its gradient, of operands and cotangents."""
    import jax

    def f(operands, cotangents):
        out, pull = jax.vjp(op, *operands)
        return out, pull(cotangents)

    return f


def loss_cases() -> Iterator[Case]:
    """The last layer of SmolLM2-135M, and one of the width of Qwen3-1.7B."""
    import jax.numpy as jnp

    from jaxkern import linear_cross_entropy

    def mean(x, w, labels):
        return linear_cross_entropy(x, w, labels, reduction="mean")

    for dtype in ("float32", "bfloat16"):
        for n, d, v in ((64, 576, 49152), (512, 576, 49152), (256, 2048, 32768)):
            x, w = normal(n, d, dtype=dtype), normal(v, d, dtype=dtype, scale=d**-0.5)
            operands, flops = (x, w, jnp.arange(n)), 2.0 * n * d * v
            loss = "linear_cross_entropy"
            name = f"{loss} {n}x{d}x{v} {dtype}"
            yield Case(loss, name, mean, operands, flops)
            yield Case(
                loss,
                name + GRADIENT,
                lambda x, w, labels, f=mean: both_passes(lambda x, w: f(x, w, labels))(
                    (x, w), jnp.float32(1)
                ),
                operands,
                3 * flops,  # what is needed; the kernel does 4, to keep no logits
            )


def convolution_cases() -> Iterator[Case]:
    """4 taps and silu over 4096 channels, with the state that decoding has."""
    from jaxkern import causal_conv1d

    def conv(x, w, state):
        return causal_conv1d(x, w, None, state, activation="silu")

    for dtype in ("float32", "bfloat16"):
        for b, t in ((1, 1), (8, 1), (1, 512), (1, 2048)):
            x, state = normal(b, t, 4096, dtype=dtype), normal(b, 3, 4096, dtype=dtype)
            operands = x, normal(4096, 4, dtype=dtype), state
            name = f"causal_conv1d of {b} x {t}, {dtype}"
            yield Case("causal_conv1d", name, conv, operands)
            if t > 1:
                f = both_passes(lambda *a: conv(*a)[0])
                yield Case("causal_conv1d", name + GRADIENT, f, (operands, x))


def softmax_cases() -> Iterator[Case]:
    import jax.numpy as jnp

    from jaxkern import softmax

    for dtype in ("float32", "bfloat16"):
        for rows, s in ((1, 49152), (9, 4096), (512, 128), (2048, 2048)):
            x = normal(rows, s, dtype=dtype)
            name = f"softmax {rows}x{s} {dtype}"
            yield Case("softmax", name, softmax, (x,))
            yield Case("softmax", name + GRADIENT, both_passes(softmax), ((x,), x))
        x, mask = normal(9, 512, 512, dtype=dtype), jnp.tri(512, dtype=bool)
        name = f"softmax 9x512x512 {dtype}, causal"
        yield Case("softmax", name, softmax, (x, mask))


def rotation_cases() -> Iterator[Case]:
    """t tokens of n heads of h."""
    from jaxkern import apply_rope

    for dtype in ("float32", "bfloat16"):
        for t, n, h in ((1, 9, 64), (1, 32, 128), (256, 9, 64), (512, 32, 128)):
            x, c = normal(t, n, h, dtype=dtype), normal(t, h // 2)
            for pairing in ("neox", "interleaved"):

                def f(x, c, pairing=pairing):
                    return apply_rope(x, c, c, pairing=pairing)

                name = f"rope {t}x{n}x{h} {dtype}, {pairing}"
                yield Case("rope", name, f, (x, c))


def dense_cases() -> Iterator[Case]:
    """Weights of two bytes under x of float32, or of their own dtype."""
    from jaxkern import linear

    for d, f in PRODUCTS:
        for rows in (1, 8, 64, 256):
            for x_dtype, w_dtype in (
                ("float32", "bfloat16"),
                ("bfloat16", "bfloat16"),
                ("float16", "float16"),
            ):
                x, w = normal(rows, d, dtype=x_dtype), normal(f, d, dtype=w_dtype)
                name = f"{rows} of {x_dtype}, {f}x{d} {w_dtype}"
                yield Case("linear", name, linear, (x, w), 2.0 * rows * d * f)


def affine_cases() -> Iterator[Case]:
    """MLX's words, x of float32."""
    import jax.numpy as jnp

    from jaxkern import AffineTensor, quantize_affine, quantized_matmul

    product = "affine_matmul"
    for d, f in PRODUCTS:
        for bits, group_size, dtype in ((4, 64, "float16"), (8, 64, "bfloat16")):
            w = quantize_affine(normal(f, d), bits=bits, group_size=group_size)
            floats = (jnp.asarray(a, dtype) for a in (w.scales, w.biases))
            w = AffineTensor(w.codes, *floats, bits, group_size)
            for rows in (1, 8, 64, 256):
                name = f"{rows} of float32, {f}x{d} {bits} bits / {group_size}"
                x = normal(rows, d)
                yield Case(product, name, quantized_matmul, (x, w), 2.0 * rows * d * f)


PRODUCTS = ((2048, 2048), (576, 3072), (1536, 576))  # d, f; the latter of SmolLM2
FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {
    "sampling": sampling_cases,
    "attention": attention_cases,
    "norms": norm_cases,
    "delta_rule": delta_rule_cases,
    "state_space": state_space_cases,
    "experts": expert_cases,
    "losses": loss_cases,
    "convolutions": convolution_cases,
    "softmax": softmax_cases,
    "rotations": rotation_cases,
    "dense": dense_cases,
    "affine": affine_cases,
}
