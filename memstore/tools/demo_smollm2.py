"""``memstore demo --model smollm2``: a stock model reads four times what it was trained for.

A new process answers from the memory.
"""

from __future__ import annotations

import json as jsonlib
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from shlex import quote
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import memstore
from memstore.errors import InvalidArgument
from memstore.eval import needles
from memstore.eval.needles import Haystack, Needle
from memstore.resources import PeakMemory, disk_bytes
from memstore.tools.demo_passkey import in_new_process, what_to_type
from memstore.tools.models import LoadedModel, load_model, record_model

if TYPE_CHECKING:
    from memstore.readers.attachment import ReadResult

TOKENS = 32_768
"""Length of each of the two texts."""
SCORED = 2_048
"""Tokens at the end of the prose whose perplexity is measured."""
ANSWER_TOKENS = 12
DECODED = 48
TOP_K = 8
FILLER, PROSE = "filler", "prose"


class Text(NamedTuple):
    """One document of the demo."""

    name: str
    hay: Haystack


def run(
    model: str = "smollm2",
    *,
    json: bool = False,
    dtype: str = "auto",
    threads: int | None = None,
    seed: int = 0,
    keep: Path | None = None,
    tokens: int = TOKENS,
    scored: int = SCORED,
) -> dict[str, Any]:
    """Run the demo and return its figures; without ``json`` it also tells what it is doing."""
    with tempfile.TemporaryDirectory(prefix="memstore-demo-") as scratch:
        folder = Path(scratch) / "demo.mem" if keep is None else keep
        if keep is not None and keep.exists():
            raise InvalidArgument(f"{keep} exists already; name a new folder with --keep")
        with PeakMemory() as peak:
            loaded = load_model(model, dtype)
            texts = build_texts(loaded, seed, tokens)
            figures = _read(loaded, texts, folder, model, scored=scored, say=not json)
        del loaded
        if not json:
            print("\nThe memory is closed. A new process opens it and asks.\n", flush=True)
        questions = [
            [text.name, needle.kind, needle.prompt, needle.answer] for text in texts for needle in text.hay.needles
        ]
        request = {"folder": str(folder), "questions": questions, "threads": threads}
        asked = in_new_process("memstore.tools.demo_smollm2", request)
        result = figures | {
            **_counts(asked["answers"]),
            "decode_ms": asked["decode_ms"],
            "bare_decode_ms": asked["bare_decode_ms"],
            "peak_anonymous_bytes": max(peak.anonymous_bytes, asked["peak_anonymous_bytes"]),
            "peak_rss_bytes": max(peak.rss_bytes, asked["peak_rss_bytes"]),
            "disk_bytes": disk_bytes(folder),
            "reopened_in_new_process": asked["pid"] != os.getpid(),
            "seed": seed,
            "answers": asked["answers"],
        }
    if not json:
        _print(result)
        print("", *what_to_type(keep, f"memstore demo --model {quote(model)}"), sep="\n")
    return result


def build_texts(loaded: LoadedModel, seed: int, tokens: int = TOKENS) -> list[Text]:
    """The filler with five pass keys, and the prose with five needles of other kinds."""
    rng = random.Random(seed)
    tokenizer = loaded.tokenizer
    keys = needles.passkeys(5, rng)
    facts = needles.prose_needles(needles.FIVE_KINDS, rng)
    return [
        Text(FILLER, needles.hide(needles.filler_text(8 * tokens), keys, tokenizer, tokens, rng)),
        Text(PROSE, needles.hide(needles.prose_text(), facts, tokenizer, tokens, rng)),
    ]


def _read(loaded: LoadedModel, texts: list[Text], folder: Path, name: str, *, scored: int, say: bool) -> dict[str, Any]:
    results: dict[str, ReadResult] = {}
    retrieval = memstore.Retrieval(top_k=TOP_K)
    with memstore.attach(loaded.model, folder, tokenizer=loaded.tokenizer, retrieval=retrieval) as attached:
        record_model(attached.memories[0], name, loaded)
        for text in texts:
            score = scored if text.name == PROSE else 0
            results[text.name] = attached.read(text.hay.tokens, text.name, progress=say, score=score, reuse=False)
    read = sum(result.new_tokens for result in results.values())
    return {
        "tokens_read": read,
        "read_tokens_per_s": round(read / sum(result.seconds for result in results.values()), 1),
        "ppl_window": round(window_perplexity(loaded, texts[-1].hay.tokens, scored), 3),
        "ppl_memory": round(results[PROSE].perplexity, 3),
    }


def window_perplexity(loaded: LoadedModel, tokens: list[int], scored: int = SCORED) -> float:
    """Perplexity of the last ``scored`` tokens with sink and window alone; what is further back is not even read."""
    near = tokens[-(scored + 1024) :]
    with memstore.attach(loaded.model, "ram:", tokenizer=loaded.tokenizer) as attached:
        return attached.read(near, "near", score=scored, retrieve=False).perplexity


# The second process


def answer_questions(folder: str, questions: list[list[str]], threads: int | None) -> dict[str, Any]:
    """Open the memory and ask everything; what the second process does."""
    from memstore.tools.models import load_recorded
    from memstore.tools.verb import use_threads

    use_threads(threads)
    with PeakMemory() as peak, memstore.open(folder, mode="r") as memory:
        loaded = load_recorded(memory, None, None, device="cpu")
        answers = [_answer(loaded, memory, *question) for question in questions]
        with_memory = decode_milliseconds(loaded, memory, questions[-1][0])
        bare = decode_milliseconds(loaded, None, "")
    return {
        "answers": answers,
        "decode_ms": round(with_memory, 2),
        "bare_decode_ms": round(bare, 2),
        "peak_anonymous_bytes": peak.anonymous_bytes,
        "peak_rss_bytes": peak.rss_bytes,
        "pid": os.getpid(),
    }


def _answer(
    loaded: LoadedModel, memory: memstore.Memory, document: str, kind: str, prompt: str, expected: str
) -> dict[str, Any]:
    retrieval = memstore.Retrieval(top_k=TOP_K)
    with memstore.attach(
        loaded.model, memory, document=document, tokenizer=loaded.tokenizer, retrieval=retrieval
    ) as attached:
        told = attached.ask(prompt, raw=True, max_tokens=ANSWER_TOKENS, trace=True)
        blocks = told.sources()
    text = told.text
    found = Needle(kind, "", "", expected).found_in(text)
    return {
        "document": document,
        "kind": kind,
        "prompt": prompt.strip(),
        "expected": expected,
        "answer": text.strip(),
        "found": found,
        "blocks": [{"block": each.block, "text": each.text} for each in blocks],
        "trace": told.trace,
    }


def decode_milliseconds(loaded: LoadedModel, memory: memstore.Memory | None, document: str) -> float:
    """Median time per generated token, with ``memory`` attached or without one."""
    if memory is None:
        return _decode(loaded)
    retrieval = memstore.Retrieval(top_k=TOP_K)
    with memstore.attach(loaded.model, memory, document=document, tokenizer=loaded.tokenizer, retrieval=retrieval):
        return _decode(loaded)


def _decode(loaded: LoadedModel) -> float:
    import torch

    from memstore.readers.caches import CACHE, cache_in

    token = torch.tensor([[loaded.tokenizer.encode(" the", add_special_tokens=False)[0]]])
    times, cache = [], None
    with torch.inference_mode():
        for _ in range(DECODED):
            begun = time.perf_counter()
            output = loaded.model(token, use_cache=True, **{CACHE: cache})
            token, cache = output.logits[:, -1:].argmax(-1), cache_in(output)
            times.append(time.perf_counter() - begun)
    return 1000 * median(times[4:])


# What people see


def _counts(answers: list[dict[str, Any]]) -> dict[str, int]:
    keys = [a for a in answers if a["document"] == FILLER]
    facts = [a for a in answers if a["document"] == PROSE]
    return {
        "passkeys_asked": len(keys),
        "passkeys_found": sum(a["found"] for a in keys),
        "needles_asked": len(facts),
        "needles_found": sum(a["found"] for a in facts),
    }


def _print(result: dict[str, Any]) -> None:
    from memstore.report import Page

    page = Page()
    for answer in result["answers"]:
        page.line(
            f"{'found ' if answer['found'] else 'MISSED'}  {answer['prompt'].splitlines()[-1]} [{answer['answer']}]"
        )
        for block in answer["blocks"]:
            text = " ".join(block["text"].split())
            where = text.find(answer["expected"])
            shown = text[max(0, where - 60) : where + 60] if where >= 0 else text[:120]
            page.line(f"          {answer['document']} block {block['block']:>4}  {'*' if where >= 0 else ' '} {shown}")
    page.line()
    page.facts(_facts(result))


def _facts(result: dict[str, Any]) -> dict[str, object]:
    mebi = 1 / 2**20
    return {
        "pass keys found in filler": f"{result['passkeys_found']} of {result['passkeys_asked']}",
        "needles found in prose": f"{result['needles_found']} of {result['needles_asked']}",
        "tokens read": result["tokens_read"],
        "reading": f"{result['read_tokens_per_s']:,.0f} tokens/s",
        "one token, with memory": f"{result['decode_ms']:.1f} ms",
        "one token, bare model": f"{result['bare_decode_ms']:.1f} ms",
        f"perplexity of the last {SCORED:,} tokens of prose, window only": f"{result['ppl_window']:.2f}",
        f"perplexity of the last {SCORED:,} tokens of prose, with memory": f"{result['ppl_memory']:.2f}",
        "peak memory, anonymous": f"{result['peak_anonymous_bytes'] * mebi:,.0f} MiB",
        "peak memory, with mapped pages": f"{result['peak_rss_bytes'] * mebi:,.0f} MiB",
        "on disk": f"{result['disk_bytes'] * mebi:,.0f} MiB",
    }


if __name__ == "__main__":
    print(jsonlib.dumps(answer_questions(**jsonlib.load(sys.stdin))))
