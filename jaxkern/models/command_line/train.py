"""`jaxkern train` and `finetune`: their options; see `jaxkern.train.command`."""

import argparse
import importlib

CONFIG = "TOML file; docs/training.md has its keys"


def add_to(commands) -> None:
    train = commands.add_parser(
        "train",
        help="train a model",
        description="Trains a new model or one of a folder, or goes on where the same "
        "command was stopped.",
    )
    train.set_defaults(run=run, adapts=False)
    train.add_argument("config", metavar="CONFIG.toml", help=CONFIG)
    _add_shared(train)
    tune = commands.add_parser(
        "finetune",
        help="train adapters (LoRA) of a model",
        description="Trains low-rank adapters beside a model that stays as it is, "
        "quantised or not, or goes on where the same command was stopped.",
    )
    tune.set_defaults(run=run, adapts=True)
    add = tune.add_argument
    add("model", metavar="MODEL", help="a GGUF file, or a folder of Hugging Face")
    add("config", nargs="?", metavar="CONFIG.toml", help=f"{CONFIG}; default: none")
    add("--text", action="append", metavar="FILE", help="data.files; several times")
    add("--out", metavar="FOLDER", help="what is written")
    add("--steps", type=int, metavar="N", help="batches")
    add("--rate", type=float, metavar="X", help="optimizer.rate")
    add("--rank", type=int, metavar="R", help="lora.rank (8)")
    add("--alpha", type=float, metavar="X", help="lora.alpha (16)")
    add(
        "--targets",
        metavar="NAMES",
        help="lora.targets with commas (q_proj,v_proj), or all",
    )
    add("--merge", action="store_true", help="also write the sums as a folder")
    _add_shared(tune)


def _add_shared(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="in the place of the file's, such as data.rows=4; several times",
    )
    add("--from", dest="start", type=int, metavar="STEP", help="go on from this one")
    add("--quiet", action="store_true", help="say nothing while it runs")
    add("--no-cache", action="store_true", help="keep no executables on disk")
    group = parser.add_argument_group(
        "several processes", "the same command for each, but for --process"
    )
    group.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0")
    group.add_argument("--processes", type=int, metavar="N", help="of the run")
    group.add_argument("--process", type=int, metavar="I", help="which one this is")


def run(options: argparse.Namespace) -> int:
    """Returns 130 where somebody stopped the run, as a shell reports it."""
    # the layer above this one, named as a text: its packages are asked for here alone
    return importlib.import_module("jaxkern.train.command").run(options)
