"""`python -m benchmarks pages [--add DIR]`: docs/performance.md from the records.

Every figure of it, of its pages and of the README's table stands in
records/<machine>/<op>.json, `_records.py` says in what form, and nowhere else. With
--add, what `--out DIR` of any benchmark left comes first into the records: a row takes
the place of the row of its case and pass.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks._judged import COLUMNS, MET, NOT_MEASURED, judged
from benchmarks._records import (
    OURS,
    RECORDS,
    Row,
    Section,
    best_peer,
    cell,
    columns,
    heading,
    machine,
    measured,
    number,
    records,
    times,
)
from benchmarks._runs import add

DOCS = Path(__file__).parents[1] / "docs"
README = DOCS.parent / "README.md"
BEGIN = "<!-- speed, written by `python -m benchmarks pages` -->\n"
END = "<!-- end of speed -->\n"
FAMILIES = {  # pages, in the order of the first one
    "models": "whole models",
    "norm": "norms",
    "activation": "activations",
    "rope": "rotations",
    "attention": "attention",
    "kv_cache": "key and value caches",
    "linear": "products with dense weights",
    "quant": "products with quantised weights",
    "moe": "experts",
    "loss": "losses",
    "optim": "optimisers",
    "sampling": "sampling",
    "index": "indices and sorting",
    "delta_rule": "delta rule, convolution, sums",
    "turboquant": "TurboQuant",
    "goals": "goals",
}
IN_README = {  # which lines of the first page, what wins and what loses
    "h200": (
        "attention, causal, forward",
        "attention, causal, both passes",
        "attention of packed documents",
        "RMSNorm, training",
        "SwiGLU",
        "linear cross entropy and gradient",
        "sampling, top_k 64",
        "decode, 1.5B bfloat16, one sequence",
        "decode, 8B Q4_K_M, one sequence",
        "training step, 1.3B, 8 x 2048",
    ),
    "epyc": (
        "RMSNorm, forward",
        "attention of 1 query over 4096 keys",
        "SmolLM2-135M, Q4_1, decode",
        "SmolLM2-135M, float32 by XLA, decode",
    ),
}
WRITTEN = "Written by `python -m benchmarks pages` from benchmarks/records."
HEAD = f"""# Performance

{WRITTEN} Ratios are
taken within one run, round by round, so that both sides meet the same load of the
machine. Each family has a page with every measured row, its date, versions and command.

## Is it faster for me?

One line for each kind of work: ours, the best peer measured beside it, and how many
times as fast ours is; below 1 the peer wins. Of times less is better, of tokens/s more.
The last column says where in that work we lose.
"""
HOW = """## How it was measured

New figures come by two commands; the second one brings what the first one left into
benchmarks/records, and from there into these pages:

    python -m benchmarks rms_norm --peers --out DIR     # an operator; or goals, cpu_ops
    python -m benchmarks pages --add DIR                # or pages alone, to write anew

`python -m benchmarks tables DIR` shows what a run left without keeping it.

Shapes between those of the pages are held to the same. `python -m benchmarks
drawn_shapes` draws shapes, dtypes and options at random, compares results with float64,
and lists where "auto" is slower than the best of XLA and cuDNN by more than 5 % and
1 us. Seed and number make a draw again.
"""

Found = list[tuple[str, dict[str, Any]]]


def pages(folder: Path = RECORDS) -> dict[str, str]:
    """{path under docs: text} of every page."""
    found = [(where, with_goals(r, folder / where)) for where, r in records(folder)]
    written = {"performance.md": first_page(found, folder)}
    for family in dict.fromkeys(record["family"] for _, record in found):
        written[f"performance/{family}.md"] = family_page(family, found, folder)
    return written


def with_goals(record: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The record of goals with a line for each, judged by the records beside it."""
    if record["family"] != "goals":
        return record
    [section] = record["sections"]
    lines = {"columns": COLUMNS, "rows": [*judged(folder=folder)]}
    return record | {"sections": [section | lines]}


def first_page(found: Found, folder: Path) -> str:
    parts = [HEAD, headlines(found, folder, program=False)]
    parts += ["## Whole programs\n", headlines(found, folder, program=True)]
    parts += ["## Goals\n", goals_met(found), "## Where we lose\n"]
    for family, title in FAMILIES.items():
        lines = [
            f"- {machine(where, folder)['short']}: {said}"
            for where, record in found
            if record["family"] == family
            for said in record.get("loses", ())
        ]
        if lines:
            parts += [f"### {page_link(family, title)}\n", "\n".join(lines) + "\n"]
    parts.append(HOW)
    for where in machines(folder):
        for section in machine(where, folder)["sections"]:
            parts += words(section)
    return "\n".join(parts)


def headlines(found: Found, folder: Path, program: bool) -> str:
    """A line of each kind of work, with the figures of the row that it names."""
    parts = []
    for where in machines(folder):
        lines = [
            headline(family, record, line)
            for family in FAMILIES
            for here, record in found
            if here == where and record["family"] == family
            for line in record.get("headlines", ())
            if line.get("program", False) == program
        ]
        if lines:
            head = ["work", "ours", "best peer", "times as fast", "where we lose"]
            name = machine(where, folder)["name"]
            parts.append(f"On {name}:\n")
            parts.append(as_markdown([head, ["---"] * len(head), *lines]))
    return "\n".join(parts)


def readme(text: str, folder: Path = RECORDS) -> str:
    """README.md with the lines that `IN_README` names between its marks."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    by = {
        (where, line["work"]): (record["family"], record, line)
        for where, record in records(folder)
        for line in record.get("headlines", ())
    }
    head = ["on", "work", "ours", "best peer", "times as fast"]
    lines = [head, ["---"] * len(head)]
    for where, works in IN_README.items():
        short = machine(where, folder)["short"]
        for work in works:
            family = by[where, work][0]
            _, ours, peer, ratio, _ = headline(*by[where, work])
            linked = f"[{work}](docs/performance/{family}.md)"
            lines.append([short, linked, ours, peer, ratio])
    return f"{before}{BEGIN}\n{as_markdown(lines)}\n{END}{after}"


def headline(family: str, record: dict[str, Any], line: dict[str, str]) -> list[str]:
    section, row = named(record, line)
    found = {peer: ratio.partition(" ")[0] for peer, ratio in rivals(section, row)}
    peer = min(found, key=lambda peer: float(found[peer]))
    ours, theirs = (number(row["by"].get(name)) for name in (OURS, peer))
    return [
        f"{line['work']}: {page_link(family, row['case'])}",
        f"{ours:g} {section['unit']}",
        f"{peer} {theirs:g}",
        found[peer],
        line.get("loses", ""),
    ]


def named(record: dict[str, Any], line: dict[str, str]) -> tuple[Section, Row]:
    """The row that a headline speaks of: of its case and pass, beside a peer."""
    for section in record["sections"]:
        if line.get("section") in (None, section.get("title")):
            for row in section["rows"]:
                is_it = (row["case"], row["pass"]) == (line["case"], line["pass"])
                if is_it and any(rivals(section, row)):
                    return section, row
    raise ValueError(
        f"{record['op']}: no row {line['case']!r}, {line['pass']!r} with a peer for "
        f"{line['work']!r} on the first page: name a row that the record has."
    )


def goals_met(found: Found) -> str:
    [record] = [record for _, record in found if record["family"] == "goals"]
    [section] = record["sections"]
    rows = section["rows"]
    unknown = [row for row in rows if NOT_MEASURED in row]
    missed = [row for row in rows if row[MET] != "yes" and row not in unknown]
    met = len(rows) - len(missed) - len(unknown)
    link = page_link("goals", "all of them")
    lines = [f"{met} of {len(rows)} goals are met ({link}). Missed are:\n"]
    lines += [f"- {r[0]} {r[1]}, {r[2]}: {r[3]}; {r[4]}" for r in missed]
    if unknown:
        lines.append(f"\nNot measured are {len(unknown)}:\n")
        lines += [f"- {r[0]} {r[1]}, {r[2]}: {r[3]}" for r in unknown]
    return "\n".join(lines) + "\n"


def family_page(family: str, found: Found, folder: Path) -> str:
    parts = [f"# Performance: {FAMILIES[family]}\n", f"{WRITTEN}"]
    parts.append(
        "[Is it faster for me?](../performance.md) says how figures are taken.\n"
    )
    for where in machines(folder):
        mine = [r for m, r in found if m == where and r["family"] == family]
        if mine:
            name = machine(where, folder)["name"]
            parts.append(f"## {name[0].upper()}{name[1:]}\n")
        for record in mine:
            for k, section in enumerate(record["sections"]):
                parts += section_lines(section, record, first=k == 0)
            if record.get("loses"):
                said = "\n".join(f"- {s}" for s in record["loses"])
                parts.append(f"**Where we lose.**\n\n{said}\n")
    return "\n".join(parts)


def section_lines(section: Section, record: dict[str, Any], first: bool) -> list[str]:
    parts = []
    if "title" in section or first:
        parts.append(f"### {section.get('title', record['op'])}\n")
    date, versions = measured(section, record)
    said = ", ".join(f"{name} {version}" for name, version in versions.items())
    command = f": `{section['command']}`" if "command" in section else ""
    parts.append(f"Measured {date}{command}" + (f" ({said}).\n" if first else ".\n"))
    if not first and "versions" in section:
        parts.append(f"Versions: {said}.\n")
    return parts + words(section | {"title": None})


def words(section: Section) -> list[str]:
    """Title, text, table and note of a section."""
    parts = [f"### {section['title']}\n"] if section.get("title") else []
    if section.get("text"):
        parts.append("\n".join(section["text"]) + "\n")
    if section["rows"]:
        parts.append(as_markdown(table(section)))
    if section.get("note"):
        parts.append("\n".join(section["note"]) + "\n")
    return parts


def table(section: Section) -> list[list[str]]:
    """Heading, rule and lines: ours, each peer, how many times as fast ours is."""
    if "columns" in section:
        return [section["columns"], ["---"] * len(section["columns"]), *section["rows"]]
    rows, unit, names = section["rows"], section["unit"], columns(section)
    beside = list(dict.fromkeys(k for row in rows for k in row.get("beside", {})))
    ratios = {k: list(rivals(section, row)) for k, row in enumerate(rows)}
    peers = list(dict.fromkeys(peer for found in ratios.values() for peer, _ in found))
    against = section.get("against") or peers[:1]
    best = not section.get("against") and len(peers) > 1
    shown = ["times the best"]
    if not best:
        given = {p: [row.get("times", {}).get(p) for row in rows] for p in against}
        shown = [heading(f"times {peer}", given[peer]) for peer in against]
    head = ["case", "pass"]
    head += [heading(f"{n} {unit}", [row["by"].get(n) for row in rows]) for n in names]
    lines = [[*head, *shown, *beside]]
    lines.append(["---"] * len(lines[0]))
    for k, row in enumerate(rows):
        date = row.get("date", section["date"])
        when = "" if date == section["date"] else f" ({date})"
        line = [row["case"] + when, row["pass"]]
        line += [cell(row["by"].get(name)) for name in names]
        if best:
            line += [f"{ratio}, {peer}" for peer, ratio in ratios[k]] or [""]
        else:
            line += [dict(ratios[k]).get(peer, "") for peer in against]
        lines.append([*line, *(cell(row.get("beside", {}).get(b)) for b in beside)])
    return lines


def rivals(section: Section, row: Row) -> Iterator[tuple[str, str]]:
    """Whom a row is compared with, and how many times as fast ours is."""
    names = section.get("against") or [best_peer(row, section["unit"])]
    for name in names:
        if name and (ratio := times(row, section["unit"], name)):
            yield name, ratio


def machines(folder: Path) -> list[str]:
    return sorted((p.name for p in folder.iterdir() if p.is_dir()), reverse=True)


def page_link(family: str, text: str) -> str:
    return f"[{text}](performance/{family}.md)"


def as_markdown(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks pages")
    parser.add_argument("--add", type=Path, help="folder of new runs, of --out")
    options = parser.parse_args(arguments)
    if options.add:
        for line in add(options.add):
            print(line)
    for path, text in pages().items():
        file = DOCS / path
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        print(f"wrote docs/{path}")
    README.write_text(readme(README.read_text()))
    print("wrote the table of README.md")
    return 0
