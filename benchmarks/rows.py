"""Print the tables that result files hold: each list of records as a table, what else there is as facts.

    python -m benchmarks.rows benchmarks/results/landmark-perplexity.json benchmarks/results/questions-ruler.json

A title names the place of a table in its file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memstore.report import Page, flattened


def show(page: Page, data: Any, title: str = "") -> None:
    """Print one file's content."""
    if _records(data):
        rows = [_flat(row) for row in data]
        columns = list(dict.fromkeys(name for row in rows for name in row))
        page.line(f"{title}:")
        page.records([{name: row.get(name) for name in columns} for row in rows])
        page.line()
    elif isinstance(data, Mapping):
        facts = _flat({name: value for name, value in data.items() if not _holds_records(value)})
        page.facts({f"{title} {name}".strip(): value for name, value in facts.items()})
        page.line()
        for name, value in data.items():
            if _holds_records(value):
                show(page, value, f"{title} {name}".strip())
    else:
        for number, each in enumerate(data, 1):
            show(page, each, f"{title} {number}".strip())


def _records(value: Any) -> bool:
    return isinstance(value, Sequence) and bool(value) and all(
        isinstance(row, Mapping) and not any(map(_holds_records, row.values())) for row in value
    )  # fmt: skip


def _holds_records(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_records, value.values()))
    return isinstance(value, list) and any(isinstance(each, Mapping) for each in value)


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _joined(value) if isinstance(value, list) else value for name, value in flattened(row)}


def _joined(values: Sequence[Any]) -> str:
    return ", ".join(f"{each:.4g}" if isinstance(each, float) else str(each) for each in values)


def main() -> None:
    """Print the tables of the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="JSON files")
    for file in parser.parse_args().files:
        page = Page()
        page.line(file.name)
        show(page, json.loads(file.read_text("utf-8")))


if __name__ == "__main__":
    main()
