"""docs/speed.svg is what the records say, and legible where it is shown.

A drawn picture of figures would be out of date with the next run, and nobody would see.
"""

import importlib.util
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks._records import records

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def drawing():
    spec = importlib.util.spec_from_file_location("p", ROOT / "docs/speed_picture.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_picture_is_what_the_script_draws(drawing):
    text = (ROOT / "docs/speed.svg").read_text()
    assert text == drawing.picture(), "run python docs/speed_picture.py"
    for page in ("README.md", "docs/index.md"):
        assert "speed.svg)" in (ROOT / page).read_text()


def test_no_line_is_left_out_and_losses_are_shown(drawing):
    lines = [
        drawing.pages.headline(record["family"], record, line)
        for _, record in records()
        for line in record.get("headlines", ())
    ]
    own = "jaxkern", "reference"
    wanted = sorted(float(line[3]) for line in lines if not line[2].startswith(own))
    shown = [b for where in ("h200", "epyc") for b in drawing.bars(where)]
    assert sorted(b.times for b in shown) == wanted and len(wanted) > 40
    root = ET.fromstring(drawing.picture())
    kinds = [r.get("class") for r in root.iter(f"{SVG}rect")]
    assert kinds.count("slower") == sum(t < 1 for t in wanted) > 0
    assert kinds.count("faster") == sum(t >= 1 for t in wanted)


def test_a_bar_is_as_long_as_its_number(drawing):
    text = "".join(drawing.bar_lines(drawing.Bar("a < b", 4.0, "XLA"), 0.0))
    [x, width] = map(float, re.findall(r'(?: x|width)="([\d.]+)"', text)[1:3])
    assert x == drawing.ONE
    assert width == pytest.approx((drawing.place(16) - x) / 2, abs=0.1)
    assert "a &lt; b" in text and ">4 XLA<" in text


def test_it_is_legible_at_its_width_and_loads_nothing(drawing):
    text = drawing.picture()
    root = ET.fromstring(text)
    assert int(root.get("width", 0)) <= 400 and "prefers-color-scheme: dark" in text
    assert "href" not in text and "@import" not in text and "url(" not in text
    assert min(map(int, re.findall(r"(\d+)px", text))) >= drawing.SMALLEST
    for line in root.iter(f"{SVG}text"):
        count, x = len(line.text or ""), float(line.get("x", 0))
        if line.get("class") == "name":
            assert x - 4.5 * count > 0, line.text
        elif line.get("class") is None:
            assert x + 5.5 * count < drawing.WIDTH, line.text
