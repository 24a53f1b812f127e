"""`show`: tables whose names are not cut, on a terminal of any width and in a file."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDEST = 400  # characters of a table in a file


def show(what: "RenderableType", *, beside: bool = False) -> None:
    """Prints it, on a terminal within its width, else as wide as it needs.

    Args:
      what: a table or other renderable of rich.
      beside: on stderr, beside an answer on stdout.
    """
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(stderr=beside)
    if not console.is_terminal:
        limit = console.options.update(max_width=WIDEST)
        width = max(Measurement.get(console, limit, what).maximum, 1)
        console = Console(stderr=beside, width=width)
    console.print(what)
