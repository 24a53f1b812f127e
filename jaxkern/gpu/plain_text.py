"""A kernel's text without the places of its source, as each of its launches carries it.

    plain_assembly(binary.asm["ptx"])              # a quarter of the bytes

XLA prints, copies, searches and reads the text of every launch, and the plugin unpacks
it every time: a prompt of 32 layers has 260 of them. Half of what Triton writes says
where a line comes from, which the plugin does not ask the assembler for. Triton's cache
on disk keeps the whole.
"""

import re

# the whole of lines that say where the next come from; comments, unless behind a string
PLACE = re.compile(r"\n[ \t]*\.(?:loc|file)[ \t].*")
COMMENT = re.compile(r'^([^"\n]*?)[ \t]*//.*$', re.MULTILINE)
DEBUG = re.compile(r"\n[ \t]*\.section[ \t]+\.debug_\w+\s*\{[^{}]*\}")
EMPTY = re.compile(r"\n(?:[ \t]*\n)+")
FOR_DEBUGGERS = re.compile(r"^\.target.*\bdebug\b", re.MULTILINE)

STRING = r'"(?:[^"\\\n]|\\.)*"'
INSIDE = rf"(?:{STRING}|[^()\"])*"
for _ in range(3):  # a function, called somewhere, of a file
    INSIDE = rf"(?:{STRING}|[^()\"]|\({INSIDE}\))*"
USUAL = re.compile(r" loc\(#loc\d*\)$", re.MULTILINE)  # nearly every line ends so
LOCATION = re.compile(rf"({STRING})|[ \t]*\bloc\({INSIDE}\)")


def plain_assembly(ptx: str) -> str:
    """PTX of the same machine code; what is for debuggers stays as it is."""
    if "/*" in ptx or FOR_DEBUGGERS.search(ptx):
        return ptx
    for form, put in ((PLACE, ""), (COMMENT, r"\1"), (DEBUG, ""), (EMPTY, "\n")):
        ptx = form.sub(put, ptx)
    return ptx


def plain_representation(ir: str) -> str:
    """MLIR without `loc(...)`, which its parser does not need."""
    lines = USUAL.sub("", ir).split("\n")
    return "\n".join(
        LOCATION.sub(lambda found: found[1] or "", line) if "loc(" in line else line
        for line in lines
        if not line.startswith("#loc")
    )
