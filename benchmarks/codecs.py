"""What codecs cost: bytes, speed, perplexity and answers: ``python -m benchmarks.codecs``.

SmolLM2-135M reads Python's language reference into a memory with each codec and predicts the last tokens of it; the
losses are compared token by token with those of the memory without a codec, and the questions of a haystack are asked
of each memory. The shipped DRT looks for passkeys. Speeds are those of one thread, by turns with a plain copy of the
decoded bytes: of the blocks of one gather, which fit a processor's cache, and of more than fit.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import memstore
from benchmarks.needles import KINDS
from memstore.eval import needles
from memstore.eval.filler import load_filler
from memstore.eval.run import TaskPlan, evaluate
from memstore.memory.spec import CODECS
from memstore.models.drt.reader import memory_spec
from memstore.readers import kinds
from memstore.readers.kinds import encode
from memstore.readers.reader import Reader
from memstore.resources import hardware
from memstore.store.codecs import LOSSY
from memstore.tools.models import LoadedModel, load_model

RESULTS = Path(__file__).parent / "results" / "codecs.json"
PARTS = ["speed", "perplexity", "needles", "passkey"]
GATHERS = {"one gather, in cache": 32, "more than a cache holds": 1024}
"""Blocks of SmolLM2 (3 heads, 64 tokens, 64 channels) that are encoded and decoded at a time."""
ROUNDS = 15
ANSWER_TOKENS = 12


def main() -> None:
    """Measure, print a line for each row, and write all of them down."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=16_384, help="Tokens that SmolLM2 reads.")
    parser.add_argument("--scored", type=int, default=4_096, help="The last of them, which are predicted.")
    parser.add_argument("--haystack", type=int, default=8_192, help="Tokens of the text that hides what is asked for.")
    parser.add_argument("--passkey-tokens", type=int, default=65_536, help="Tokens of a haystack for the DRT.")
    parser.add_argument("--samples", type=int, default=10, help="Passkeys that the DRT looks for.")
    parser.add_argument("--codecs", nargs="+", default=[*CODECS], choices=CODECS)
    parser.add_argument("--only", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="A file for the rows; all parts go to results/codecs.json.")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    for row in measure(options):
        print(json.dumps(row), flush=True)
        rows.append(row)
    out = options.out or (RESULTS if options.only == PARTS else None)
    if out is not None:
        out.write_text(json.dumps({"hardware": hardware(), "threads": options.threads, "rows": rows}, indent=1) + "\n")


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows."""
    if "speed" in options.only:
        for codec in filter(LOSSY.get, options.codecs):
            yield from speed(codec)
    if {"perplexity", "needles"} & set(options.only):
        loaded = load_model("smollm2", options.dtype)
        if "perplexity" in options.only:
            yield from perplexity(loaded, options)
        if "needles" in options.only:
            yield from ask_needles(loaded, options)
    if "passkey" in options.only:
        yield from passkey(options)


def speed(codec: str) -> Iterator[dict[str, Any]]:
    """GB of decoded bytes a second, and the same of a copy of them."""
    chosen = LOSSY[codec]
    for what, blocks in GATHERS.items():
        states = torch.randn(blocks, 3, 64, 64).to(torch.bfloat16)
        stored, copy = chosen.encode(states), torch.empty_like(states)
        decode, encode_, plain = alternating(
            lambda: chosen.decode(stored, states.dtype, tuple(states.shape[1:])),  # noqa: B023 - called right here
            lambda: chosen.encode(states),  # noqa: B023
            lambda: copy.copy_(states),  # noqa: B023
        )
        gigabytes = states.numel() * states.element_size() / 1e9
        bits = 8 * sum(part.numel() * part.element_size() for part in stored) / states.numel()
        yield {
            "what": "speed",
            "codec": codec,
            "blocks": f"{blocks}: {what}",
            "bits_per_number": round(bits, 3),
            "decode_gb_per_s": round(gigabytes / decode, 2),
            "encode_gb_per_s": round(gigabytes / encode_, 2),
            "copy_gb_per_s": round(gigabytes / plain, 2),
            "decode_to_copy": round(plain / decode, 3),
        }


def alternating(*calls: Callable[[], object]) -> list[float]:
    """Median seconds of each call, by turns, so that what else runs meets all of them."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for call, times in zip(calls, seconds, strict=True):
            begun = time.process_time()
            call()
            times.append(time.process_time() - begun)
    return [max(statistics.median(times[2:]), 1e-9) for times in seconds]


def attached_to(loaded: LoadedModel, codec: str) -> Reader:
    """A new memory with a codec, attached to the model."""
    return memstore.attach(
        loaded.model,
        "ram:",
        document="text",
        codec=codec,
        tokenizer=loaded.tokenizer,
        retrieval=memstore.Retrieval(top_k=4),
    )


def perplexity(loaded: LoadedModel, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Perplexity of the last tokens of one text, and how its losses differ from those without a codec."""
    text = needles.prose_text(random.Random(0))
    tokens = encode(loaded.tokenizer, text)[: options.tokens]
    base: Tensor | None = None
    for codec in options.codecs:
        with attached_to(loaded, codec) as attached:
            result = attached.read(tokens, score=options.scored, reuse=False)
            stored = attached.memories[0].stats()["bytes"]
        base = result.nll if base is None else base
        more = (result.nll - base).double()
        yield {
            "what": "perplexity",
            "codec": codec,
            "tokens": len(tokens),
            "scored": len(more),
            "perplexity": round(result.perplexity, 4),
            "percent_more": round(100 * float(more.mean().expm1()), 3),
            "standard_error": round(100 * float(more.std()) / len(more) ** 0.5, 3),
            "block_bytes_per_token": round(stored["blocks"] / len(tokens), 1),
            "read_tokens_per_s": round(result.tokens_per_second, 1),
        }


def ask_needles(loaded: LoadedModel, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Passkeys and other needles in prose: how many are answered whole."""
    rng = random.Random(1)
    hidden = needles.passkeys(5, rng) + needles.prose_needles(KINDS, rng)
    hay = needles.hide(needles.prose_text(rng), hidden, loaded.tokenizer, options.haystack, rng)
    for codec in options.codecs:
        with attached_to(loaded, codec) as attached:
            attached.read(hay.tokens)
            answers = [attached.ask(needle.prompt, raw=True, max_tokens=ANSWER_TOKENS).text for needle in hay.needles]
        right = [needle.found_in(text) for needle, text in zip(hay.needles, answers, strict=True)]
        yield {
            "what": "needles",
            "codec": codec,
            "tokens": len(hay.tokens),
            "asked": len(right),
            "answered": sum(right),
            "missed": [needle.kind for needle, good in zip(hay.needles, right, strict=True) if not good],
        }


def passkey(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Passkeys that the DRT of the package finds in filler."""
    model, tokenizer = kinds.load_folder(kinds.shipped_model(kinds.PASSKEY))
    filler = load_filler(tokenizer, at_most=2 * options.passkey_tokens)
    plan = TaskPlan(task="passkey", lengths=[options.passkey_tokens], samples=options.samples, reuse=True)
    for codec in options.codecs:
        with memstore.open("ram:", spec=memory_spec(model, tokenizer, codec)) as memory:
            for row in evaluate(model, tokenizer, plan, filler, memory):
                yield {"what": "passkey", "codec": codec, **row.to_dict()}


if __name__ == "__main__":
    main()
