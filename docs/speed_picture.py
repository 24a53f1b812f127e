"""Writes docs/speed.svg from benchmarks/records: times as fast as the best peer.

python docs/speed_picture.py

A bar for each line of docs/performance.md whose peer is another library or XLA, none
left out, those that lose in another colour. The axis is logarithmic and begins at 1.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from benchmarks import pages
from benchmarks._records import RECORDS, machine, records

PICTURE = Path(__file__).parent / "speed.svg"
WIDTH, ROW, SMALLEST = 400, 15, 10  # pixels; of the letters
ONE, END, LARGEST = 224, 308, 40.0  # 1 and the largest on the axis
TICKS = 1, 3, 10, 30
STYLE = """text { font: 10px sans-serif; fill: #1f2328; }
.name { text-anchor: end; }
.tick { text-anchor: middle; }
.title { font-size: 12px; font-weight: bold; }
.faster { fill: #1a7f64; }
.slower { fill: #c2410c; }
.grid { stroke: #8c959f; stroke-width: 0.5; stroke-dasharray: 2 2; }
.one { stroke: #1f2328; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .faster { fill: #3fb68f; }
  .slower { fill: #f0883e; }
  .one { stroke: #e6edf3; }
}"""


class Bar(NamedTuple):
    """A line of docs/performance.md: `times` as fast as `peer`."""

    work: str
    times: float
    peer: str


def bars(where: str, folder: Path = RECORDS) -> Iterator[Bar]:
    """What a machine's records say, beside peers that are not jaxkern's own."""
    for here, record in records(folder):
        for line in record.get("headlines", ()) if here == where else ():
            section, row = pages.named(record, line)
            ratios = dict(pages.rivals(section, row))
            found = {p: float(r.partition(" ")[0]) for p, r in ratios.items()}
            peer = min(found, key=lambda p: found[p])
            if not peer.startswith(("jaxkern", "reference")):
                yield Bar(line["work"], found[peer], peer)


def place(times: float) -> float:
    """Where the axis has this number."""
    return ONE + (END - ONE) * math.log(times) / math.log(LARGEST)


def bar_lines(bar: Bar, y: float) -> Iterator[str]:
    end = place(bar.times)
    left, right = sorted((end, place(1)))
    kind = "faster" if bar.times >= 1 else "slower"
    yield f'<text class="name" x="{ONE - 28}" y="{y + 9}">{escape(bar.work)}</text>'
    yield (
        f'<rect class="{kind}" x="{left:.1f}" y="{y}" '
        f'width="{max(right - left, 1):.1f}" height="10"/>'
    )
    said = f"{bar.times:.3g} {escape(bar.peer)}"
    yield f'<text x="{right + 3:.1f}" y="{y + 9}">{said}</text>'


def panel(where: str, y: float, folder: Path) -> tuple[list[str], float]:
    """The bars of a machine below `y`, the fastest first, and where they end."""
    every = sorted(bars(where, folder), key=lambda b: -b.times)
    name = machine(where, folder)["name"]
    lines = [f'<text class="title" x="6" y="{y + 14}">On {escape(name)}</text>']
    top, bottom = y + 34, y + 36 + ROW * len(every)
    for tick in TICKS:
        x = f"{place(tick):.1f}"
        kind = "one" if tick == 1 else "grid"
        lines.append(f'<text class="tick" x="{x}" y="{y + 30}">{tick}x</text>')
        lines.append(f'<path class="{kind}" d="M{x} {top}V{bottom}"/>')
    for k, bar in enumerate(every):
        lines += bar_lines(bar, top + 3 + ROW * k)
    return lines, bottom


def picture(folder: Path = RECORDS) -> str:
    lines, y = [], 36.0
    for where in pages.machines(folder):
        more, y = panel(where, y, folder)
        lines += more
        y += 8
    said = "times as fast as the best peer; more is better"
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:g}" '
        f'width="{WIDTH}" height="{y:g}" role="img">',
        f"<title>jaxkern: {said}</title>",
        f"<style>{STYLE}</style>",
        f'<text class="title" x="6" y="14">Speed: {said}</text>',
        '<text x="6" y="29">Each bar has its peer; the axis is logarithmic.</text>',
    ]
    return "\n".join([*head, *lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture())
