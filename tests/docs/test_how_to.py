"""The pages of docs/how_to run block by block and print what they say.

Their code was to be read only; the tutorial alone was run.
"""

import contextlib
import io
import re
import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from jaxkern.primitives.kernel_primitive import REGISTRY
from tests.docs.test_index import BLOCK

HOW_TO = Path(__file__).parents[2] / "docs/how_to"
FRAMEWORKS = HOW_TO / "use_from_a_framework.md"
PAGES = sorted(HOW_TO.glob("*.md"))


def check_blocks(page: Path, blocks: list[tuple[str, str]]) -> None:
    names: dict = {"__name__": "__main__"}
    known = set(REGISTRY)
    try:
        with np.printoptions():
            for code, said in blocks:
                out = io.StringIO()
                with contextlib.redirect_stdout(out):
                    exec(compile(code, str(page), "exec"), names)
                assert not said or out.getvalue() == said, code
    finally:
        for name in set(REGISTRY) - known:
            del REGISTRY[name]


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p != FRAMEWORKS], ids=lambda p: p.stem
)
def test_a_page_prints_what_it_says(page, tmp_path, monkeypatch):
    (tmp_path / "tests").symlink_to(HOW_TO.parents[1] / "tests")  # a tiny model's files
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(page.read_text())
    assert any(said for _, said in blocks)
    check_blocks(page, blocks)


# the imports take seconds; Keras is what `make docs` installs beside the tools
@pytest.mark.full
@pytest.mark.parametrize("framework", ["flax", "equinox", "keras"])
def test_a_layer_of_a_framework(framework, monkeypatch):
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    blocks = BLOCK.findall(FRAMEWORKS.read_text())
    [block] = [
        b for b in blocks if re.search(rf"^(import|from) {framework}\b", b[0], re.M)
    ]
    assert block[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the framework's own imports
        check_blocks(FRAMEWORKS, [block])


def test_a_page_is_one_screen():
    for page in PAGES:
        lines = page.read_text().splitlines()
        assert len(lines) <= 110 and lines[0].startswith("# "), page.name
