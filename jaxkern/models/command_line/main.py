"""`main`: the parser of all commands, and errors as one line."""

import argparse
import importlib.metadata
import io
import sys
from collections.abc import Sequence
from typing import NoReturn

from jaxkern.models.command_line import (
    apple,
    chat,
    doctor,
    generate,
    info,
    plan,
    quantize,
    train,
)
from jaxkern.models.command_line.errors import is_of_the_device, one_line
from jaxkern.models.command_line.packages import MODELS, pip_install

COMMANDS = chat, generate, train, quantize, info, plan, doctor, apple


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
    _write_what_can_be_written()
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except ModuleNotFoundError as error:
        message = f"{error}. Install it: {pip_install(MODELS)}"
    except BrokenPipeError:  # whoever read the output has gone
        sys.stderr.close()  # else the interpreter complains about stdout at its end
        return 141  # as a shell reports it
    except (ValueError, TypeError, OSError, OverflowError, ImportError) as error:
        message = str(error)
    except MemoryError as error:
        message = f"out of memory. {error}".strip()
    except RuntimeError as error:
        if not is_of_the_device(error):
            raise  # a fault of this program
        message = str(error)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130  # as a shell reports it
    print(f"jaxkern: {one_line(message)}", file=sys.stderr)
    return 2


def _write_what_can_be_written() -> None:
    """Where stdout is no UTF-8, an answer has ? for the characters that are not there;
    it would end at the first one."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="jaxkern", description="Whole models from one executable.")
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="of jaxkern, jax and jaxlib"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    return parser
