"""Writes the table of architectures in docs/models.md, with the errors it measures.

python docs/model_table.py
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- architectures -->\n", "<!-- end of architectures -->\n"
HEAD = "| architecture | GGUF | `model_type` | golden error |\n|---|---|---|---|\n"


def main() -> None:
    import numpy as np

    from jaxkern.models import load
    from jaxkern.models.architecture import page_of
    from jaxkern.models.registry import ARCHITECTURES

    errors: dict[str, float] = {}
    for path in sorted((ROOT / "tests" / "golden").glob("transformers_*/*/golden.npz")):
        kind = json.loads((path.parent / "config.json").read_text())["model_type"]
        config, weights = load(path.parent, "f32")
        golden, page = np.load(path), page_of(config)
        x, _ = page.hidden_states(config, weights, golden["tokens"][None])
        logits = page.logits(config, weights, x)[0]
        error = float(np.abs(np.asarray(logits) - golden["logits"]).max())
        errors[kind] = max(error, errors.get(kind, 0.0))
    rows = [
        f"| {a.name} | {a.gguf or '-'} | {a.model_type or '-'} "
        f"| {f'{errors[a.model_type]:.0e}' if a.model_type in errors else '-'} |\n"
        for a in ARCHITECTURES
    ]
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(before + BEGIN + HEAD + "".join(rows) + END + after)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
