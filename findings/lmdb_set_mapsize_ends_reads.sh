#!/usr/bin/env bash
# py-lmdb: `set_mapsize` while this process has a read transaction open succeeds, and ends that transaction.
#
# LMDB's documentation says that the map may only be resized while no transaction is open in the process, and that it is
# the caller's duty to see to it; py-lmdb refuses while a write transaction is open. So one would expect the same for
# reads. Seen with lmdb 3.0.0 (LMDB 0.9.36):
#
#     set_mapsize(0) with an open read:        returns None
#     get in that transaction afterwards:      lmdb.Error: Attempt to operate on closed/deleted/dropped object.
#     set_mapsize(n) with an open write:       lmdb.Error: Cannot set_mapsize while a write transaction is active
#
# So a thread that adopts the growth of another process ends the reads of all other threads.
# Prints what it sees; fails if that changes.
set -euo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet lmdb==3.0.0
"$work/venv/bin/python" - "$work/db" <<'PYTHON'
import sys

import lmdb

environment = lmdb.open(sys.argv[1], map_size=1 << 20)
with environment.begin(write=True) as write:
    write.put(b"key", b"value")
print("LMDB", lmdb.version(), "lmdb", lmdb.__version__)


def told(what, call):
    try:
        answer = call()
    except lmdb.Error as error:
        answer = f"lmdb.Error: {error}"
    print(f"{what}: {answer}")
    return answer


read = environment.begin()
assert told("get in a read transaction", lambda: read.get(b"key")) == b"value"
assert told("set_mapsize(0) beside it", lambda: environment.set_mapsize(0)) is None
assert "closed" in told("get in the same transaction", lambda: read.get(b"key"))
with environment.begin(write=True):
    assert "write transaction" in told("set_mapsize beside a write", lambda: environment.set_mapsize(4 << 20))
PYTHON
