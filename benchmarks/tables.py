"""`python -m benchmarks tables DIR [NAME...]`: records of `--out DIR` as markdown."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks._report import limits_line, markdown


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks tables")
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="of records, all by default")
    options = parser.parse_args(arguments)
    names = options.names or sorted(file.stem for file in options.folder.glob("*.json"))
    for name in names:
        record = json.loads((options.folder / f"{name}.json").read_text())
        if "results" not in record:  # of goals, or of a CPU: printed while they ran
            continue
        print(f"### {name}\n\n{markdown(record)}\n\n{limits_line(record)}\n")
    return 0
