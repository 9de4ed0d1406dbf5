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
from pathlib import Path
from shlex import quote
from typing import Any

from memstore.children import python_module
from memstore.errors import MemstoreError, WrongKey
from memstore.memory.checking import Check, Finding
from memstore.memory.urls import folder, open_locked, open_unchecked
from memstore.store.contract import BlockStore
from memstore.store.keys import MasterKey, key_of_environment, lacks_key, owners_told

_ATTEMPTS = 5
DONE = {"done": True}


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


def check_ciphertext(store: BlockStore, keys: Path) -> list[Finding]:
    """Check what needs no key of an encrypted memory: every checksum, and that no number lacks its key."""
    findings, owners = [], set[int]()
    try:
        for scanned in store.scan():
            if scanned.damage is None:
                owners.add(scanned.key.document)
            else:  # of the tree, it is told under a number of the store's own
                findings.append(Finding(kind="damaged", message=str(scanned.damage), remedy=scanned.damage.remedy))
        lost = sorted(owners - owners_told(keys))
    except MemstoreError as error:
        return [*findings, Finding(kind="damaged", message=str(error), remedy=error.remedy)]
    return [*findings, *(Finding(kind="missing", message=str(lacks_key(each)), remedy="restore") for each in lost)]


def damaged_indexes(url: str) -> list[Finding]:
    """What is wrong with the indexes that are kept beside a memory on disk."""
    path = folder(url)
    if path is None or not os.path.lexists(path / "index"):
        return []
    # Indexes need torch, and a check of a memory without any starts in a tenth of the time without it.
    from memstore.memory.index_files import damaged, folder_of

    found = damaged(folder_of(path))
    return [Finding(kind="index", message=f"{what} It is built anew where it is wanted.") for _, what in found]


def in_child(path: str, key: MasterKey | None = None) -> list[Finding]:
    """Check the memory in folder ``path`` in a child process, whose crash is a finding too.

    Of an encrypted one without ``key``, here or in the environment, what needs none.
    """
    lines, crash = lines_of_child(_command(path), "" if key is None else key.raw.hex())
    findings = [_from_json(line) for line in lines]
    if crash is not None:
        message = (
            f"the process that checked the memory was ended {crash}: probably the tree around the values is damaged, "
            f"and not every value could be read. To save what can: memstore repair {quote(path)} --to NEW"
        )
        findings.append(Finding(kind="crash", message=message))
    return findings


def _command(path: str) -> list[str]:
    return [*python_module("memstore.memory.verify"), "--", path]


def lines_of_child(command: list[str], order: str = "") -> tuple[list[dict[str, Any]], str | None]:
    """The JSON objects that a child process says, one per line, and, if it ends before its last line, how that was."""
    child = subprocess.run(command, input=order, capture_output=True, text=True, check=False)  # noqa: S603 - our own
    # A child that was killed may have left half a line: only whole ones count.
    lines = [json.loads(line) for line in child.stdout.splitlines(keepends=True) if line.endswith("}\n")]
    if not child.returncode and DONE in lines:
        return [line for line in lines if line != DONE], None
    code = child.returncode
    reason = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
    words = child.stderr.strip().splitlines()[-1:] or ["it said nothing"]
    return [line for line in lines if line != DONE], f"{reason} ({words[0]})"


def say(line: Mapping[str, object]) -> None:
    """What a child says to ``lines_of_child``."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _from_json(line: dict[str, Any]) -> Finding:
    tokens = line.pop("tokens")
    return Finding(**line, tokens=None if tokens is None else (tokens[0], tokens[1]))


def main(path: str, key: MasterKey | None) -> None:
    """Check the memory at ``path`` (a folder, or ``zarr:`` and one) and print the findings."""
    try:
        store = open_unchecked(path, key)  # a scan says more of a damaged tree than that it is damaged
    except WrongKey as error:
        findings = [Finding(kind="damaged", message=str(error))]
        if (key or key_of_environment()) is None and (keys := folder(path)):
            findings = check_ciphertext(open_locked(path), keys)
    except MemstoreError as error:
        findings = [Finding(kind="damaged", message=str(error), remedy=error.remedy)]
    else:
        findings = [*check(store), *damaged_indexes(path)]
        store.close()
    for finding in findings:
        say(asdict(finding))
    say(DONE)


if __name__ == "__main__":
    told = (
        "" if sys.stdin.isatty() else sys.stdin.read()
    )  # never an argument, which other users of the machine could see
    main(sys.argv[-1], MasterKey(bytes.fromhex(told)) if told else None)
