"""Text of others, such as a file's own names or a model's answer, for a terminal."""


def printable(text: str) -> str:
    """`text` without control characters: it must not steer the terminal."""
    return "".join(c for c in text if c.isprintable() or c in "\n\t")
