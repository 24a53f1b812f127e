"""The snippets of docs/runtime.md run as they stand, one after the other."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/runtime.md"


@pytest.mark.full
def test_the_snippets_run(capsys, tmp_path, monkeypatch):
    pytest.importorskip("flatbuffers")  # jax.export needs it to serialise
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(snippets) == 4
    names = {}
    for code in snippets:
        exec(compile(code, str(PAGE), "exec"), names)
    assert "no command buffer: a CPU has none" in capsys.readouterr().out
