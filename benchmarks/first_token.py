"""The time to the first token with a memory of a million tokens, beside that of the same prompt without one.

    python benchmarks/first_token.py
    python benchmarks/first_token.py --served --words 0 150

What is stored is random, in the shape of the model's states: how long a search, a gather and a pass take does not
depend on it, and nobody waits for hours until a model has read it. The documents are forks of one, so that the disk
holds it once; each is searched by itself, as a document of its own is. The question stands in the model's chat
template, behind a system prompt of so many more ``--words``.

In one process both ways are asked in turn, and the least processor time of each counts. With ``--served`` the memory
is asked through ``memstore serve``: the seconds until the first piece of a streamed answer has come, of the first
request alone and the least of the later ones, and the processor time that the server took for a later one, sources
and all, in steps of 10 ms over all of them. Beside a server that nobody else uses, the least of either is the model's.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import memstore
from memstore.memory import Document
from memstore.readers.asking import INSTRUCTION, Template
from memstore.readers.caches import CACHE
from memstore.resources import hardware
from memstore.tools.models import load_model

QUESTION = "Who was in charge of the lighthouse when the great storm came, and what was the keeper's dog called?"


def main() -> None:
    """Run it and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--documents", type=int, default=10)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--codec", default="none")
    parser.add_argument("--index", default="exact")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--words", type=int, nargs="+", default=[0], help="more words of a system prompt")
    parser.add_argument("--served", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    (model, tokenizer), (plain, _) = (load_model(options.model, options.dtype) for _ in range(2))
    with tempfile.TemporaryDirectory() as scratch:
        memory = Path(scratch) / "m.mem"
        with memstore.attach(model, memory, tokenizer=tokenizer, codec=options.codec) as reader:
            fill(reader, options.tokens // options.documents, options.documents)
        for words in options.words:
            system = " ".join([INSTRUCTION, *["Speak plainly and to whoever asks."] * (words // 6)])
            prompt = templated(tokenizer, system)
            about = {
                "tokens": options.tokens // options.documents * options.documents,
                "documents": options.documents,
                "index": options.index,
                "model": options.model,
                "dtype": str(plain.dtype).removeprefix("torch."),
                "prompt_tokens": prompt.shape[1],
            }
            if options.served:
                found = served(plain, prompt, system, str(memory), options)
            else:
                with memstore.attach(model, memory, tokenizer=tokenizer, mode="r", index=options.index) as reader:
                    frame = Template.of(tokenizer, system)
                    assert frame is not None, "an instruct model has a template"
                    opening = len(frame.controls(tokenizer, frame.opening))
                    found = in_turn(plain, prompt, opening, reader, options.rounds) | {"opening_tokens": opening}
            print(json.dumps(about | found | hardware() | {"threads": options.threads}), flush=True)


def templated(tokenizer: Any, system: str) -> torch.Tensor:
    """The question behind a system prompt: tokens ``[1, T]``."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": QUESTION}]
    tokens: torch.Tensor = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).input_ids
    return tokens


def fill(reader: Any, tokens: int, documents: int) -> None:
    """Put random states of so many tokens into a document, and make forks of it."""
    spec, made = reader.memory.spec, torch.Generator().manual_seed(0)
    reader.calibrate(torch.randint(1000, 40_000, (2048,), generator=made))
    document: Document = reader.memory.document("0")
    options = reader._reading(retrieve=True)
    for start in range(0, tokens, 64 * spec.block_size):
        count = min(64 * spec.block_size, tokens - start) // spec.block_size * spec.block_size
        ids = torch.randint(1000, 40_000, (count,), generator=made)
        with document.append(ids, reading=None if start else options) as batch:
            blocks = len(batch.blocks)
            codes = torch.randn(blocks, spec.key_heads, spec.keys_per_block, spec.key_dim, generator=made)
            for layer in range(spec.layers):
                states = {name: torch.randn(blocks, *shape, generator=made) for name, shape in spec.fields.items()}
                batch.put(layer, landmarks=codes if layer in spec.index_layers else None, **states)
    for number in range(1, documents):
        document.fork(str(number))


def in_turn(plain: Any, prompt: torch.Tensor, opening: int, reader: Any, rounds: int) -> dict[str, Any]:
    """Least processor time to the first token.

    ``asked`` is what ``ask`` does, beside the model alone that is given the whole prompt (``bare``) and one that keeps
    its opening as ``asked`` does (``bare_kept``). ``asked_whole`` keeps none; ``by_prompt`` has no query either.
    """
    one: dict[str, Any] = {"max_new_tokens": 1, "do_sample": False}
    with torch.no_grad():
        kept = plain(prompt[:, :opening], use_cache=True).past_key_values
    ways: dict[str, Callable[[], object]] = {
        "bare": lambda: plain.generate(prompt, **one),
        "bare_kept": lambda: plain.generate(prompt, **{CACHE: copy.deepcopy(kept)}, **one),
        "asked": lambda: reader.generate(prompt, query=QUESTION, opening=opening, **one),
        "asked_whole": lambda: reader.generate(prompt, query=QUESTION, **one),
        "by_prompt": lambda: reader.generate(prompt, **one),
    }
    spent: dict[str, list[float]] = {name: [] for name in ways}
    with reader.seeing(tail=False):
        begun = time.process_time()
        ways["asked"]()
        first = time.process_time() - begun
        for _ in range(rounds):
            for name, way in ways.items():
                begun = time.process_time()
                way()
                spent[name].append(time.process_time() - begun)
    least = {name: min(seconds) for name, seconds in spent.items()}
    return {
        "cpu_ms": {name: round(1000 * seconds) for name, seconds in least.items()},
        "first_request_cpu_s": round(first, 2),
        "times": round(least["asked"] / least["bare"], 2),
        "times_kept": round(least["asked"] / least["bare_kept"], 2),
    }


def served(plain: Any, prompt: torch.Tensor, system: str, memory: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds until the first piece of an answer has come from a server, beside those of the model alone."""
    command = [
        sys.executable,
        "-m",
        "memstore",
        "serve",
        memory,
        "--no-token",
        "--port",
        "0",
        "--threads",
        str(options.threads),
    ]
    command += ["--model", options.model, "--index", options.index]
    bare, later, spent = [], [], []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        url = next(word for line in server.stderr for word in line.split() if word.startswith("http://"))
        try:
            first = first_piece(url, system)
            for _ in range(options.rounds):
                begun, used = time.perf_counter(), processor_time(server.pid)
                plain.generate(prompt, max_new_tokens=1, do_sample=False)
                bare.append(time.perf_counter() - begun)
                later.append(first_piece(url, system))
                spent.append(processor_time(server.pid) - used)
        finally:
            server.terminate()
    return {
        "ms": {"bare": round(1000 * min(bare)), "served": round(1000 * min(later))},
        "server_cpu_ms": round(1000 * sum(spent) / len(spent)),
        "first_request_s": round(first, 2),
        "times": round(min(later) / min(bare), 2),
    }


def first_piece(url: str, system: str) -> float:
    """Seconds until the first piece of an answer of one token has come; the rest is read too."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": QUESTION}]
    asked = {"model": "m", "messages": messages, "max_tokens": 1, "stream": True}
    call = urllib.request.Request(  # noqa: S310 - our own server
        f"{url}/chat/completions", json.dumps(asked).encode(), {"content-type": "application/json"}
    )
    begun, found = time.perf_counter(), 0.0
    with urllib.request.urlopen(call, timeout=600) as answer:  # noqa: S310
        for line in answer:
            if not found and b'"content"' in line and b'"content":""' not in line.replace(b" ", b""):
                found = time.perf_counter() - begun
    return found or time.perf_counter() - begun


def processor_time(process: int) -> float:
    """Seconds of all its threads."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
