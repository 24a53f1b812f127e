"""What an extra of pyproject.toml asks for, without jaxkern itself, one a line:

python tests/packages.py test
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
OWN_EXTRAS = re.compile(r"jaxkern-ops\[(.+)\]")


def packages(project: dict, extra: str) -> Iterator[str]:
    for requirement in project["optional-dependencies"][extra]:
        if own := OWN_EXTRAS.fullmatch(requirement):
            for name in own[1].split(","):
                yield from packages(project, name)
        else:
            yield requirement


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    every = (*project["dependencies"], *packages(project, sys.argv[1]))
    print(*dict.fromkeys(every), sep="\n")
