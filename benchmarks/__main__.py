"""`python -m benchmarks NAME [options]`: one module of this folder per benchmark."""

import importlib
import pkgutil
import sys

import benchmarks


def main() -> int:
    names = sorted(
        module.name
        for module in pkgutil.iter_modules(benchmarks.__path__)
        if not module.name.startswith(("_", "peer_"))
    )
    if len(sys.argv) < 2 or sys.argv[1] not in names:
        print(f"usage: python -m benchmarks {{{','.join(names)}}} [options]")
        return 2
    return importlib.import_module(f"benchmarks.{sys.argv[1]}").main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
