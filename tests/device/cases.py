"""What runs on the pretended device: ``TRITON_INTERPRET=1 python -m tests.device.cases [NAME ...]``.

Every case runs on the CPU first, then on the pretended device. One JSON object for each is printed: how the results
differ, and what was counted. Triton's interpreter has to be chosen before Triton is imported, hence the process.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import memstore
from memstore.index import open_index
from memstore.models.landmark import LandmarkConfig, LandmarkForCausalLM
from memstore.models.landmark.retrieval import Lists, attend_each, attend_in_place
from memstore.models.memorizing import MemorizingConfig, MemorizingForCausalLM, add_knn_memory
from memstore.readers.caches import CACHE
from memstore.readers.kinds import Retrieval
from tests.models import drt
from tests.models.stock import small_llama
from tests.pretended import Counts, on_device, pretended

Results = dict[str, Any]
Counted = dict[str, dict[str, int]]
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
LAYERS, NEW_TOKENS, SEGMENT = 3, 12, 32
TOLERANCE = 1e-4
"""Of what is computed, against its largest number (or 1)."""
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
STOCK: dict[str, Any] = {"block_size": 16, "window": 32, "sink": 16, "segment": SEGMENT}
KINDS = ("kernel", "sync", "h2d", "h2d pageable", "h2d strided", "d2h")


class Run:
    """One case on one device."""

    def __init__(
        self, device: str, counts: Counts | None, folder: Path, *, move: Callable[[Any], Any] | None = None
    ) -> None:
        self.device, self.folder = device, folder
        self._move = move or on_device
        self.results: Results = {}
        self.counted: Counted = {}
        self._counts = counts

    def model(self, model: Any) -> Any:
        """A model on the device."""
        return self._move(model) if self.device == "cuda" else model

    def ids(self, count: int, rows: int | None = None, seed: int = 0) -> Tensor:
        """Random tokens on the device, ``[count]`` or ``[rows, count]``."""
        shape = (count,) if rows is None else (rows, count)
        return torch.randint(1, 97, shape, generator=torch.Generator().manual_seed(seed)).to(self.device)

    def count(self, name: str, call: Callable[[], Any]) -> Any:
        """The result of ``call``, and what happened meanwhile under ``name``."""
        if self._counts is None:
            return call()
        self._counts.clear()
        made = call()
        self.counted[name] = {kind: self._counts[kind] for kind in KINDS}
        return made


def attach(
    retrieval: Retrieval, *, codec: str = "none", pool: bool = False, counted: bool = True
) -> Callable[[Run], None]:
    """A stock model reads, is asked, writes, and is asked by others at the same time. What is not counted is short."""

    def case(run: Run) -> None:
        model, prompt = run.model(small_llama(97, LAYERS)), run.ids(24, 1, seed=2)
        path = str(run.folder / "memory")
        options: dict[str, Any] = {**STOCK, "retrieval": retrieval}
        with memstore.attach(model, path, codec=codec, **options) as reader:
            run.results["index lies there"] = reader.memory._shared.index_device.type == run.device
            if run.device == "cuda" and reader.memory.spec.key_dtype == "bit":  # signs are not held as numbers there
                assert reader.memory._shared.new_index().dtype == torch.bool
            ids = run.ids((20 if counted else 6) * SEGMENT).cpu()
            reader.read(ids[: len(ids) // 4], document="d")
            if counted:
                run.count("read of 5 segments", lambda: reader.read(ids[: 10 * SEGMENT], document="d"))
                run.count("read of 10 segments", lambda: reader.read(ids, document="d"))
            else:
                reader.read(ids, document="d")
        given: Any = {"device_bytes": 1 << 22, "device": "cuda"} if pool and run.device == "cuda" else {}
        with memstore.open(path, **given) as memory, memstore.attach(model, memory, document="d", **options) as reader:
            with torch.no_grad():
                run.results["logits"] = model(prompt).logits
            run.results["tokens"] = write(run, model, prompt, counted=counted)
            both = torch.cat([prompt, prompt.flip(1)])
            mask = torch.ones_like(both)
            mask[1, :5] = 0
            run.results["padded"] = model.generate(both, attention_mask=mask, max_new_tokens=4, **GREEDY)
            run.results["beams"] = model.generate(prompt, max_new_tokens=4, num_beams=2, **GREEDY)
            run.results["found"] = [found.block for found in reader.search(prompt[0], 3)]
        if counted:
            write(run, model, prompt, "generate without a memory")
            with memstore.open(path) as memory, memstore.attach(model, memory, document="d", **options):
                step(run, model, prompt, DynamicCache())

    return case


def write(run: Run, writer: Any, prompt: Tensor, name: str = "generate", *, counted: bool = True) -> Any:
    """Tokens after ``prompt``; what twice as many need tells what a token needs, without the prompt."""
    if not counted:
        return writer.generate(prompt, max_new_tokens=NEW_TOKENS, **GREEDY)
    run.count(f"{name} twice", lambda: writer.generate(prompt, max_new_tokens=2 * NEW_TOKENS, **GREEDY))
    return run.count(name, lambda: writer.generate(prompt, max_new_tokens=NEW_TOKENS, **GREEDY))


def step(run: Run, model: Any, prompt: Tensor, cache: Any) -> None:
    """A token while nothing changes behind it: the one of some that waits and copies least."""
    steps: list[dict[str, int]] = []
    with torch.no_grad():
        model(prompt, **{CACHE: cache}, use_cache=True)
        for token in prompt[0, :NEW_TOKENS]:
            one = token[None, None]  # on the device already, as what was written last is
            run.count("token", partial(model, one, **{CACHE: cache}, use_cache=True))
            steps += [run.counted["token"]] if run.counted else []
    if steps:
        run.counted["token"] = min(steps, key=lambda counts: (counts["sync"], counts["h2d"]))


def reader(
    make: Callable[[], Any],
    *,
    tokens: int = 200,
    searches: bool = True,
    padded: bool = False,
    counted: bool = True,
    **options: Any,
) -> Callable[[Run], None]:
    """A model with a memory of its own reads, writes, and goes on where it was closed. What is not counted is short."""
    tokens = tokens if counted else 100

    def case(run: Run) -> None:
        model, prompt, path = run.model(make()), run.ids(21, 1, seed=2), run.folder / "memory"
        with memstore.attach(model, path, **options) as one:
            ids = run.ids(tokens).cpu()
            one.read(ids[: tokens // 2])
            run.count("read", lambda: one.read(ids))
            with torch.no_grad():
                run.results["logits"] = model(prompt, **{CACHE: one.cache()}, use_cache=True).logits
            run.results["tokens"] = write(run, one, prompt, counted=counted)
            if padded:
                both = torch.cat([prompt, prompt.flip(1)])
                mask = torch.ones_like(both)
                mask[1, :5] = 0
                run.results["padded"] = one.generate(both, attention_mask=mask, max_new_tokens=4, **GREEDY)
            if counted:
                step(run, model, prompt, one.cache())
            if searches:
                run.results["found"] = [found.block for found in one.search(prompt[0], 3)]
        with memstore.attach(model, path, **options) as one:
            run.results["again"] = one.generate(prompt, max_new_tokens=6, **GREEDY)

    return case


def places_of_the_caller(run: Run) -> None:
    """Steps whose caller says where each token stands."""
    model, ids, path = run.model(small_llama(97, LAYERS)), run.ids(12, 1, seed=2), run.folder / "memory"
    options: dict[str, Any] = {**STOCK, "retrieval": Retrieval(top_k=4, span=8, every="segment")}
    with memstore.attach(model, path, **options) as one:
        one.read(run.ids(200).cpu(), document="d")
    places = torch.arange(0, 36, 3, device=ids.device)[None]
    with memstore.attach(model, path, document="d", **options), torch.no_grad():
        given: Any = {CACHE: model(ids[:, :6], use_cache=True)[CACHE]}
        steps = [
            model(input_ids=ids[:, [i]], position_ids=places[:, [i]], use_cache=True, **given).logits
            for i in range(6, 12)
        ]
        run.results["logits"] = torch.cat(steps)


def training(make: Callable[[], Any]) -> Callable[[Run], None]:
    """The loss of one step, and all gradients."""

    def case(run: Run) -> None:
        model, ids = run.model(make()), run.ids(40, 2)
        model.train()

        def step() -> None:
            out = model(ids, labels=ids)
            out.loss.backward()
            run.results["loss"] = out.loss

        run.count("step", step)
        run.results |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    return case


def index(dtype: torch.dtype) -> Callable[[Run], None]:
    """Add, search, score, remove, save and load; of codes in the type that they are held in."""

    def case(run: Run) -> None:
        generator = torch.Generator().manual_seed(0)
        keys = torch.randn(300, 2, 1, 16, generator=generator)
        if not dtype.is_floating_point:
            keys = torch.where(keys < 0, -1.0, 1.0)
        queries = torch.randn(4, 3, 16, generator=generator).to(run.device)
        sizes: dict[str, Any] = {"key_heads": 2, "key_dim": 16, "keys_per_block": 1, "dtype": dtype}
        made = open_index("exact", **sizes, device=run.device)
        made.add(torch.arange(300), keys)
        made.remove(torch.arange(50, 90))
        found = run.count("search", lambda: made.search(queries, 5))
        scores, ids = run.count("score", lambda: made.score(queries))
        made.save(run.folder / "index")
        again = open_index("exact", **sizes, device=run.device)
        again.load(run.folder / "index")
        again.add(torch.tensor([400]), keys[:1])
        later = again.search(queries, 5, allowed=range(20, 500))
        run.results = {"found": found.ids, "best": found.scores, "scores": scores, "ids": ids, "later": later.ids}

    return case


def lists_in_place(shared: int, *, whole: bool) -> Callable[[Run], None]:
    """Tokens attend to lists of their own, by a kernel that reads states where they lie; on the CPU they are laid out.

    ``shared``: lists of a token, for its four heads of two groups. ``whole``: no list lacks a block.
    """

    def case(run: Run) -> None:
        generator = torch.Generator().manual_seed(0)
        q = torch.randn(2, 4, 5, 16, generator=generator).to(run.device)
        keys, values = (torch.randn(9, 2, size, 16, generator=generator).to(run.device) for size in (8, 7))
        at = torch.randint(0, 9, (2, shared, 5, 3), generator=generator)
        there = torch.rand(at.shape, generator=generator) < (2 if whole else 0.6)
        there[0, 0, 0] = whole
        missing = None if whole else (~there).to(run.device)
        given = Lists(at, there, missing, at.to(run.device), keys, values, 9, 2)
        if run.device == "cuda":
            out, lse = run.count("step", lambda: attend_in_place(q, given, 0.25, backend="triton"))
        else:
            out, lse = attend_each(q, given, 0.25)
        run.results = {"out": out, "lse": lse.nan_to_num(neginf=-1.0)}

    return case


def memory(run: Run) -> None:
    """A memory whose index and pool are on the device: indexes built from the store, searched, and gone on with."""
    generator = torch.Generator().manual_seed(0)
    states = {"k": torch.randn(30, 2, 4, 8, generator=generator), "v": torch.randn(30, 2, 4, 8, generator=generator)}
    landmarks = torch.randn(30, 2, 1, 8, generator=generator)
    names = dict.fromkeys(("architecture", "weights", "tokenizer", "positions", "layout"), "test")
    spec = memstore.MemorySpec(
        layers=1, fields={"k": (2, 4, 8), "v": (2, 4, 8)}, index_layers=(0,), key_heads=2, key_dim=8, keys_per_block=1,
        block_size=4, dtype="float32", fingerprint=memstore.Fingerprint(**names, dtype="float32", block_size=4),
    )  # fmt: skip
    path, queries = run.folder / "memory", torch.randn(4, 3, 8, generator=generator).to(run.device)
    given: Any = {"device": run.device, "device_bytes": 1 << 20} if run.device == "cuda" else {}

    def append(document: Any, first: int, last: int) -> None:
        with document.append(torch.zeros(4 * (last - first), dtype=torch.int32)) as batch:
            batch.put(0, landmarks=landmarks[first:last], **{name: x[first:last] for name, x in states.items()})

    with memstore.open(path, spec=spec, **given) as held:
        append(held.document("d"), 0, 20)
    with memstore.open(path, **given) as held:
        view = held.document("d").layer(0)
        found = run.count("search", lambda: view.search(queries, 5))
        run.results = {"blocks": found.blocks, "scores": found.scores, "there": found.blocks.device.type == run.device}
        append(held.document("d"), 20, 30)
        run.results["all"], _ = held.document("d").layer(0).score(queries)
        run.count("gather", lambda: view.gather(list(range(8)), device=torch.device(run.device)))
        again = run.count("gather again", lambda: view.gather([3, 1, 7], device=torch.device(run.device)))
        run.results |= again


def stock_knn() -> Any:
    """A stock model with the kNN memory of Memorizing Transformers in one layer."""
    model = small_llama(97, LAYERS)
    add_knn_memory(model, layer=1, memory_size=64, top_k=4)
    return model


def landmark(**changes: Any) -> LandmarkForCausalLM:
    """A small landmark model."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"block_size": 8, "retrieval_top_k": 2, "segment_blocks": 2}
    model = LandmarkForCausalLM(LandmarkConfig(**SIZES, **sizes, **changes))
    model.train(False)
    return model


def memorizing(**changes: Any) -> MemorizingForCausalLM:
    """A small Memorizing Transformer."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"window": 16, "memory_layer": 1, "memory_size": 64, "retrieval_top_k": 4}
    model = MemorizingForCausalLM(MemorizingConfig(**SIZES, **sizes, **changes))
    model.train(False)
    return model


CASES: dict[str, Callable[[Run], None]] = {
    "attach": attach(Retrieval(top_k=4, span=8)),
    "attach, lists of each group, from a pool": attach(Retrieval(top_k=4, share="group"), pool=True, counted=False),
    "attach, int8": attach(Retrieval(top_k=4, span=8), codec="int8", pool=True, counted=False),
    "drt": reader(drt.make),
    "landmark": reader(landmark, padded=True),
    "landmark, lists of a segment": reader(landmark, retrieval=Retrieval(top_k=2, every="segment", share="layer")),
    # Small blocks: a program of the kernel that searches, which takes minutes here otherwise, goes through their keys.
    "memorizing": reader(memorizing, tokens=100, block_size=4),
    "index": index(torch.float32),
    "index of signs": index(torch.bool),
    "index of int8": index(torch.int8),
    "memory": memory,
    "train drt": training(drt.make),
    "train landmark": training(landmark),
    "train memorizing": training(memorizing),
    "train a kNN memory": training(stock_knn),
}
MORE: dict[str, Callable[[Run], None]] = {
    "attach, positions of the caller": places_of_the_caller,
    "attach, every token": attach(Retrieval(top_k=4, span=8, every=1), counted=False),
    "attach, lists of each layer": attach(Retrieval(top_k=4, share="layer"), counted=False),
    "attach, each head alone": attach(Retrieval(top_k=4, share="none"), pool=True, counted=False),
    "attach, all blocks where they were": attach(Retrieval(top_k="all", positions="true"), counted=False),
    "attach, positions clamped": attach(Retrieval(top_k=4, span=8, positions="clamped"), counted=False),
    "drt, float16 states": reader(lambda: drt.make("tied, float16 states"), counted=False),
    "drt, chunked": reader(lambda: drt.make("chunked"), counted=False),
    "landmark, each head and token": reader(
        landmark, counted=False, retrieval=Retrieval(top_k=2, every=1, share="none", share_tokens=False)
    ),
    "landmark, all": reader(
        landmark, searches=False, counted=False, retrieval=Retrieval(top_k="all", share="layer", positions="true")
    ),
    "landmark with context misses": reader(lambda: landmark(context_miss=True), counted=False),
    "train memorizing in bfloat16": training(lambda: memorizing().bfloat16()),
    "train landmark with context misses": training(lambda: landmark(context_miss=True)),
    "train landmark in a window": training(lambda: landmark(attention="window", window=16)),
}
"""Other ways through the same code."""
LISTS: dict[str, Callable[[Run], None]] = {
    f"lists in place, {shared} for a token{more}": lists_in_place(shared, whole=not more)
    for shared in (1, 2, 4)
    for more in ("", ", some without blocks")
}
"""What landmark models do on a GPU with lists of single tokens."""


def outcome(case: Callable[[Run], None]) -> dict[str, Any]:
    """``case`` on both devices: results that differ, and what was counted."""
    with tempfile.TemporaryDirectory() as folder:
        expected = Run("cpu", None, Path(folder))
        case(expected)
    with tempfile.TemporaryDirectory() as folder, pretended() as counts:
        got = Run("cuda", counts, Path(folder))
        case(got)
        return {"different": different(expected.results, got.results), "counts": got.counted}


def different(expected: Results, got: Results) -> list[str]:
    """The names of results that differ."""
    found = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in got.items()}
    rounded = any(isinstance(x, Tensor) and x.dtype == torch.bfloat16 for x in expected.values())
    allowed = 100 * TOLERANCE if rounded else TOLERANCE  # a rounding to bfloat16 is 4e-3
    return [name for name, value in expected.items() if not _same(value, found.get(name), allowed)]


def _same(expected: Any, got: Any, allowed: float) -> bool:
    if not isinstance(expected, Tensor):
        return bool(expected == got)
    expected, got = expected.detach().float(), got.detach().float()
    return expected.shape == got.shape and bool(
        (expected - got).abs().max() <= allowed * max(1.0, expected.abs().max())
    )


def main() -> None:
    """Run the cases that were asked for, or the first ones."""
    torch.set_num_threads(1)
    for name in sys.argv[1:] or CASES:
        try:
            found = outcome({**CASES, **MORE, **LISTS}[name])
        except Exception as error:  # noqa: BLE001 - the others shall run
            import traceback

            found = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc(limit=-8)}
        sys.stdout.write(json.dumps({"case": name, **found}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
