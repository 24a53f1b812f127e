"""What the draws of a run come to: what is wrong, where we lose, a line for each op."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from rich.markup import escape
from rich.table import Table

from benchmarks._drawn.measure import Outcome, Pass


def wrong_table(found: Sequence[Outcome]) -> Table:
    table = titled("Wrong or failed", "op", "seed, draw", "what", "why")
    for o in found:
        if o.wrong or o.failed:
            table.add_row(o.op, number(o), o.title, escape(o.wrong or o.failed))
    return table


def losses(found: Sequence[Outcome]) -> list[tuple[Outcome, str, Pass]]:
    """(draw, which pass, the pass), worst first."""
    lost = [(o, which, p) for o in found for which, p in o.passes.items() if p.is_loss]
    return sorted(lost, key=lambda of: -(of[2].ratio or 0))


def losses_table(found: Sequence[Outcome]) -> Table:
    columns = (
        "op",
        "seed, draw",
        "what",
        "pass",
        "runs",
        "us of each",
        "times the best",
    )
    table = titled("Slower than the best peer by 5 % and 1 us", *columns)
    for o, which, p in losses(found):
        times = ", ".join(f"{name} {1e6 * s:.1f}" for name, s in p.seconds.items())
        runs = "; ".join(dict.fromkeys(p.runs))
        line = (o.op, number(o), o.title, which, runs, times, f"{p.ratio:.2f}")
        table.add_row(*line)
    return table


def summary_table(
    found: Sequence[Outcome], families: Mapping[str, Sequence[str]]
) -> Table:
    """A line for each family, and one for each of its ops that was drawn."""
    columns = ("op", "draws", "timed passes", "left to XLA", "level or better")
    title = "Times are ours over those of the best peer"
    table = titled(title, *columns, "median times", "wrong or failed")
    for family, ops in families.items():
        mine = [o for o in found if o.op in ops]
        if mine:
            table.add_row(f"[bold]{family}[/]", *figures(mine))
        for op in ops:
            of_op = [o for o in mine if o.op == op]
            if of_op:
                table.add_row(f"  {op}", *figures(of_op))
    return table


def figures(found: Sequence[Outcome]) -> list[str]:
    passes = [p for o in found for p in o.passes.values()]
    timed = [p for p in passes if p.ratio is not None and not p.by_xla]
    level = sum(not p.is_loss for p in timed)
    return [
        str(len(found)),
        str(len(timed)),
        str(sum(p.by_xla for p in passes)),
        f"{100 * level / len(timed):.0f} %" if timed else "",
        f"{statistics.median(p.ratio for p in timed if p.ratio):.2f}" if timed else "",
        str(sum(bool(o.wrong or o.failed) for o in found)),
    ]


def number(o: Outcome) -> str:
    return f"{o.seed}, {o.index}"


def titled(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def left_to_xla(found: Sequence[Outcome]) -> list[str]:
    """Each reason why a pass is XLA's, in words, with the number of passes."""
    reasons = Counter(
        f"{o.op} {which}: {'; '.join(dict.fromkeys(p.refused)) or 'it has no kernel'}"
        for o in found
        for which, p in o.passes.items()
        if p.by_xla
    )
    return [f"{n} left to XLA of {said}" for said, n in reasons.items()]


def failed_peers(found: Sequence[Outcome]) -> list[str]:
    return [
        f"seed {number(o)}, {o.op} {o.title}: {name} fails: {why.splitlines()[0]}"
        for o in found
        for name, why in o.peers_failed.items()
    ]
