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
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert int(names["state"].steps) == 1 and jnp.isfinite(names["metrics"].loss)
