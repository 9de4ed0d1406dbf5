"""``memstore demo``: a DRT reads a million tokens; a new process finds what is hidden there.

Five volumes of text, each a document of one memory on disk, with one passkey hidden in each. The model is a DRT of 0.2
million parameters that a CPU trained in minutes (``memstore train drt --recipe passkey-cpu``).
"""

from __future__ import annotations

import json as jsonlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import memstore
from memstore.errors import InvalidArgument, MemstoreError
from memstore.paths import python_module
from memstore.readers.kinds import load_folder, quiet_transformers
from memstore.tools.models import remember, resolve_model

if TYPE_CHECKING:
    from memstore.eval.filler import Filler
    from memstore.eval.tasks import Sample

TOKENS = 1_000_000
VOLUMES = 5
_AROUND = 70
"""Characters that are shown on either side of a passkey."""


def run(
    model: str | Path,
    *,
    json: bool = False,
    dtype: str = "auto",
    threads: int | None = None,
    seed: int = 0,
    keep: Path | None = None,
    tokens: int = TOKENS,
) -> dict[str, Any]:
    """Run the demo and return its figures; without ``json`` it also tells what it is doing."""
    if dtype not in ("auto", "float32"):
        raise InvalidArgument(f"a DRT computes in float32; --dtype {dtype} is for stock models (--model smollm2)")
    weights = Path(resolve_model(str(model)))
    with tempfile.TemporaryDirectory(prefix="memstore-demo-") as scratch:
        folder = Path(scratch) / "demo.mem" if keep is None else keep
        if keep is not None and keep.exists():
            raise InvalidArgument(f"{keep} exists already; name a new folder with --keep")
        try:
            figures, samples = _read(weights, folder, seed, tokens, say=not json)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)  # so that the same command can be given again
            raise
        if not json:
            print("\nThe memory is closed. A new process opens it and asks each volume for its passkey.\n", flush=True)
        questions = {
            name: asdict(sample) | {"hops": [[hop.start, hop.stop] for hop in sample.hops]}
            for name, sample in samples.items()
        }
        request = {"weights": str(weights), "folder": str(folder), "questions": questions, "threads": threads}
        asked = in_new_process("memstore.tools.demo_passkey", request)
        result = (
            figures | asked | _disk(folder) | {"seed": seed, "reopened_in_new_process": asked["pid"] != os.getpid()}
        )
    if not json:
        _print(result)
        print("", *what_to_type(keep), sep="\n")
    return result


def _read(
    weights: Path, folder: Path, seed: int, tokens: int, *, say: bool
) -> tuple[dict[str, Any], dict[str, Sample]]:
    """Write the memory: figures, and what is hidden in each volume."""
    from memstore.eval.filler import load_filler
    from memstore.eval.run import memory_spec
    from memstore.memory import open_memory
    from memstore.resources import PeakMemory

    with quiet_transformers():
        model, tokenizer = load_folder(weights)
    filler = load_filler(tokenizer, at_most=tokens)
    samples = hide(model, tokenizer, filler, seed, tokens)
    seconds = 0.0
    with PeakMemory() as peak, open_memory(folder, spec=memory_spec(model, tokenizer), mode="x") as memory:
        memory.put_info("model", {"name": remember(str(weights)), "dtype": "float32"})
        for name, sample in samples.items():
            with memstore.attach(model, memory, document=name, tokenizer=tokenizer) as reader:
                seconds += reader.read(sample.haystack(filler), progress=say).seconds
    read = sum(sample.length for sample in samples.values())
    return {
        "tokens_read": read,
        "read_seconds": round(seconds, 2),
        "read_tokens_per_s": round(read / seconds),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "filler": filler.name,
        "peak_anonymous_bytes": peak.anonymous_bytes,
    }, samples


def hide(model: Any, tokenizer: Any, filler: Filler, seed: int, tokens: int) -> dict[str, Sample]:
    """A passkey at a random place of each volume; the volumes follow one another in the filler."""
    from memstore.eval.run import block_tokens
    from memstore.eval.tasks import Phrases, make, plant

    rng, length = random.Random(seed), tokens // VOLUMES
    size = block_tokens(model)
    riddles = [make("passkey", Phrases(tokenizer), rng) for _ in range(VOLUMES)]
    return {
        f"volume-{number + 1}": plant(riddle, length, filler, size, rng, start=number * length)
        for number, riddle in enumerate(riddles)
    }


def _disk(folder: Path) -> dict[str, int]:
    from memstore.resources import disk_bytes

    return {"disk_bytes": disk_bytes(folder)}


# The second process


def in_new_process(module: str, request: dict[str, Any]) -> dict[str, Any]:
    """What ``module`` answers to ``request`` in a process of its own."""
    command = python_module(module)
    done = subprocess.run(command, input=jsonlib.dumps(request), capture_output=True, text=True, check=False)
    if done.returncode:
        raise MemstoreError(f"the process that asks ended with code {done.returncode}: {done.stderr.strip()[-500:]}")
    answer: dict[str, Any] = jsonlib.loads(done.stdout.splitlines()[-1])
    return answer


def answer_questions(
    weights: str, folder: str, questions: dict[str, dict[str, Any]], threads: int | None
) -> dict[str, Any]:
    """Open the memory and ask each volume; what the second process does."""
    from memstore.memory import open_memory
    from memstore.tools.verb import use_threads

    use_threads(threads)
    begun = time.perf_counter()
    with quiet_transformers():
        model, tokenizer = load_folder(Path(weights))
    with open_memory(folder, mode="r") as memory:
        answers = [_answer(model, tokenizer, memory, name, values) for name, values in questions.items()]
    return {
        "answers": answers,
        "passkeys_asked": len(answers),
        "passkeys_found": sum(answer["found"] for answer in answers),
        "ask_seconds": round(time.perf_counter() - begun, 2),
        "pid": os.getpid(),
    }


def _answer(model: Any, tokenizer: Any, memory: Any, name: str, values: dict[str, Any]) -> dict[str, Any]:
    from memstore.eval.needle import needle_blocks
    from memstore.eval.run import ask, block_tokens, past_of
    from memstore.eval.tasks import Sample

    sample = Sample(**{**values, "hops": tuple(range(*hop) for hop in values["hops"])})
    with memstore.attach(model, memory, document=name, tokenizer=tokenizer) as reader:
        with reader.record(sample.prompt, question=_question(tokenizer, sample)) as recorder:
            reply = ask(model, past_of(reader), sample)
            recorder.close(reply.tokens)
        blocks = needle_blocks(sample.hops[0], block_tokens(model))
        stored = [reader.document.tokens(number) for number in blocks]
        count = len(reader.document.blocks)
    text = " ".join(tokenizer.decode([token for part in stored for token in part.tolist()]).split())
    expected, said = (tokenizer.decode(ids).rstrip("|") for ids in (sample.answer, reply.tokens))
    return {
        "document": name,
        "expected": expected,
        "answer": said,
        "found": reply.tokens == sample.answer,
        "block": blocks.start,
        "last_block": blocks[-1],
        "needle": [sample.hops[0].start, sample.hops[0].stop],
        "blocks": count,
        "weight": round(reply.found[0].weight, 3) if reply.found else None,
        "margin": None if not reply.found or reply.found[0].margin is None else round(reply.found[0].margin, 2),
        "text": text,
        "trace": recorder.number,
    }


def _question(tokenizer: Any, sample: Sample) -> str:
    """What is asked, without the filler that puts it at its place in a block."""
    return "|" + str(tokenizer.decode(sample.prompt)).rpartition("|")[2]


# What people see


def _print(result: dict[str, Any]) -> None:
    from memstore.report import Page

    page = Page()
    for answer in result["answers"]:
        at = answer["text"].find(answer["expected"])
        shown = answer["text"][max(0, at - _AROUND) : at + _AROUND]
        page.line(
            f"{'found ' if answer['found'] else 'MISSED'}  {answer['document']}: the passkey is {answer['answer']}"
        )
        numbers = [f"{block:,}" for block in range(answer["block"], answer["last_block"] + 1)]
        where = f"block{'s' if len(numbers) > 1 else ''} {' and '.join(numbers)}"
        page.line(f"        {where} of {answer['blocks']:,}: …{shown}…")
    page.line()
    page.facts(_facts(result))


def what_to_type(keep: Path | None, command: str = "memstore demo") -> list[str]:
    """The last lines after ``command``: how to go on from here to the reasons."""
    if keep is None:
        return [f"To keep the memory and see why the model found its passkeys: {command} --keep demo.mem"]
    memory = quote(str(keep))
    return [
        "See why it found them:",
        f"  memstore trace {memory}  the blocks that each token of the last answer was written with",
        f"  memstore view {memory}   the memory and all answers, in a browser",
    ]


def _facts(result: dict[str, Any]) -> dict[str, object]:
    mebi = 1 / 2**20
    return {
        "passkeys found": f"{result['passkeys_found']} of {result['passkeys_asked']}",
        "tokens read": f"{result['tokens_read']:,}, in {VOLUMES} volumes of {result['filler']}",
        "reading": f"{result['read_tokens_per_s']:,} tokens/s ({result['read_seconds']:.1f} s), committed to disk",
        "asking, with starting a process": f"{result['ask_seconds']:.1f} s",
        "parameters of the model": f"{result['parameters']:,}",
        "peak memory while reading, anonymous": f"{result['peak_anonymous_bytes'] * mebi:,.0f} MiB",
        "on disk": f"{result['disk_bytes'] * mebi:,.0f} MiB",
    }


if __name__ == "__main__":
    print(jsonlib.dumps(answer_questions(**jsonlib.load(sys.stdin))))
