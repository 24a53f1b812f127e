"""The README's examples run as they stand, one after the other."""

import re
from pathlib import Path

from jaxkern.cpu.cpu_call import missing

README = Path(__file__).parent.parent / "README.md"


def test_the_examples_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    first, block, choice = blocks
    assert len(first.splitlines()) <= 6 and len(block.splitlines()) < 25
    names: dict = {}
    said = []
    for code in blocks:
        exec(compile(code, str(README), "exec"), names)
        said.append(capsys.readouterr().out)
    runs = "xla" if missing() else "cpp"
    assert f"attention on cpu runs {runs}" in said[0]
    assert "attention on cuda runs " in said[2] and "print" in choice
