"""The documentation as a site: `make docs` runs Sphinx with the checkout as its source.

Pages, notebooks, CHANGELOG.md and CONTRIBUTING.md are taken where they lie, so their
relative links work here and on a plain git host. What is added is the order of the
pages (`PAGES`) and the reference, which docs/reference_pages.py writes from the
docstrings.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(DOCS)]

import reference_pages  # noqa: E402

if TYPE_CHECKING:
    from sphinx.application import Sphinx  # pyright: ignore[reportMissingImports]

project = "jaxkern"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "docs/reference/*.rst",
    "notebooks/*.ipynb",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
]
# no page is in them: Sphinx would look for some in 40 000 files, twice
exclude_patterns = [".*", "build", "jaxkern", "tests", "benchmarks"]
html_theme = "furo"
html_title = "jaxkern"
html_static_path = ["site"]
html_css_files = ["wide.css"]
html_show_sourcelink = html_show_copyright = False

nb_execution_mode = "off"  # tests/test_notebooks.py runs them; here the outputs stored
myst_heading_anchors = 4
python_maximum_signature_line_length = 60
napoleon_use_rtype, napoleon_use_ivar = False, True
autodoc_typehints = "none"  # signatures are the source's, see reference_pages
copybutton_prompt_text = ">>> |\\$ "
copybutton_prompt_is_regexp = True

# {caption: pages}, in the order of the side bar; a test holds it complete
PAGES = {
    "How to": [
        "docs/how_to/choose_a_kernel",
        "docs/how_to/quantise_and_save",
        "docs/how_to/decode_with_a_cache",
        "docs/how_to/answer_many_prompts",
        "docs/how_to/attend_to_chosen_keys",
        "docs/how_to/shard",
        "docs/how_to/train",
        "docs/how_to/export",
        "docs/how_to/write_an_operator",
        "docs/how_to/write_a_kernel",
        "docs/how_to/port_a_model",
        "docs/how_to/use_from_a_framework",
    ],
    "Guides": [
        "docs/coming_from",
        "docs/models",
        "docs/command_line",
        "docs/training",
        "docs/runtime",
        "docs/graph",
        "docs/limits_and_policies",
        "docs/apple",
    ],
    "Is it faster for me?": ["docs/performance", "docs/performance/*"],
    "Reference": ["docs/reference/*", "docs/operators", "docs/collectives"],
    "Design": ["docs/design/kernel_primitive", "docs/design/*"],
    "Notebooks": ["notebooks/one_op", "notebooks/*"],
    "Project": ["CONTRIBUTING", "CHANGELOG"],
}


def with_the_pages(app: "Sphinx", docname: str, source: list[str]) -> None:
    """The side bar: on a git host docs/index.md has its tables in the place of it."""
    if docname == root_doc:
        source[0] += "".join(map(toctree, PAGES))


def toctree(caption: str) -> str:
    lines = [f":caption: {caption}", ":hidden:", ":glob:", ":maxdepth: 1", ""]
    lines += ["/" + page for page in PAGES[caption]]
    return "\n```{toctree}\n" + "\n".join(lines) + "\n```\n"


def lead_to_the_index(app: "Sphinx", error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        page = '<meta http-equiv="refresh" content="0; url=docs/index.html">\n'
        (Path(app.outdir) / "index.html").write_text(page)


def setup(app: "Sphinx") -> None:
    reference_pages.write(DOCS / "reference")
    app.connect("source-read", with_the_pages)
    app.connect("build-finished", lead_to_the_index)
    app.connect("autodoc-process-signature", reference_pages.written_signature)
    # before napoleon, which reads its sections
    app.connect("autodoc-process-docstring", reference_pages.as_rst, priority=400)
