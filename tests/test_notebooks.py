"""Every notebook runs top to bottom."""

import os
import warnings
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
QUICK = ("one_op", "read_a_plan")
TRAINING = [path for path in NOTEBOOKS if path.stem.startswith("train_")]
STEPS, FEWER_STEPS = "STEPS, ROWS, LENGTH = 300, ", "STEPS, ROWS, LENGTH = 11, "


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


@pytest.mark.parametrize("path", TRAINING, ids=lambda p: p.stem)
def test_a_training_notebook_runs_with_few_steps(path, monkeypatch):
    """In this process: a kernel of its own would import JAX anew for seconds."""
    plt = pytest.importorskip("matplotlib.pyplot")
    pytest.importorskip("equinox")
    monkeypatch.chdir(ROOT)
    for name in ("XLA_FLAGS", "JAX_PLATFORMS"):  # which its first cell sets
        monkeypatch.setenv(name, os.environ.get(name, ""))
    plt.switch_backend("agg")
    cells = nbformat.read(path, as_version=4).cells
    code = [c.source for c in cells if c.cell_type == "code"]
    assert sum(STEPS in source for source in code) == 1
    names: dict = {"__name__": "__main__"}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FigureCanvasAgg is non-interactive")
        for source in code:
            source = source.replace(STEPS, FEWER_STEPS)
            exec(compile(source, path.stem, "exec"), names)
    figures = plt.get_fignums()
    plt.close("all")
    assert len(figures) == 2
