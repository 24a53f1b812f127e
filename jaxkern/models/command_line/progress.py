"""What is being done until there is something to show, on stderr."""

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def spinner(first: str, *, quiet: bool) -> Iterator[Callable[[str | None], None]]:
    """A turning sign with a few words, on a terminal only.

        with spinner("loading m.gguf", quiet=False) as say:
            say("compiling")     # other words
            say(None)            # none any more: there is something to show

    A Ctrl-C stops the work, not the sign alone.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda words: None
        return
    from rich.console import Console
    from rich.text import Text

    status = Console(stderr=True).status(Text(first))
    shown = True

    def say(words: str | None) -> None:
        nonlocal shown
        if words is None:
            shown = shown and bool(status.stop())
        elif shown:
            status.update(Text(words))

    with status:
        yield say
