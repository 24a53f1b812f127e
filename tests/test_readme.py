"""The README's examples run as they stand, one after the other."""

import re
from pathlib import Path

from jaxkern.cpu.cpu_call import missing

README = Path(__file__).parent.parent / "README.md"


def test_the_example_runs(capsys):
    block, choice = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict = {}
    assert len(block.splitlines()) < 25
    exec(compile(block, str(README), "exec"), names)
    runs = "xla" if missing() else "cpp"
    assert f"attention on cpu runs {runs}" in capsys.readouterr().out
    exec(compile(choice, str(README), "exec"), names)
    assert "attention on cuda runs " in capsys.readouterr().out
