"""`jaxkern plan`: what one decode step does."""

import argparse
import json

from jaxkern.models.command_line.options import (
    add_cache,
    add_tower,
    add_weights_and_backend,
    cache_of,
)
from jaxkern.models.command_line.screen import show


def add_to(commands) -> None:
    parser = commands.add_parser("plan", help="say what one decode step does")
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("file", metavar="MODEL", help="a GGUF file, or a folder of Hugging Face")
    add_tower(parser)
    add_weights_and_backend(parser)
    add_cache(parser)
    add("--batch", type=int, default=1, metavar="N", help="sequences at a time")
    add("--slots", type=int, default=512, metavar="N", help="tokens in the cache")
    add("--profile", action="store_true", help="run the step and measure it")
    add("--json", action="store_true", help="plain numbers instead of tables")


def run(options: argparse.Namespace) -> int:
    from jaxkern import backend
    from jaxkern.models.plan_report import as_json, plan_decode_step, tables

    if min(options.batch, options.slots) < 1:
        raise ValueError("plan: --batch and --slots must be at least 1.")
    if max(options.batch, options.slots) >= 2**31:
        raise ValueError("plan: --batch and --slots must be below 2147483648.")
    with backend(options.backend):
        plan, arguments = plan_decode_step(
            options.file,
            tower=options.tower,
            weights=options.weights,
            batch=options.batch,
            slots=options.slots,
            cache=cache_of(options),
        )
    profile = plan.profile(*arguments) if options.profile else None
    if options.json:
        print(json.dumps(as_json(plan, profile)))
    else:
        show(tables(plan, profile))
    return 0
