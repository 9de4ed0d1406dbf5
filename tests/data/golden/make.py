# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202
"""The memories of this folder, and what they answer. Made once, by the code of commit 31228ae, before names moved.

``python tests/data/golden/make.py FOLDER`` in a tree of that commit. It stays here to say how they were made; it is
not meant to run with later code. ``tests/memory/test_golden.py`` asks them.

Each memory is ``NAME.tar.xz`` with ``memory/`` (as it lies on the disk), ``expected.json`` and
``expected.safetensors``.
Those named ``format2`` are ``memstore.copy`` of the others by commit 1faa8b0, the last that wrote format 2.
Each model is ``model-KIND.tar.xz``, as ``save_pretrained`` writes it: weights are kept, as seeds may come to mean
others.
"""

from __future__ import annotations

import copy
import hashlib
import json
import sys
import tarfile
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import memstore
from memstore import Retrieval
from memstore.models.drt import DRTConfig, DRTForCausalLM
from memstore.models.drt import Reader as DRTReader
from memstore.models.landmark import LandmarkConfig, LandmarkForCausalLM
from memstore.models.landmark import Reader as LandmarkReader
from memstore.models.memorizing import MemorizingConfig, MemorizingForCausalLM
from memstore.models.memorizing import Reader as MemorizingReader

COMMIT = "31228ae"
WIDEST = 48
"""Terms of the longest sums in products with weights."""
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": WIDEST,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,  # so large that what is retrieved shows in the logits
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
OWN = {"num_hidden_layers": 3, "block_size": 8, "window": 11}
STOCK = {"window": 32, "sink": 16, "segment": 32, "block_size": 16}
SHARE = {"llama-group": "group", "llama-model": "model", "llama-int8": "group", "llama-history": "group"}
MODEL = {"drt": "drt", "landmark": "landmark", "memorizing": "memorizing"} | dict.fromkeys(SHARE, "llama")


def models():
    """One of each kind."""
    torch.manual_seed(0)
    made = {
        "drt": DRTForCausalLM(
            DRTConfig(**SIZES, block_size=8, window=11, retrieval_top_k=3, upper_layers=(1, 2), state_dtype="float16")
        ),
        "landmark": LandmarkForCausalLM(LandmarkConfig(**SIZES, **OWN, retrieval_top_k=3)),
        "memorizing": MemorizingForCausalLM(
            MemorizingConfig(**SIZES, num_hidden_layers=3, window=8, memory_layer=1, memory_size=400, retrieval_top_k=3)
        ),
        "llama": LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=3, max_position_embeddings=4096)),
    }
    with torch.no_grad():
        for model in made.values():
            for weight in model.parameters():
                weight.copy_(weight.bfloat16())  # compresses to half
    return {kind: model.eval() for kind, model in made.items()}


def tokens(count, seed):
    """Random ids ``[count]``; 0, which stands for padding, is none of them."""
    return torch.randint(1, 97, (count,), generator=torch.Generator().manual_seed(seed))


def reader(name, model, where, document):
    """What reads and answers."""
    match name:
        case "drt":
            return DRTReader(model, where, document)
        case "landmark":
            return LandmarkReader(model, where, document)
        case "memorizing":
            return MemorizingReader(model, where, document, block_size=16)
    codec = "int8" if name == "llama-int8" else "none"
    retrieval = Retrieval(top_k=3, share=SHARE[name])
    return memstore.attach(model, where, document=document, retrieval=retrieval, codec=codec, **STOCK)


def make(name, model, url):
    """Read what a memory holds."""
    with reader(name, model, url, "book") as reading:
        reading.read(tokens(203, 1))
    if name != "llama-history":
        with reader(name, model, url, "letter") as reading:
            reading.read(tokens(75, 2))
        return
    for document, text in (("short", tokens(120, 2)), ("gone", tokens(40, 3))):
        with reader(name, model, url, document) as reading:
            reading.read(text)
    with memstore.open(url) as memory:
        memory.document("book").fork("branch", 4)
    with reader(name, model, url, "branch") as reading:
        reading.read(torch.cat([tokens(203, 1)[:64], tokens(90, 4)]))
    with memstore.open(url) as memory:
        memory.document("short").truncate(3)
        memory.forget("gone")
        memory.document("book").pin()
        memory.document("branch").expire(3e9)
        memory.limit(50_000_000, when_full="evict-oldest-document")


@torch.no_grad()
def answer(name, model, url, document, moved=None):
    """Logits, generated tokens and found blocks; ``moved``: a seed, for weights that are a little other ones."""
    question, model = tokens(9, 5), copy.deepcopy(model)
    with memstore.open(url, mode="r") as memory, reader(name, model, memory, document) as reading:
        if moved is not None:
            move(model, moved)
        if MODEL[name] == "llama":
            logits = model(question[None]).logits[0]
            new = model.generate(question[None], max_new_tokens=8, do_sample=False)[0, 9:]
        else:
            logits = model(question[None], past_key_values=reading.cache()).logits[0]
            new = reading.generate(question[None], max_new_tokens=8, do_sample=False)[0, 9:]
        found = reading.search(question, 4)
    return {"logits": logits, "generated": new}, [(match.block, match.score) for match in found]


def move(model, seed):
    """Move weights as far as the rounding errors of a product move its result, up or down."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        sign = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
        weight.mul_(1 + sign * torch.finfo(torch.float32).eps * WIDEST**0.5)


def digest(x):
    """Of all bytes of a tensor."""
    return hashlib.sha256(x.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def search(document, layer):
    """Queries, and the blocks that they find, whose scores are so far apart that no rounding changes their order."""
    spec, generator = document.memory.spec, torch.Generator().manual_seed(layer)
    for attempt in range(1000):
        # Equal tokens have equal keys in the first layer of a stock model: there the best is told apart alone.
        top_k = max(1, min(4, len(document.complete_blocks)) - attempt // 250)
        queries = torch.randn(spec.key_heads, 3 if attempt < 750 else 1, spec.key_dim, generator=generator)
        every = document.layer(layer).search(queries, len(document.complete_blocks)).scores
        every = every.sort(-1, descending=True).values[..., : top_k + 1]
        if float((every[..., :-1] - every[..., 1:]).min()) > 1e-3 * float(every.abs().max()):
            return queries, document.layer(layer).search(queries, top_k).blocks
    raise RuntimeError("no queries tell these landmarks apart")


def expected(name, model, url):
    """What the memory holds and answers: JSON, and tensors."""
    tensors, documents = {"question": tokens(9, 5)}, {}
    with memstore.open(url, mode="r") as memory:
        rules = {"max_bytes": memory.rules().max_bytes, "when_full": memory.rules().when_full}
        for document in memory.documents():
            facts = {
                "tokens": len(document),
                "blocks": [document.blocks.start, document.blocks.stop],
                "complete": [document.complete_blocks.start, document.complete_blocks.stop],
                "pinned": document.pinned,
                "expires": document.expires.isoformat() if document.expires else None,
                "digest": document.digest,
                "reading": document.reading,
                "states": {},
                "landmarks": {},
            }
            tensors[f"{document.name}.tokens"] = document.tokens()
            for layer in range(memory.spec.layers):
                states = document.layer(layer).gather(list(document.blocks))
                facts["states"][str(layer)] = {field: digest(states[field]) for field in sorted(states)}
            for layer in memory.spec.index_layers:
                landmarks = document.layer(layer).landmarks(document.complete_blocks)
                facts["landmarks"][str(layer)] = [str(landmarks.dtype), list(landmarks.shape), digest(landmarks)]
                if memory.spec.key_dtype == "bit":
                    continue  # asked through the model alone
                for part, tensor in zip(("queries", "found"), search(document, layer), strict=True):
                    tensors[f"{document.name}.{layer}.{part}"] = tensor
            documents[document.name] = facts
        assert memory.verify() == []
    for document, facts in documents.items():
        answers, found = answer(name, model, url, document)
        facts["found_by_the_model"] = [block for block, _ in found]
        moved = [answer(name, model, url, document, seed)[0] for seed in range(5)]
        far = max(float((each["logits"] - answers["logits"]).abs().max()) for each in moved)
        assert all(torch.equal(each["generated"], answers["generated"]) for each in moved)
        facts["tolerance"] = 4 * far
        tensors |= {f"{document}.{key}": value for key, value in answers.items()}
    return {"commit": COMMIT, "kind": MODEL[name], "rules": rules, "documents": documents}, tensors


def pack(folder, archive):
    """``folder`` as a small archive, the same whoever packs it."""

    def plain(entry):
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = ""
        return entry

    with tarfile.open(archive, "w:xz", preset=9) as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, arcname=path.name, filter=plain)


def main(out):
    """Make everything in the folder ``out``."""
    torch.set_num_threads(1)
    for kind, model in models().items():
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            pack(Path(folder), out / f"model-{kind}.tar.xz")
    for name, kind in MODEL.items():
        for store in ("lmdb", "zarr"):
            with tempfile.TemporaryDirectory() as temporary:
                folder, model = Path(temporary), models()[kind]
                url = f"{'zarr:' if store == 'zarr' else ''}{folder / 'memory'}"
                make(name, model, url)
                facts, tensors = expected(name, model, url)
                (folder / "expected.json").write_text(json.dumps(facts, indent=1))
                save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "expected.safetensors")
                pack(folder, out / f"{name}-{store}.tar.xz")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
