"""Writes block_formats.h: the table of the block formats for C++.

    python -m jaxkern.cpu.quant.block_formats

A test compares the header with what this writes.
"""

from pathlib import Path

from jaxkern.primitives.quant.block_formats import FORMATS, KERNEL_FORMATS, Codes

HEADER = Path(__file__).with_suffix(".h")

TEXT = """\
// Written by block_formats.py from the table in jaxkern/primitives/quant.
#pragma once

namespace jaxkern {

enum class Format {  // of quantised weights, as ggml stores them
%(names)s
  none,
};

// weight = scale * (code - zero) + offset        in groups along a row
struct Layout {
  const char* name;
  int elements, bytes;  // of a block of one row
  int head, tail;  // bytes in units of `unit` before and after units of 4
  int unit;
  int group;  // weights that share a scale
  int zero;
  bool wide;  // codes above 127
  bool offset;
};

constexpr Layout layouts[] = {  // by Format
    // name elements bytes head tail unit group zero wide offset
%(rows)s
};

// f(q4_0) f(q4_1) ...: every format in order
#define JAXKERN_FORMATS(f) \\
%(uses)s

}  // namespace jaxkern
"""


def header() -> str:
    """The text of block_formats.h."""
    names = [name.lower() for name in KERNEL_FORMATS]
    return TEXT % {
        "names": "\n".join(f"  {name}," for name in names),
        "rows": "\n".join(_row(name, codes) for name, codes in KERNEL_FORMATS.items()),
        "uses": " \\\n".join(f"  f({name})" for name in names),
    }


def _row(name: str, codes: Codes) -> str:
    elements, size, fields, _ = FORMATS[name]
    ends = [unit * count if unit != 4 else 0 for unit, count in codes.units]
    head, tail = ends[0], ends[-1] if len(ends) > 1 else 0
    unit = next((unit for unit, _ in codes.units if unit != 4), 2)
    wide, offset = (str(b).lower() for b in (codes.zero > 127, codes.offset))
    facts = (elements, size, head, tail, unit, codes.group, codes.zero, wide, offset)
    return f'    {{"{name}", {", ".join(map(str, facts))}}},  // {fields}'


if __name__ == "__main__":
    HEADER.write_text(header())
