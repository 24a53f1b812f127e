"""The snippets of docs/graph.md run in order and print what the page says."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs/graph.md"


def test_the_snippets_run(capsys):
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(snippets) == 8
    names = {}
    for snippet in snippets:
        exec(compile(snippet, str(PAGE), "exec"), names)
    printed = capsys.readouterr().out
    said = re.findall(r"^# (.*)$", "\n".join(snippets), re.MULTILINE)
    said += re.findall(r"```text\n(.*?)  \.\.\.", PAGE.read_text(), re.DOTALL)
    assert len(said) == 3
    for text in (*said, "['add', 'rms_norm']", "opaque work: debug_print of '{}'"):
        assert text in printed
    assert names["y"].shape == names["gradient"].shape == (4, 64)
