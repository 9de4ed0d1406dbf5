"""The table of docs/torture.md, made from its rows: ``python -m tests.testing.table``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FILES = ("torture", "torture-memos", "torture-llamacpp", "torture-lmcache")
BAD = ("earlier", "lost", "torn", "wrong", "crashed")


def table() -> str:
    """A row for each store, a cell for each fault."""
    results = [json.loads((RESULTS / f"{name}.json").read_text("utf-8")) for name in FILES]
    rows: list[dict[str, Any]] = [row for each in results for row in each["rows"]]
    faults = list(dict.fromkeys(row["fault"] for row in rows))
    lines = [f"| | {' | '.join(faults)} |", "|---" * (len(faults) + 1) + "|"]
    for store in dict.fromkeys(row["version"] for row in rows):
        cells = {row["fault"]: _cell(row) for row in rows if row["version"] == store}
        lines.append(f"| {store} | {' | '.join(cells.get(fault, 'not tried') for fault in faults)} |")
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    """What went wrong; where nothing did, how often it was refused, and what could still be read then."""
    if found := [f"**{row[word]} {word}**" for word in BAD if row[word]]:
        return ", ".join(found)
    return "0" if not row["refused"] else f"0; {row['refused']} refused, {row['still read']:.0%} still read"


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
