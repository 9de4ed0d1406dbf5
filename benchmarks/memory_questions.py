"""The memory questions of bfcl-eval through the OpenAI-compatible endpoint: sessions in, questions later.

    python benchmarks/memory_questions.py --model MODEL --scenario healthcare --out ROWS.json

A server takes what a user says, turn by turn, as a session; the model's answers are cut after a token, for they are not
what is asked for later. The session is forked into a document, for requests see no conversations but their own. Another
server, a new process, is asked each question over that document, and tells the sources that its answer was written
with. A question's evidence is found where one of them has the words that bfcl-eval names
as its source: a run of 40 characters of it, or most of a shorter one; or where blocks that follow each other, all of
them among the sources, have them together, for blocks end within sentences. An answer is right where it has one of the
expected texts. What the memory finds without a server and beside other searches is
``python -m benchmarks.questions chat``.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import memstore
from benchmarks.questions import chat
from memstore.memory.shared import CHAT
from memstore.resources import hardware
from memstore.tools.endpoint.worker import SERVED


def main() -> None:
    """Run it, print what was measured, and keep the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--scenario", nargs="+", choices=chat.SCENARIOS, default=chat.SCENARIOS)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--most", type=int, help="questions of each scenario at most")
    parser.add_argument("--answers", type=int, default=40, help="tokens of an answer; 1 where the sources are enough")
    parser.add_argument("--keep", help="a folder for the memories; those that are there are asked again")
    parser.add_argument("--out", type=Path, help="a file for the rows, as JSON")
    options = parser.parse_args()
    facts: dict[str, Any] = {"command": shlex.join(["python", *sys.argv]), "date": datetime.now(UTC).date().isoformat()}
    facts |= {"model": options.model, "top_k": options.top_k, **hardware(), "threads": 1}
    rows, data = list[dict[str, Any]](), chat.fetched()
    sources = {each["id"]: each["source"] for each in data["asked"]}
    sets = {each.name: each for each in chat.load(data)}
    for scenario in options.scenario:
        turns, asked = sets[scenario].paragraphs, sets[scenario].questions[: options.most]
        with tempfile.TemporaryDirectory() as scratch:
            memory = Path(options.keep or scratch) / f"{scenario}.mem"
            served = [str(memory), "--top-k", str(options.top_k)]
            if not memory.exists():
                talk(memory, turns, options.model, served)
            make_document(memory)
            found = whole = right = 0
            with serving(*served) as url:
                for each in asked:
                    told = ask(url, scenario, each.text, {"document": scenario}, options.answers)
                    answer = told["choices"][0]["message"]["content"]
                    within = any(chat.has_source(sources[each.id], source["text"]) for source in told["sources"])
                    hit = within or any(chat.has_source(sources[each.id], text) for text in joined(told["sources"]))
                    said = any(text.lower() in answer.lower() for text in each.answers)
                    found, whole, right = found + hit, whole + within, right + said
                    print(f"  {'found' if hit else 'lost '} {each.text!r}: {answer!r}", flush=True)
        counts = {"asked": len(asked), "found": found, "whole": whole, "right": right}
        row = {"scenario": scenario, "turns": len(turns), **counts}
        print(json.dumps(row), flush=True)
        rows.append(row)
        if options.out is not None:
            options.out.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")
    found, whole, right, count = (sum(row[name] for row in rows) for name in ("found", "whole", "right", "asked"))
    shares = f"{found / count:.3f} ({whole / count:.3f} within one block)"
    print(f"evidence {shares}, answers {right / count:.3f}, of {count} questions")
    print(hardware())


def talk(memory: Path, turns: Sequence[str], model: str, served: list[str]) -> None:
    """Make a memory, and say ``turns`` in a session of a server."""
    made = [sys.executable, "-m", "memstore", "read", "-", str(memory), "--model", model]
    subprocess.run(made, input="Conversations with one user.", text=True, capture_output=True, check=True)
    with serving(*served, "--sessions", "1") as url:
        for turn in turns:
            ask(url, memory.stem, turn, {"session": memory.stem}, 1)


def make_document(memory: Path) -> None:
    """Fork the session of ``memory`` into a document of its name, where there is none."""
    with memstore.open(memory) as opened:
        if memory.stem not in [each.name for each in opened.documents()]:
            opened.document(CHAT + SERVED + memory.stem).fork(memory.stem)


def joined(sources: list[dict[str, Any]]) -> list[str]:
    """The texts of sources, those of blocks that follow each other as one."""
    texts: list[str] = []
    last = None
    for source in sorted(sources, key=lambda each: (each["document"], each["block"])):
        place = source["document"], source["block"]
        if last is not None and place == (last[0], last[1] + 1):
            texts[-1] += source["text"]
        else:
            texts.append(source["text"])
        last = place
    return texts


@contextmanager
def serving(*options: str) -> Iterator[str]:
    """The address of a server, a process of its own."""
    command = [sys.executable, "-m", "memstore", "serve", *options, "--no-token", "--port", "0", "--threads", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        lines = (line for line in server.stderr if "http://" in line)
        try:
            yield next(word for word in next(lines).split() if word.startswith("http://"))
        finally:
            server.terminate()


def ask(url: str, memory: str, words: str, metadata: dict[str, str], tokens: int) -> dict[str, Any]:
    """The completion of one request."""
    given = {
        "model": memory,
        "messages": [{"role": "user", "content": words}],
        "metadata": metadata,
        "max_tokens": tokens,
    }
    call = urllib.request.Request(  # noqa: S310 - our own server
        f"{url}/chat/completions", json.dumps(given).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(call, timeout=3600) as answer:  # noqa: S310
        told: dict[str, Any] = json.load(answer)
    return told


if __name__ == "__main__":
    main()
