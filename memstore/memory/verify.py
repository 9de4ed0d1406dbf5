"""Check every value of a memory, and whether the values fit together.

Run as ``python -m memstore.memory.verify PATH`` it prints one JSON object per finding and a last one,
``{"done": true}``. ``Memory.verify`` runs it like that, since damage to the tree around the values can kill the process
that walks it (a page number that points past the end of the map is a bus error, not an exception).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from shlex import quote

from memstore.errors import MemstoreError
from memstore.memory.checking import Check, Finding
from memstore.memory.urls import folder, open_unchecked
from memstore.store.contract import BlockStore

_ATTEMPTS = 5
_DONE = {"done": True}


def check(store: BlockStore) -> list[Finding]:
    """Check a store in this process. Never raises ``MemstoreError``: what stops the check is a finding."""
    findings: list[Finding] = []
    for _ in range(_ATTEMPTS):
        version = store.version()
        try:
            findings = Check(store).run()
        except MemstoreError as error:
            return [Finding(kind="damaged", message=str(error), remedy=error.remedy)]
        # A writer may have moved on in the middle: then values of different commits were compared.
        if not findings or store.version() == version:
            return findings
    return findings


def damaged_indexes(url: str) -> list[Finding]:
    """What is wrong with the indexes that are kept beside a memory on disk."""
    path = folder(url)
    if path is None or not os.path.lexists(path / "index"):
        return []
    # Indexes need torch, and a check of a memory without any starts in a tenth of the time without it.
    from memstore.memory.index_files import damaged, folder_of

    found = damaged(folder_of(path))
    return [Finding(kind="index", message=f"{what} It is built anew where it is wanted.") for _, what in found]


def in_child(path: str) -> list[Finding]:
    """Check the memory in folder ``path`` in a child process, whose crash is a finding too."""
    child = subprocess.run(_command(path), capture_output=True, text=True, check=False)  # noqa: S603 - our own module
    # A child that was killed may have left half a line: only whole ones count.
    lines = [json.loads(line) for line in child.stdout.splitlines(keepends=True) if line.endswith("}\n")]
    findings = [_from_json(line) for line in lines if line != _DONE]
    if child.returncode or _DONE not in lines:
        findings.append(Finding(kind="crash", message=_last_words(path, child.returncode, child.stderr)))
    return findings


def _command(path: str) -> list[str]:
    return [sys.executable, "-m", "memstore.memory.verify", "--", path]


def _from_json(line: dict[str, object]) -> Finding:
    tokens = line.pop("tokens")
    span = (int(tokens[0]), int(tokens[1])) if isinstance(tokens, list) else None
    return Finding(**line, tokens=span)  # type: ignore[arg-type]  # the child is this very module


def _last_words(path: str, code: int, errors: str) -> str:
    reason = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
    words = errors.strip().splitlines()[-1:] or ["it said nothing"]
    return (
        f"the process that checked the memory was ended {reason} ({words[0]}): probably the tree around the values is "
        f"damaged, and not every value could be read. To save what can: memstore repair {quote(path)} --to NEW"
    )


def main(path: str) -> None:
    """Check the memory at ``path`` (a folder, or ``zarr:`` and one) and print the findings."""
    try:
        store = open_unchecked(path)  # a scan says more of a damaged tree than that it is damaged
    except MemstoreError as error:
        findings = [Finding(kind="damaged", message=str(error), remedy=error.remedy)]
    else:
        findings = [*check(store), *damaged_indexes(path)]
        store.close()
    for finding in findings:
        _say(asdict(finding))
    _say(_DONE)


def _say(line: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[-1])
