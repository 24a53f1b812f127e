"""The README's example runs as it stands."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_example_runs(capsys):
    code = re.search(r"```python\n(import jax.*?)```", README.read_text(), re.DOTALL)
    assert code is not None and len(code.group(1).splitlines()) < 25
    exec(compile(code.group(1), str(README), "exec"), {})
    assert "attention on cpu runs xla" in capsys.readouterr().out
