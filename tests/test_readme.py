"""The README's example runs as it stands."""

import re
from pathlib import Path

from jaxkern.cpu.cpu_call import missing

README = Path(__file__).parent.parent / "README.md"


def test_the_example_runs(capsys):
    code = re.search(r"```python\n(import jax.*?)```", README.read_text(), re.DOTALL)
    assert code is not None and len(code.group(1).splitlines()) < 25
    exec(compile(code.group(1), str(README), "exec"), {})
    runs = "xla" if missing() else "cpp"
    assert f"attention on cpu runs {runs}" in capsys.readouterr().out
