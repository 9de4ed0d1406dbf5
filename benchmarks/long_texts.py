"""How much of what a window costs does a memory give back, and by which option? Perplexity at the end of long texts.

    python -m benchmarks.long_texts --tokens 8192 --texts 4
    apt-get download r-cran-janeaustenr && dpkg -x r-cran-janeaustenr_*.deb austen
    python -m benchmarks.long_texts --novels austen --tokens 32768 --ways window,memory,k=16,k=32

Texts that do not repeat: Wikipedia's articles in SQuAD (CC BY-SA 4.0; its longest ones), or novels (public domain). The
last tokens of each are scored by the same stock model: with full attention to all of the text, where its positions
reach; with sink and window alone; and with all that is before in a memory, read in several ways.
"""

from __future__ import annotations

import argparse
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import memstore
from benchmarks.questions.squad import SOURCE
from benchmarks.questions.wheel import load_json
from memstore import Retrieval
from memstore.readers.kinds import encode
from memstore.resources import hardware
from memstore.tools.models import load_model

WAYS: dict[str, dict[str, Any]] = {
    "memory": {},
    "k=4": {"retrieval": Retrieval(top_k=4)},
    "k=16": {"retrieval": Retrieval(top_k=16)},
    "k=32": {"retrieval": Retrieval(top_k=32)},
    "in order of time": {"retrieval": Retrieval(order="time")},
    "true positions": {"retrieval": Retrieval(positions="true")},
    "layers choose": {"retrieval": Retrieval(share="layer")},
    "groups of heads choose": {"retrieval": Retrieval(share="group")},
    "window of 1024": {"window": 1024},
    "window of 1024 alone": {"window": 1024},
    "a fitted router": {"router": "fit"},
}
"""Options of ``memstore.attach``, each beside the default."""
FULL, WINDOW, MEMORY = "full attention", "window", "memory"
ALONE = (WINDOW, "window of 1024 alone")
"""Ways in which nothing is retrieved."""
R_STRINGS, R_STRING = 16, 9
"""Types of R's serialisation."""


def main() -> None:
    """Measure, print a row for each text, and all of them together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--scored", type=int, default=2048, help="at the end of each text")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--novels", type=Path, help="what dpkg made of r-cran-janeaustenr, in place of the articles")
    parser.add_argument("--ways", default=f"{FULL},{WINDOW},{MEMORY}", help=f"also {', '.join(WAYS)}; or all")
    options = parser.parse_args()
    ways = [FULL, WINDOW, *WAYS] if options.ways == "all" else list(dict.fromkeys((WINDOW, *options.ways.split(","))))
    if unknown := {*ways} - {FULL, WINDOW, *WAYS}:
        parser.error(f"no way {', '.join(unknown)}: there are {FULL}, {WINDOW}, {', '.join(WAYS)}")
    torch.set_num_threads(1)
    model, tokenizer = load_model(options.model)
    fits = options.tokens <= model.config.max_position_embeddings
    losses: dict[str, list[Tensor]] = {}
    texts = articles() if options.novels is None else novels(options.novels)
    for title, tokens in long_ones(texts, tokenizer, options.tokens, options.texts):
        for way in ways:
            if way == FULL and not fits:
                continue
            nll = fully(model, tokens, options.scored) if way == FULL else attached(model, tokens, options.scored, way)
            losses.setdefault(way, []).append(nll)
        few = {name: round(float(each[-1].mean().exp()), 3) for name, each in losses.items()}
        print(json.dumps({"text": title, **few}), flush=True)
    every = {name: torch.cat(each).double() for name, each in losses.items()}
    means = {name: each.mean().item() for name, each in every.items()}
    facts: dict[str, Any] = {
        "source": SOURCE if options.novels is None else "Debian's r-cran-janeaustenr",
        "model": options.model,
        "tokens": options.tokens,
        "scored": len(every[WINDOW]),
        "perplexity": {name: round(torch.tensor(each).exp().item(), 3) for name, each in means.items()},
    }
    # Bring the gap between window and full attention to 1.
    gap = means[WINDOW] - means[FULL] if FULL in means else None
    for name, each in every.items():
        if name in (FULL, WINDOW):
            continue
        gained = every[WINDOW] - each
        mean, error = gained.mean().item(), gained.std().item() / len(gained) ** 0.5
        row = {"gains": round(mean, 4), "standard_error": round(error, 4)}
        facts[name] = row | ({} if gap is None else {"of_the_gap": round(mean / gap, 3)})
    print(json.dumps({**facts, **hardware()}))


def articles() -> Iterator[tuple[str, str]]:
    """Titles and texts of Wikipedia's articles in SQuAD."""
    for article in load_json("squad.json")["data"]:
        yield article["title"], "\n\n".join(paragraph["context"] for paragraph in article["paragraphs"])


def novels(folder: Path) -> Iterator[tuple[str, str]]:
    """First lines and texts of Jane Austen's novels, longest first, from what a package of R keeps of them."""
    data = next(folder.rglob("janeaustenr/data/Rdata.rdb")).read_bytes()
    found = list[str]()
    while data:
        part = zlib.decompressobj()
        found.append("\n".join(strings(part.decompress(data[4:]))))  # behind their length
        data = part.unused_data
    for text in sorted(found, key=len, reverse=True):
        yield text.lstrip().partition("\n")[0], text


def strings(data: bytes) -> Iterator[str]:
    """The texts of a vector of strings as R writes it (XDR)."""
    version, at = struct.unpack_from(">i", data, 2)[0], 14
    if version > 2:
        at += 4 + struct.unpack_from(">i", data, at)[0]  # the encoding
    kind, count = struct.unpack_from(">ii", data, at)
    assert kind & 255 == R_STRINGS, "each novel is a vector of lines"
    at += 8
    for _ in range(count):
        kind, length = struct.unpack_from(">ii", data, at)
        assert kind & 255 == R_STRING
        yield data[at + 8 : at + 8 + length].decode("utf-8")
        at += 8 + length


def long_ones(texts: Iterator[tuple[str, str]], tokenizer: Any, tokens: int, most: int) -> Iterator[tuple[str, Tensor]]:
    """The first ``tokens`` tokens of texts that have as many."""
    found = 0
    for title, text in texts:
        ids = encode(tokenizer, text) if found < most else []
        if len(ids) >= tokens:
            found += 1
            yield title, torch.tensor(ids[:tokens])


@torch.inference_mode()
def fully(model: Any, tokens: Tensor, scored: int) -> Tensor:
    """Losses ``[scored]`` of the last tokens, with attention to all before them."""
    logits = model(tokens[None], logits_to_keep=scored + 1, use_cache=False).logits[0, :-1]
    return F.cross_entropy(logits.float(), tokens[-scored:], reduction="none")


def attached(model: Any, tokens: Tensor, scored: int, way: str) -> Tensor:
    """The same with sink and window, and what is retrieved of all before them."""
    with memstore.attach(model, "ram:", **WAYS.get(way, {})) as reader:
        return reader.read(tokens, document="text", score=scored, retrieve=way not in ALONE).nll


if __name__ == "__main__":
    main()
