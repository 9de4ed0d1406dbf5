"""SIGINT a ``memstore read`` at random moments, sometimes twice: it ends in one line, nothing committed is lost.

The whole process group gets the signal, as it does from a terminal.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import memstore
import memstore.tools.app  # a command that begins with imports would be interrupted in these
from benchmarks.torture.processes import Say, fork, run
from memstore.__main__ import run as run_command
from memstore.errors import NotFound
from tests.faults.kill_readings import same_beginning
from tests.faults.outcome import Outcome
from tests.faults.world import STORES, sound
from tests.tools.conftest import save_tiny_model

TEXT = "".join(chr(97 + number * number % 23) for number in range(3_000))
INTERRUPTED = 128 + signal.SIGINT
EXPECTED = re.compile(r"reading text|[\d,]+ tokens to read: ")
"""Lines of a reading that nothing interrupts."""


def interrupt(folder: Path, store: str, rounds: int, seed: int) -> Outcome:
    """Interrupt ``rounds`` times; what was read is read on by the next round, until a text is whole."""
    rng, outcome = random.Random(seed), Outcome()
    model, text, errors = folder / "model", folder / "text.txt", folder / "errors"
    text.write_text(TEXT)
    save_tiny_model(model)
    whole, begun = STORES[store](folder / "whole"), time.monotonic()
    undisturbed = fork(partial(_read, text, model, whole, errors)).wait()
    assert undisturbed.last == "0", errors.read_text()
    longest = time.monotonic() - begun
    url, held = STORES[store](folder / "0"), 0
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # so a child ends at once where it has not begun to listen yet
    for number in range(rounds):
        child = fork(partial(_read, text, model, url, errors))
        with suppress(PermissionError):  # it has done so itself by then
            os.setpgid(child.pid, child.pid)
        for wait in [rng.random() * longest, rng.random() * 0.05][: 1 + (rng.random() < 0.3)]:
            time.sleep(wait)  # the moment of Ctrl-C is what is tried
            os.killpg(child.pid, signal.SIGINT)
        ending = child.wait()
        words = "".join(line for line in errors.read_text().splitlines(True) if not EXPECTED.match(line))
        code = int(ending.last) if ending.last.isdigit() else ending.code
        outcome.counts[f"ended with {code}"] += 1
        if code not in (0, INTERRUPTED, -signal.SIGINT) or words.count("\n") > 1 or "Traceback" in words:
            outcome.crashes.append(f"round {number} of {url} ended with {code}: {words}")
        told = re.search(r"interrupted after ([\d,]+) tokens", words)
        expected = max(held, int(told[1].replace(",", "")) if told else 0)
        looking = run(partial(_look, url, whole, expected))
        if not looking.last.isdigit():
            broken = outcome.losses if looking.code == 0 else outcome.crashes
            broken.append(f"round {number} of {url}: {looking.last}")
            continue
        held = int(looking.last)
        if code == 0:
            if held != len(TEXT):
                outcome.losses.append(f"round {number} of {url} has {held} tokens in the end")
            url, held = STORES[store](folder / str(number + 1)), 0
    return outcome


def _read(text: Path, model: Path, url: str, errors: Path, say: Say) -> None:
    """In a group of its own, as a shell starts it."""
    os.setpgid(0, 0)
    os.environ["XDG_CONFIG_HOME"] = str(model.parent)
    handle = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(handle, 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.argv = ["memstore", "read", str(text), url, "--document", "text", "--model", str(model), "--dtype", "float32"]
    say(str(run_command()))


def _look(url: str, whole: str, expected: int, say: Say) -> None:
    """Say how many tokens are there, or what is wrong with what is there."""
    say(_found(url, whole, expected))


def _found(url: str, whole: str, expected: int) -> str:
    try:
        with memstore.open(url, mode="r") as found, memstore.open(whole, mode="r") as other:
            held = same_beginning(found, other)
    except NotFound as error:
        return f"lost: {error}" if expected else "0"
    if held < expected:
        return f"lost: {expected} tokens were committed, {held} are there"
    findings = sound(url)
    return f"verify found: {findings}" if findings else str(held)
