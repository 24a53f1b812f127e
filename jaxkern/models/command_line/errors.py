"""Errors as one line for a terminal."""

from jaxkern.formats.printable import printable

LONGEST = 600  # characters; XLA can say a page


def one_line(message: object) -> str:
    """Without line ends and control characters, cut where it is long."""
    text = printable(" ".join(str(message).split()))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def is_of_the_device(error: Exception) -> bool:
    """Whether XLA raised it: out of memory, no such device, and the like."""
    import jax

    return isinstance(error, jax.errors.JaxRuntimeError)
