"""Nothing but a page and its entry knows an architecture by name."""

import re
from pathlib import Path

import pytest

from jaxkern.models.registry import ARCHITECTURES, BY_GGUF, BY_MODEL_TYPE

MODELS = Path(__file__).parents[2] / "jaxkern" / "models"
OF_ALL = (
    *("loader", "registry", "generate", "text_model", "plan_report", "apple_check"),
    *("architecture", "cached_steps", "products", "weight_reader"),
    *("conversation", "logit_divergence", "quantize_file", "sampling"),
    *(f"command_line/{p.stem}" for p in sorted((MODELS / "command_line").glob("*.py"))),
)


@pytest.mark.parametrize("name", OF_ALL)
def test_what_serves_all_names_none(name):
    text = (MODELS / f"{name}.py").read_text()
    if name == "registry":  # the list itself: modules and their ARCHITECTURES
        text = re.sub(r"from jaxkern.models import \(?[\w\s,]+\)?\n", "", text)
        text = re.sub(r"\*?\w+\.ARCHITECTURES", "", text)
    known = {*BY_GGUF, *BY_MODEL_TYPE, *(a.name for a in ARCHITECTURES)}
    words = set(re.findall(r"[A-Za-z0-9]+", text.replace("llama.cpp", "").lower()))
    found = {k for k in known if set(re.split(r"[-_]", k.lower())) <= words}
    assert not found, f"models/{name}.py names {found}: put it into their files."


def test_names_are_unique():
    for kind in ("name", "gguf", "model_type"):
        names = [n for a in ARCHITECTURES if (n := getattr(a, kind)) is not None]
        assert len(names) == len(set(names)), kind
    for a in ARCHITECTURES:
        assert (a.gguf is None) == (a.from_gguf is None), a.name
        assert (a.model_type is None) == (a.from_folder is None), a.name


def test_the_docs_list_all():
    page = (MODELS.parents[1] / "docs" / "models.md").read_text()
    for a in ARCHITECTURES:
        row = f"| {a.name} | {a.gguf or '-'} | {a.model_type or '-'} |"
        assert row in page, "run python docs/model_table.py"
