"""One stage of one peer in a process of its own. Seconds are the processor's: other work beside it does not count."""

from __future__ import annotations

import importlib
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.contract import Peer


def main(peer: str, work_file: str, folder: str, stage: str) -> None:
    """Do one stage and print its figures as one line of JSON."""
    work = json.loads(Path(work_file).read_text("utf-8"))
    module, _, name = peer.partition(":")
    subject: Peer = getattr(importlib.import_module(f"benchmarks.peers.{module}"), name)(
        work["model"], Path(folder), work
    )
    Path("/proc/self/clear_refs").write_text("5")  # the peak of loading the model is not the peer's
    base = _bytes("VmRSS")
    begun = time.process_time()
    figures: dict[str, Any] = {"version": subject.version()}
    if stage == "read":
        subject.read(work["text"])
        figures["read_s"] = time.process_time() - begun
    else:
        subject.restore()
        answers, seconds = [], []
        for prompt in work["own"] + (work["plain"] if stage == "ask" else []):
            asked = time.process_time()
            answers.append(subject.answer(prompt, work["answer_tokens"]))
            seconds.append(time.process_time() - asked)
            figures.setdefault("first_answer_s", time.process_time() - begun)
        figures |= {"answers": answers, "answer_s": sorted(seconds)[len(seconds) // 2]}
    print(json.dumps(figures | {"peak_bytes_above_model": _bytes("VmHWM") - base}))


def _bytes(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text("utf-8"))
    assert found is not None
    return 1024 * int(found[1])


if __name__ == "__main__":
    main(*sys.argv[1:])
