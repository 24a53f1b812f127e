import inspect
from collections.abc import Callable


def signature_of(f: Callable) -> str:
    """Names and defaults of the arguments, and the star: "x scale * axis=-1"."""
    said = []
    for p in inspect.signature(f).parameters.values():
        if p.kind == p.KEYWORD_ONLY and "*" not in said:
            said.append("*")
        said.append(p.name if p.default is p.empty else f"{p.name}={p.default!r}")
    return " ".join(said)
