"""What `jaxkern train` and `jaxkern finetune` do; their options are in
`jaxkern.models.command_line.train`."""

import argparse
import contextlib
import importlib.util
import sys
from typing import Any

from jaxkern.models.command_line.packages import TRAIN, pip_install
from jaxkern.train.run_config import (
    RunConfig,
    read_toml,
    run_config,
    with_settings,
)

NEEDED = ("optax", "orbax.checkpoint")
STOPPED = 130
FLAGS = {  # of finetune: option -> key
    "text": "data.files",
    "out": "out",
    "steps": "steps",
    "rate": "optimizer.rate",
    "rank": "lora.rank",
    "alpha": "lora.alpha",
    "targets": "lora.targets",
    "merge": "lora.merge",
}


def run(options: argparse.Namespace) -> int:
    """One run, or the rest of one."""
    asked = asked_for(options)
    for name in NEEDED:
        if not is_installed(name):
            raise ValueError(f"{name} is not installed: {pip_install(TRAIN)}")
    join(options)

    from jaxkern.models.command_line.executables import kept_executables
    from jaxkern.train.placement import is_first
    from jaxkern.train.trainer import train

    with contextlib.ExitStack() as entered:
        entered.enter_context(kept_executables(not options.no_cache))
        outcome = train(asked, start=options.start, quiet=options.quiet)
    if outcome.stopped and is_first():
        print(
            f"stopped after step {outcome.step} of {asked.steps}, with a checkpoint in "
            f"{asked.out}; the same command goes on from there",
            file=sys.stderr,
        )
    if outcome.stopped:
        return STOPPED
    if is_first() and not options.quiet:
        if outcome.loss is None:
            print(f"all {asked.steps} steps were done before", file=sys.stderr)
        print(outcome.written)
    return 0


def asked_for(options: argparse.Namespace) -> RunConfig:
    """The file with what the options say; those of `finetune` are keys too."""
    tables = {} if options.config is None else read_toml(options.config)
    if options.adapts:
        if tables.get("model", {}) not in ({}, {"path": options.model}):
            raise ValueError(
                f"{options.config}: has a model, and the command line another one."
            )
        tables["model"] = {"path": options.model}
        tables.setdefault("lora", {})
    found = with_settings(tables, options.set)
    for option, key in FLAGS.items() if options.adapts else ():
        value = getattr(options, option)
        if option == "targets" and value is not None:
            value = value.split(",")
        if value is not None and value is not False:
            put(found, key, value)
    return run_config(found, options.config or "finetune")


def put(tables: dict[str, Any], key: str, value: Any) -> None:
    """Sets a key with its section."""
    section, _, own = key.rpartition(".")
    place = tables.setdefault(section, {}) if section else tables
    if not isinstance(place, dict):
        raise ValueError(f"{section} must be a section, got {place!r}.")
    place[own] = value


def is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package around it
        return False


def join(options: argparse.Namespace) -> None:
    """Joins the processes of the run, before any device is asked for."""
    given = (options.coordinator, options.processes, options.process)
    if given == (None, None, None):
        return
    if None in given:
        raise ValueError(
            "--coordinator, --processes and --process go together, or none of them."
        )
    if not 0 <= options.process < options.processes:
        raise ValueError(
            f"--process must be 0 to {options.processes - 1}, got {options.process}."
        )
    import jax

    jax.distributed.initialize(options.coordinator, options.processes, options.process)
