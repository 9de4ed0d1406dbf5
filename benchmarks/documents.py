"""Many short documents: a question over them beside the same text in one document, and reading them from files.

    python benchmarks/documents.py --documents 1000
    python benchmarks/documents.py --reading 1000 4000 10000

A tiny model with random weights, so that what is measured is the memory, not the model. The first: ``ask`` with two
tokens, and ``search``, in processor time; the first of each reads what the memory knows of every document, the least of
the others is told beside it. The second: processor time that ``memstore read`` takes for each note of a folder of so
many, and the seconds and imports of a new process that reads the same folder again, where nothing has changed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import memstore
from memstore.resources import hardware
from memstore.tools.read import read
from tests.instruct import instruct_model, instruct_tokenizer

TEXT = "Note {0}: the key of house {0} hangs behind beam {0}. "


def main() -> None:
    """Run it and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=1_000)
    parser.add_argument("--reading", type=int, nargs="+", metavar="NOTES")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        if options.reading:
            measure_reading(Path(scratch), options.reading)
        else:
            compare(Path(scratch), options.documents)
    print(hardware())


def compare(scratch: Path, documents: int) -> None:
    """Questions over so many documents, beside one of the same text."""
    texts = [TEXT.format(i) for i in range(documents)]
    many, one = measure(scratch / "many", texts), measure(scratch / "one", ["".join(texts)])
    for name in many:
        (first, later), (first_one, later_one) = many[name], one[name]
        print(
            f"{name:<7}{documents:,} documents {first:.3f} s, then {later:.3f} s; one {first_one:.3f} s, then "
            f"{later_one:.3f} s: {later / later_one:.1f}"
        )


def measure_reading(scratch: Path, sizes: list[int]) -> None:
    """Read folders of so many notes, each into a memory of its own, and again."""
    model = scratch / "model"
    instruct_model().save_pretrained(model)
    instruct_tokenizer().save_pretrained(model)
    for size in sizes:
        notes, memory = scratch / f"notes{size}", scratch / f"{size}.mem"
        notes.mkdir()
        for i in range(size):
            (notes / f"{i}.md").write_text(TEXT.format(i))
        begun = time.process_time()
        read(text=[str(notes)], memory=str(memory), model=str(model), block_size=16, json=True)
        each = (time.process_time() - begun) / size
        command = [sys.executable, "-X", "importtime", "-m", "memstore", "read", str(notes), str(memory)]
        begun = time.perf_counter()
        again = subprocess.run(command, capture_output=True, text=True, check=True)
        seconds = time.perf_counter() - begun
        loaded = "with" if "| torch\n" in again.stderr else "without"
        print(f"{size:,} notes: {1000 * each:.2f} ms of processor time each; again {seconds:.1f} s, {loaded} PyTorch")


def measure(memory: Path, texts: list[str]) -> dict[str, tuple[float, float]]:
    """Seconds of processor time of the first question, and the least of eight more."""
    model, tokenizer = instruct_model(), instruct_tokenizer()
    with memstore.attach(model, memory, tokenizer=tokenizer, block_size=16) as reader:
        for i, text in enumerate(texts):
            reader.read(text, f"n{i}")
    with memstore.attach(model, memory, tokenizer=tokenizer, mode="r") as reader:
        return {
            "ask": seconds(lambda: reader.ask("Where is the key of house 7?", max_tokens=2)),
            "search": seconds(lambda: reader.search("Where is the key?", 8)),
        }


def seconds(call: Callable[[], object]) -> tuple[float, float]:
    """Of processor time: the first call's, and the least of eight more."""
    spent = []
    for _ in range(9):
        begun = time.process_time()
        call()
        spent.append(time.process_time() - begun)
    return spent[0], min(spent[1:])


if __name__ == "__main__":
    main()
