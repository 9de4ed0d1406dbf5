"""Which part of the branches of each package tests run: ``make coverage``, or ``python -m tests.branches REPORT...``.

Each report is the JSON file of one run of coverage.py with branches. Two are compared, such as those of two commits::

    git worktree add --detach /tmp/before COMMIT && cd /tmp/before
    PYTHONPATH=. python -m pytest -m "not slow" --cov-config=HERE/pyproject.toml --cov --cov-report=json:before.json
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

COUNTS = ("covered_branches", "num_branches", "covered_lines", "num_statements")


def main(reports: list[str]) -> None:
    """Print branches and lines that were run, in per cent, by package."""
    runs = [packages(Path(report)) for report in reports]
    print(f"{'':>12}", *(f"{title:>9}" for _ in runs for title in ("branches", "lines")))
    for name in sorted(runs[-1], key=lambda each: (each == "all", each)):
        print(f"{name:>12}", *(f"{share:9.2f}" for run in runs for share in shares(run.get(name, Counter()))))


def packages(report: Path) -> dict[str, Counter[str]]:
    """What coverage.py has counted, by package."""
    found: dict[str, Counter[str]] = {"all": Counter()}
    for name, file in json.loads(report.read_text())["files"].items():
        parts = name.partition("memstore/")[2].split("/")
        counts = Counter({each: file["summary"][each] for each in COUNTS})
        for package in ("all", parts[0] if len(parts) > 1 else "(root)"):
            found.setdefault(package, Counter()).update(counts)
    return found


def shares(counts: Counter[str]) -> tuple[float, float]:
    """Of branches and of lines, in per cent."""
    branches, all_branches, lines, all_lines = (counts[each] for each in COUNTS)
    return 100 * branches / max(1, all_branches), 100 * lines / max(1, all_lines)


if __name__ == "__main__":
    main(sys.argv[1:])
