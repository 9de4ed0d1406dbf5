#!/usr/bin/env bash
# PyTorch and tabulate: whether a program that Ctrl-C ended says so depends on a package that it never asked for.
#
# CPython ends itself with SIGINT after an unhandled KeyboardInterrupt, so that shells and job runners stop too. It keeps
# a flag for that until it exits, and every run of source text clears the flag. torch._dynamo, which transformers
# imports, formats its compile times when a program exits. It does so with tabulate if that is installed, and tabulate's
# import makes named tuples, which run source text. Seen with CPython 3.11.7, torch 2.13.0 and tabulate 0.10.0, exit
# status of a sleeping program after SIGINT (-2: by the signal):
#
#     imports                       without tabulate   with tabulate
#     torch                         -2                 -2
#     torch._dynamo                 -2                 1
#
# A shell loop over such a program goes on after Ctrl-C. Handle KeyboardInterrupt yourself and exit with 130.
# Prints the table; fails if it changes.
set -euo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$work/interrupt.py" <<'PYTHON'
import signal
import subprocess
import sys

expected = {"torch": -2, "torch._dynamo": 1 if sys.argv[1] == "with" else -2}
for module, status in expected.items():
    program = f"import {module}, time; print('ready', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        child.stdout.readline()
        child.send_signal(signal.SIGINT)
    print(f"{sys.argv[1]:7} tabulate, {module:13} ended with {child.returncode}")
    assert child.returncode == status
PYTHON
"$work/venv/bin/python" "$work/interrupt.py" without
"$work/venv/bin/pip" install --quiet tabulate==0.10.0
"$work/venv/bin/python" "$work/interrupt.py" with
