"""`jaxkern quantize`: a GGUF file in another block format."""

import argparse
import contextlib
import os

from jaxkern.models.command_line.screen import show

LONGEST_TEXT = 2**22  # bytes of --text


def add_to(commands) -> None:
    parser = commands.add_parser("quantize", help="write a model in fewer bits")
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("source", metavar="IN.gguf")
    add("target", metavar="OUT.gguf", help="must not be there yet")
    add("--to", required=True, metavar="MIX", help="Q4_K_M, Q8_0, IQ4_XS, F16, ...")
    add("--text", metavar="FILE", help="compare both models' next tokens on this text")
    add("--quiet", action="store_true", help="no table")


def run(options: argparse.Namespace) -> int:
    from jaxkern.models.command_line.progress import spinner
    from jaxkern.models.quantize_file import quantize_file

    if os.path.isdir(options.source):
        raise ValueError(
            f"quantize: {options.source} is a folder, expected a GGUF file. Convert it "
            "with llama.cpp's convert_hf_to_gguf.py first."
        )
    text = None if options.text is None else _text(options.text)
    with contextlib.ExitStack() as entered:
        from jaxkern.models.command_line.executables import kept_executables

        entered.enter_context(kept_executables(True))
        say = entered.enter_context(spinner("reading", quiet=options.quiet))
        reports = quantize_file(
            options.source,
            options.target,
            options.to,
            done=lambda report: say(f"{report.name} to {report.after}"),
        )
        divergence = None
        if text is not None:
            say("comparing the next tokens")
            divergence = _divergence(options, text)
    if not options.quiet:
        _print_tables(options, reports, divergence)
    return 0


def _text(name: str) -> str:
    with open(name, "rb") as file:
        content = file.read(LONGEST_TEXT + 1)
    if len(content) > LONGEST_TEXT:
        raise ValueError(f"--text: {name} has more than {LONGEST_TEXT} bytes.")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--text: {name} is not UTF-8 at byte {error.start}."
        ) from None


def _divergence(options: argparse.Namespace, text: str):
    from jaxkern.formats.gguf import read_gguf
    from jaxkern.models.logit_divergence import logit_divergence
    from jaxkern.models.tokenizer import tokenizer_from_gguf

    tokenizer = tokenizer_from_gguf(read_gguf(options.source).metadata)
    return logit_divergence(options.source, options.target, tokenizer.encode(text))


def _print_tables(options: argparse.Namespace, reports, divergence) -> None:
    from rich.table import Table
    from rich.text import Text

    from jaxkern.formats.printable import printable

    table = Table(title=f"{os.path.basename(options.target)}: {options.to}")
    table.add_column("tensor", no_wrap=True)
    table.add_column("from", no_wrap=True)
    table.add_column("to", no_wrap=True)
    for name in ("MB", "error %", "largest"):
        table.add_column(name, justify="right", no_wrap=True)
    for report in reports:
        errors = (f"{100 * report.error:.3f}", f"{report.largest:.2g}")
        same = report.before == report.after
        table.add_row(
            Text(printable(report.name)),
            report.before,
            report.after,
            f"{report.nbytes / 1e6:.2f}",
            *(("", "") if same else errors),
        )
    table.add_section()
    weights = sum(_size(report) for report in reports)
    nbytes = sum(report.nbytes for report in reports)
    table.add_row(
        f"{8 * nbytes / weights:.2f} bits a weight",
        "",
        "",
        f"{nbytes / 1e6:.2f}",
        "",
        "",
    )
    show(table)
    if divergence is not None:
        print(
            f"next tokens of {divergence.tokens}: KL {divergence.mean:.5f} on average, "
            f"{divergence.largest:.4f} at most; {100 * divergence.agree:.1f} % agree"
        )


def _size(report) -> int:
    size = 1
    for n in report.shape:
        size *= n
    return size
