"""`jaxkern apple check`: what an Apple plugin would refuse."""

import argparse
import contextlib


def add_to(commands) -> None:
    parser = commands.add_parser("apple", help="what runs on Apple GPUs")
    check = parser.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "check", help="lower for an Apple plugin and list what it would refuse"
    )
    check.set_defaults(run=run)
    add = check.add_argument
    add("target", nargs="?", metavar="FILE.gguf|OP", help="default: every op")
    add("--platform", default="mps", help="mps (default), metal, mtl or METAL")
    add(
        "--weights",
        default="packed",
        metavar="POLICY",
        help="of a model: packed (blocks of the file, default), affine (in MLX's "
        "format, which fused products read), f32 or bf16",
    )
    add("--fused", action="store_true", help="as if jax-mps 0.11.1 were installed")


def run(options: argparse.Namespace) -> int:
    """Returns 1 if there is a hard finding."""
    from jaxkern.lowering.apple import assume_jax_mps
    from jaxkern.models.apple_check import reports_of

    hard = 0
    with assume_jax_mps() if options.fused else contextlib.nullcontext():
        reports = reports_of(options.target, options.platform, options.weights)
        for name, report in reports:
            print(f"{name}: {report}")
            hard += len(report.hard)
    return 1 if hard else 0
