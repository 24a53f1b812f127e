"""The site: every page has its place, every public name its entry, and it builds.

Pages were read on a git host alone, where a page that no order names, a docstring that
is no mark-up, or a dead link from a notebook shows to nobody.
"""

import ast
import fnmatch
import importlib.util
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import jaxkern
import jaxkern.train
from jaxkern import runtime, testing
from jaxkern.interop import flax, jax_nn, tokamax

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def module_of(name: str):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def reference():
    return module_of("reference_pages")


def order_of_pages() -> dict[str, list[str]]:
    """`PAGES` of docs/conf.py, which writes files when it runs."""
    tree = ast.parse((DOCS / "conf.py").read_text())
    [found] = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PAGES"
    ]
    return ast.literal_eval(found)


def test_every_page_and_notebook_has_a_place_in_the_side_bar():
    files = [*DOCS.rglob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")]
    pages = {str(f.relative_to(ROOT).with_suffix("")) for f in files}
    pages |= {"CONTRIBUTING", "CHANGELOG"}
    assert len(pages) > 50
    order = [p for pages in order_of_pages().values() for p in pages]
    lost = {p for p in pages if not any(fnmatch.fnmatch(p, o) for o in order)}
    assert lost == {"docs/index"}  # the root, which holds the others
    named = [o for o in order if not o.startswith("docs/reference")]
    gone = [o for o in named if not fnmatch.filter(pages, o)]
    assert not gone and len(named) == len(set(named))


def test_every_public_name_stands_once_in_the_reference(reference):
    names = [name for _, _, names in reference.pages() for name in names]
    public = {f"jaxkern.{n}" for n in jaxkern.__all__}
    public |= {f"jaxkern.train.{n}" for n in jaxkern.train.__all__}
    for module in (flax, jax_nn, tokamax, testing, runtime):
        public |= {
            f"{module.__name__}.{n}"
            for n in module.__all__
            if not inspect.ismodule(getattr(module, n))
        }
    public |= {f"jaxkern.runtime.testing.{n}" for n in runtime.testing.__all__}
    public |= {"jaxkern.lowering.lower.lower"}
    declare = "jaxkern.primitives.kernel_primitive"
    public |= {f"{declare}.at_least_f32", f"{declare}.kernel_primitive"}
    assert len(names) == len(set(names)) and set(names) == public


def test_a_signature_has_its_dims(reference):
    found = reference.written_signature(
        None, "function", "jaxkern.rms_norm", jaxkern.rms_norm, None
    )
    assert found == (
        "(x: Float[Array, '... d'], weight: Float[Array, 'd'] | None=None, "
        "bias: Float[Array, 'd'] | None=None, *, eps: float=1e-06, "
        "offset: float=0.0)",
        "Float[Array, '... d']",
    )


def test_a_formula_is_a_block_and_a_name_is_code(reference):
    lines = reference.translated((inspect.getdoc(jaxkern.rms_norm) or "").splitlines())
    at = lines.index(".. code-block:: text")
    assert lines[at + 1 : at + 3] == [
        "",
        "    y = x / sqrt(mean(x**2) + eps) * (weight + offset) + bias",
    ]
    assert "  x: ``[..., d]``, any float dtype." in lines
    assert "  eps: added to the mean square, in units of x\\*\\*2." in lines
    assert "    - *y*: ``[..., d]``, dtype of x." in lines


@pytest.mark.parametrize(
    "path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda p: p.stem
)
def test_a_notebook_is_stored_with_what_it_printed(path):
    cells = json.loads(path.read_text())["cells"]
    outputs = [o for cell in cells for o in cell.get("outputs", [])]
    kinds = {o["output_type"] for o in outputs}
    assert outputs and not kinds & {"error"}, "run it and save it"
    assert not [o for o in outputs if o.get("name") == "stderr"]


def test_it_builds_without_a_warning(tmp_path):
    """20 seconds; `make docs` is the same."""
    options = "-W --keep-going -q -E -c docs -d".split()
    built = subprocess.run(
        [
            sys.executable,
            "-m",
            "sphinx",
            *options,
            tmp_path / "trees",
            ".",
            tmp_path / "site",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    site = tmp_path / "site"
    assert "docs/index.html" in (site / "index.html").read_text()
    norms = (site / "docs/reference/00_norm.html").read_text()
    assert 'id="jaxkern.rms_norm"' in norms and "mean(x**2)" in norms
    assert list((site / "_images").glob("*.png")), "no figure of a notebook"
