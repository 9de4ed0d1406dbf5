#!/usr/bin/env bash
# Print a Python that can carry memstore: 3.11 or newer, with venv and pip. The version tested most comes first.
set -euo pipefail

usable='import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))'
candidates=(python3.11 python3.12 python3.13 python3.14 python3)
if [ $# -gt 0 ]; then
    candidates=("$@")
fi

for candidate in "${candidates[@]}"; do
    if "$candidate" -c "$usable" >/dev/null 2>&1; then
        command -v "$candidate"
        exit
    fi
done

echo "memstore needs Python 3.11 or newer with venv and pip (on Debian: apt-get install python3 python3-venv)." >&2
echo "Tried: ${candidates[*]}. Another one can be named: make test PYTHON=/path/to/python3.12" >&2
exit 1
