"""Type checkers see what the public functions take and return.

`make lint` checks the library with pyright, which says nothing of how it looks from a
user's program: `typed_program.py` is one, and `make lint` reads it too.
"""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jax.numpy as jnp
import pytest

import jaxkern
from tests import typed_program

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "tests/typed_program.py"


def test_what_is_loaded_late_is_a_name_of_the_package():
    assert "train" in dir(jaxkern) and {*jaxkern.__all__} <= {*dir(jaxkern)}


def test_the_program_runs_and_is_read_by_lint():
    typed_program.program(jnp.ones((4, 8)))
    with pytest.raises((TypeError, AttributeError)):
        typed_program.mistakes(jnp.ones((4, 8)))
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    assert str(PROGRAM.relative_to(ROOT)) in options["include"]


@pytest.mark.full
def test_pyright_finds_a_type_that_is_another(tmp_path):
    """Of the package as installed, where a name must be public to pyright too."""
    pytest.importorskip("pyright")
    wrong = PROGRAM.read_text().replace(
        "jk.rms_norm(x), jax.Array)", "jk.rms_norm(x), float)"
    )
    assert wrong != PROGRAM.read_text()
    (tmp_path / "wrong.py").write_text(wrong)
    (tmp_path / "right.py").write_text(PROGRAM.read_text())
    command = ["-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    run = subprocess.run(
        [sys.executable, *command, "wrong.py", "right.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    found = json.loads(run.stdout)["generalDiagnostics"]
    [error] = [d for d in found if d["severity"] == "error"]
    assert error["file"].endswith("wrong.py") and "float" in error["message"]


@pytest.mark.full
def test_mypy_sees_the_same_types(tmp_path):
    pytest.importorskip("mypy")
    options = "--follow-imports=silent --warn-unused-ignores --cache-dir".split()
    run = subprocess.run(
        [sys.executable, "-m", "mypy", *options, tmp_path, PROGRAM],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert re.search("Success: no issues found", run.stdout), run.stdout + run.stderr
