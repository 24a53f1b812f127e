"""`jaxkern info`: what a GGUF file holds."""

import argparse

from jaxkern.models.command_line.screen import show


def add_to(commands) -> None:
    parser = commands.add_parser("info", help="say what a GGUF file holds")
    parser.set_defaults(run=run)
    parser.add_argument("file", metavar="FILE.gguf")


def run(options: argparse.Namespace) -> int:
    from jaxkern.formats.gguf_report import describe

    show(describe(options.file))
    return 0
