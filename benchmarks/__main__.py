"""`python -m benchmarks NAME [options]`: the benchmark of an operator, or a script."""

import sys

from benchmarks._find import benchmark, names


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in names():
        print(f"usage: python -m benchmarks {{{','.join(sorted(names()))}}} [options]")
        return 2
    return benchmark(sys.argv[1]).main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
