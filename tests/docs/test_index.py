"""docs/index.md: its tutorial runs and prints what it says, and it leads everywhere.

The README's one example was run before and no link was followed: a page could be moved,
or stand under docs/ where no reader comes by.
"""

import contextlib
import io
import re
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
INDEX = DOCS / "index.md"
PAGES = sorted(DOCS.rglob("*.md"))
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def links(page: Path) -> list[Path]:
    """The files that a page names by a relative link."""
    found = LINK.findall(CODE.sub("", page.read_text()))
    files = [link.split("#")[0] for link in found if "://" not in link]
    return [(page.parent / file).resolve() for file in files if file]


def test_the_tutorial_prints_what_it_says():
    names: dict = {}
    blocks = BLOCK.findall(INDEX.read_text())
    assert len(blocks) >= 7 and sum(bool(said) for _, said in blocks) >= 6
    with np.printoptions():  # which the tutorial sets
        for code, said in blocks:
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(code, str(INDEX), "exec"), names)
            assert out.getvalue() == said, code


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda p: p.name
)
def test_no_link_is_dead(page):
    dead = [str(file) for file in links(page) if not file.exists()]
    assert not dead


def test_every_page_is_linked_from_the_index_or_from_a_page_that_it_links_to():
    near = set(links(INDEX))
    reached = near.union(*(links(p) for p in near if p.suffix == ".md"), {INDEX})
    assert len(PAGES) > 30
    lost = [str(page.relative_to(ROOT)) for page in PAGES if page not in reached]
    assert not lost, f"link {lost} from docs/index.md"


def test_a_link_is_found_and_code_is_none(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("[a](b.md#c) [d](https://e.f) `x[0](g.md)`\n```\n[h](i.md)\n```\n")
    assert links(page) == [tmp_path / "b.md"]
