"""Every notebook runs top to bottom."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
QUICK = ("one_op", "read_a_plan")


# nbclient's kernel start-up warns about its own event loop and sockets
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(p, id=p.stem, marks=[] if p.stem in QUICK else pytest.mark.full)
        for p in NOTEBOOKS
    ],
)
def test_notebook_runs(path):
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": str(path.parent.parent)}}
    )
    client.execute()
    texts = [o for c in notebook.cells for o in c.get("outputs", [])]
    assert texts and all(o.output_type != "error" for o in texts)
