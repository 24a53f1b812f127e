"""The C++ kernels: SmolLM2-135M against llama.cpp, operators against XLA:CPU.

    python -m benchmarks cpu --peers --llama-python PATH

The model runs as it is in the file, and its matrices encoded anew as Q8_0 and Q4_0.
Rounds alternate between the two sides, so that both meet the same load of the machine;
times of operators are the least of many.
"""

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks._records import OURS, Row, write_run
from benchmarks.cpu_generate import (
    LLAMA_CPP,
    PROMPT_TOKENS,
    TEXT,
    limit_threads,
    llama_cpp,
    model_parser,
    ours,
    report,
    rows_of,
    run_of,
)

READ_BYTES = 2**27  # far larger than the caches


def main(arguments: list[str]) -> int:
    parser = model_parser("cpu", __doc__)
    parser.add_argument("--formats", default="file,Q8_0,Q4_0", help="by commas")
    options = parser.parse_args(arguments)
    limit_threads(options.threads)

    from jaxkern.formats.gguf import read_gguf
    from jaxkern.models.command_line import demo_model
    from jaxkern.models.tokenizer import tokenizer_from_gguf

    print(f"memory is read at {read_rate(options.threads) / 1e9:.1f} GB/s")
    operators()
    path = Path(options.model) if options.model else demo_model()
    prompt = tokenizer_from_gguf(read_gguf(path).metadata).encode(TEXT)[:PROMPT_TOKENS]
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.formats.split(","):
            file = path if name == "file" else encoded(path, name, Path(folder))
            case = "the file" if name == "file" else name
            case += f" ({file.stat().st_size / 1e6:.0f} MB)"
            print(f"\n{case}")
            runs = {OURS: ours(file, "packed_int8", prompt)}
            if options.peers:
                peer = llama_cpp(options.llama_python, file, options.threads, prompt)
                if isinstance(peer, str):
                    print(f"no llama.cpp: {peer}")
                else:
                    runs[LLAMA_CPP] = peer
            rounds = [
                {name: run() for name, run in runs.items()}
                for _ in range(options.rounds + 1)
            ][1:]  # the first one warms up
            report(rounds, options.threads)
            found += rows_of(case, OURS, rounds)
    if options.out:
        write_run(run_of("cpu", found, options), options.out)
    return 0


def read_rate(threads: int) -> float:
    """Bytes per second that all threads together read from memory, the best of 10."""
    arrays = [np.ones(READ_BYTES // 8, np.int64) for _ in range(threads)]

    def once() -> float:
        readers = [threading.Thread(target=np.max, args=(a,)) for a in arrays]
        start = time.perf_counter()
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        return threads * READ_BYTES / (time.perf_counter() - start)

    return max(once() for _ in range(10))


def encoded(path: Path, qtype: str, folder: Path) -> Path:
    """The model with every quantised matrix in another block format."""
    import gguf

    reader = gguf.GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    to = folder / f"{qtype}.gguf"
    writer = gguf.GGUFWriter(to, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        element = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, field.contents(), field.types[0], element)
    kind = gguf.GGMLQuantizationType[qtype]
    for tensor in reader.tensors:
        if tensor.tensor_type.name in ("F32", "F16", "BF16"):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        blocks = gguf.quants.quantize(values, kind)
        writer.add_tensor(tensor.name, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def operators() -> None:
    """Each operator with a kernel: its time, and that of its reference."""
    import jax
    import jax.numpy as jnp

    from jaxkern import attention, backend, interleave, quantize_gguf, quantized_matmul

    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    def compare(name: str, f: Callable, operations: float, *operands) -> None:
        least = {}
        for kind in ("cpp", "xla"):
            with backend(kind):  # also while it runs: jit traces anew outside
                run = jax.jit(lambda *a: f(*a))
                jax.block_until_ready(run(*operands))
                least[kind] = min(timed(run, operands) for _ in range(40))
        ours, xla = least["cpp"], least["xla"]
        rate = operations / ours / 1e9
        print(
            f"{name:34} {ours * 1e6:9.1f} us {rate:7.1f} GOP/s  "
            f"XLA {xla * 1e6:9.1f} us  {xla / ours:5.1f}x"
        )

    def timed(run: Callable, operands) -> float:
        start = time.perf_counter()
        jax.block_until_ready(run(*operands))
        return time.perf_counter() - start

    for qtype in ("Q4_0", "Q4_1", "Q8_0"):
        w = interleave(quantize_gguf(normal(2048, 2048), qtype))
        for rows in (1, 256):
            compare(
                f"{qtype} 2048x2048, int8, {rows} rows",
                lambda x, w: quantized_matmul(x, w, compute_dtype=jnp.int8),
                2.0 * rows * 2048 * 2048,
                normal(rows, 2048),
                w,
            )
    for t, s in ((1, 512), (1, 4096), (256, 256)):
        lengths = jnp.array([s])
        compare(
            f"attention of {t} over {s}, 9/3 heads",
            lambda q, k, v, n, t=t: attention(
                q, k, v, kv_lengths=n, q_offset=n - t, causal=True
            ),
            4.0 * t * s * 9 * 64,
            normal(1, t, 9, 64),
            normal(1, s, 3, 64),
            normal(1, s, 3, 64),
            lengths,
        )
