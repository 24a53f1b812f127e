"""The Python of docs/training.md runs as it stands, one block after the other."""

import re
from pathlib import Path

import jax.numpy as jnp
import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/training.md"
MODEL = ROOT / "tests/golden/transformers/qwen3_tied"


@pytest.mark.full
def test_the_blocks_run(tmp_path, monkeypatch):
    (tmp_path / "model-folder").symlink_to(MODEL)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    blocks = python_blocks()
    assert len(blocks) == 4
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert int(names["state"].steps) == 1 and jnp.isfinite(names["metrics"].loss)


def test_the_block_with_frozen_weights_runs_alone_and_prints_what_it_says(capsys):
    exec(compile(python_blocks()[-1], str(PAGE), "exec"), {})
    [said] = re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert capsys.readouterr().out == said


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
