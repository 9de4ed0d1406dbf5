"""What a model with an index of its own costs with a memory, and with its own cache: ``python benchmarks/indexed.py``.

A DeepSeek-V3.2 of 4 layers with random weights, and random states of so many tokens: the same ones in a memory (in RAM,
and on disk in LMDB, verified) and in the model's ``DynamicCache``. Each goes on by tokens, and by segments of 256 as a
text is read; logits are compared. Ratios are of one process and one thread.

And a Qwen4-Exp of three linear layers and one that chooses runs of tokens, whose own index goes through its queries one
by one: it reads a text from its beginning, with its cache and into a memory. Its index is also measured alone: the
model's module and our choice, with the same hidden states. ``--runs`` measures nothing else.

``--memory 65536`` measures nothing else than the peak of anonymous memory while a text of so many tokens is read, at a
quarter of it and at its end, of the DeepSeek-V3.2 and of the model with blocks that comes with the package.
``--memory-after 131072`` does so while 2,048 tokens are read after an eighth of so many stored ones, and after all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import memstore
from memstore.models.indexed import IndexedReader
from memstore.models.indexed.family import family_of
from memstore.models.indexed.ops import Chosen, choose
from memstore.resources import PeakMemory, hardware
from memstore.tools.models import load_model

RESULTS = Path(__file__).parent / "results" / "indexed.json"
LENGTHS = (8192, 32_768, 131_072)
BESIDE = 32_768
"""Stored tokens up to which the model itself is measured."""
SEGMENT = 256
READ = (256, 4096, 8192, 12_288, 16_128)
"""Stored tokens at which a segment of a text of 16,384 is read."""
SHIPPED = "indexed-blocks-passkey"
VOCABULARY = 512
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 128,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "index_n_heads": 16,
    "index_head_dim": 64,
    "index_topk": 256,
    "max_position_embeddings": 1 << 20,
}

RUNS: dict[str, Any] = {
    **{name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers")},
    "num_key_value_heads": 2,
    "head_dim": 64,
    "layer_types": ["linear_attention"] * 3 + ["indexed_attention"],
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "hc_lowrank": 32,
    "ple_layer_ids": [],
    "indexer_n_heads": 8,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 64,
    "indexer_budget": 256,
    "indexer_compress_ratio": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [8, 4, 4],
    },
}
RUNS_READ = 4096


def main() -> None:
    """Measure, print a line for each row, and write all of them down."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-reading", action="store_true")
    parser.add_argument("--runs", action="store_true", help="measure the Qwen4-Exp only, and write nothing")
    parser.add_argument("--memory", type=int, help="tokens of a text whose peak of memory is measured")
    parser.add_argument("--memory-after", type=int, help="stored tokens after which the same is measured")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = AutoConfig.for_model("deepseek_v32", **SIZES)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    rows: list[dict[str, Any]] = []
    if options.memory:
        for name, each in (("deepseek_v32", model), (SHIPPED, load_model(SHIPPED).model)):
            for row in peaks(each, options.memory):
                print(json.dumps({"model": name, **row}), flush=True)
        return
    if options.memory_after:
        for stored in (options.memory_after // 8, options.memory_after):
            print(json.dumps({"model": "deepseek_v32", **peak_after(model, stored)}), flush=True)
        return
    if options.runs:
        with torch.no_grad():
            for read in (index_of_runs, reading_runs):
                print(json.dumps(read()), flush=True)
        return
    with torch.no_grad():
        for length in options.lengths:
            rows.append(token(model, length, options.rounds))
            print(json.dumps(rows[-1]), flush=True)
        if not options.no_reading:
            for read in (partial(reading, model), reading_runs, index_of_runs):
                rows.append(read())
                print(json.dumps(rows[-1]), flush=True)
    options.out.write_text(json.dumps({"hardware": hardware(), "threads": 1, "rows": rows}, indent=1) + "\n")


class States:
    """Random states of so many tokens, and who goes on after them."""

    def __init__(self, model: Any, length: int) -> None:
        config = model.config
        generator = torch.Generator().manual_seed(length)
        self.model, self.length = model, length
        self.tokens = torch.randint(VOCABULARY, (length,), generator=generator)
        width = config.kv_lora_rank + config.qk_rope_head_dim
        layers = range(config.num_hidden_layers)
        self.rows = [torch.randn(length, width, generator=generator) for _ in layers]
        self.keys = [torch.randn(length, config.index_head_dim, generator=generator) for _ in layers]

    def cache(self) -> Any:
        """In the model's own cache."""
        cache: Any = DynamicCache(config=self.model.config)
        rank = self.model.config.kv_lora_rank
        for layer, rows, keys in zip(cache.layers, self.rows, self.keys, strict=True):
            layer.update(rows[None, None, :, :rank], rows[None, None, :, rank:])
            layer.update_indexer(keys[None])
        return cache

    def store(self, reader: IndexedReader) -> None:
        """In the memory of a reader."""
        size = reader.memory.spec.block_size
        for start in range(0, self.length, 4096):
            some = slice(start, start + 4096)
            with reader.memory.document("text").append(self.tokens[some]) as batch:
                for layer, (rows, keys) in enumerate(zip(self.rows, self.keys, strict=True)):
                    marks = keys[some].unflatten(0, (-1, 1, size))
                    batch.put(layer, rows=rows[some].unflatten(0, (-1, size)), landmarks=marks)


def token(model: Any, length: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of one token after ``length`` stored ones, and how far the logits are from the model's."""
    states, next_token = States(model, length), torch.tensor([[7]])
    row: dict[str, Any] = {"stored": length}
    expected = None
    if length <= BESIDE:
        cache = states.cache()
        expected = model(next_token, cache=cache, use_cache=True).logits
        row["model_ms"] = _milliseconds(partial(model, next_token, cache=cache, use_cache=True), min(rounds, 3))
        del cache
    for name, place in _places():
        with memstore.attach(model, place, document="text") as reader:
            assert isinstance(reader, IndexedReader)
            states.store(reader)
            out = model(next_token, use_cache=True)
            if expected is not None:
                row[f"{name}_difference"] = float((out.logits - expected).abs().max())
            row[f"{name}_ms"] = _milliseconds(partial(model, next_token, cache=out.cache, use_cache=True), rounds)
        if expected is not None:
            row[f"{name}_times_as_fast"] = round(row["model_ms"] / row[f"{name}_ms"], 1)
    row |= scan(states.keys[0], rounds)
    return row


def scan(keys: torch.Tensor, rounds: int) -> dict[str, Any]:
    """Bandwidth of one layer's index scan for one token, and what it is of that of copying the keys."""
    heads = SIZES["index_n_heads"]
    queries, weights = torch.randn(1, heads, keys.shape[1]), torch.randn(1, heads)
    scanned = _milliseconds(lambda: choose(queries, weights, keys, 0.125, None, SIZES["index_topk"]), rounds)
    there = torch.empty_like(keys)
    copied = _milliseconds(lambda: there.copy_(keys), rounds)
    nbytes = keys.numel() * keys.element_size()
    return {"scan_gb_per_s": round(nbytes / scanned / 1e6, 2), "scan_of_memcpy": round(copied / scanned, 3)}


def reading(model: Any) -> dict[str, Any]:
    """Tokens per second at which a text of 16,384 tokens is read in segments, by the segments at some places."""
    segment = torch.randint(VOCABULARY, (SEGMENT,))
    own, ours = [], []
    for length in READ:
        states = States(model, length)
        cache = states.cache()
        own.append(_milliseconds(partial(model, segment[None], cache=cache, use_cache=True), 1))
        del cache
        with memstore.attach(model, "ram:", document="text") as reader:
            assert isinstance(reader, IndexedReader)
            states.store(reader)
            ours.append(_milliseconds(partial(reader.append, segment), 3))
    theirs, mine = (SEGMENT * 1000 / statistics.mean(each) for each in (own, ours))
    return {
        "read": 16_384,
        "model_tokens_per_s": round(theirs, 1),
        "memory_tokens_per_s": round(mine, 1),
        "times_as_fast": round(mine / theirs, 1),
    }


def reading_runs() -> dict[str, Any]:
    """Tokens per second at which a Qwen4-Exp reads a text: all of its layers, and the one that chooses alone."""
    model = _model_of_runs()
    text = torch.randint(VOCABULARY, (RUNS_READ,))
    layer = _Clock(model.model.layers[-1].self_attn)
    row: dict[str, Any] = {"model": "qwen4_exp", "read": RUNS_READ}

    def own(size: int) -> None:
        cache = DynamicCache(config=model.config)
        for segment in text.split(size):
            model.model(input_ids=segment[None], cache=cache, use_cache=True)

    def ours() -> None:
        with memstore.attach(model, "ram:", document="text") as reader:
            reader.read(text)

    for name, work in (("call", partial(own, RUNS_READ)), ("segments", partial(own, SEGMENT)), ("memory", ours)):
        milliseconds = _milliseconds(work, 1)
        row[f"{name}_tokens_per_s"] = round(RUNS_READ * 1000 / milliseconds, 1)
        row[f"{name}_layer_tokens_per_s"] = round(RUNS_READ / layer.last(2), 1)
    return row


def index_of_runs() -> dict[str, Any]:
    """Tokens per second at which the index of a Qwen4-Exp chooses for a text, in one call: its own module, and ours."""
    model = _model_of_runs()
    given: list[Any] = []
    module = model.model.layers[-1].self_attn.indexer
    hook = module.register_forward_pre_hook(lambda _, inputs: given.extend(inputs))
    model.model(input_ids=torch.randint(VOCABULARY, (1, RUNS_READ)), use_cache=False)
    hook.remove()
    layer: Any = family_of(model).layers[-1]
    hidden, cos_sin, *_ = given
    places = torch.arange(RUNS_READ)

    def ours() -> Chosen:
        ask, keys = layer.index_states(hidden, cos_sin)
        runs = layer.pool(keys[0].unflatten(0, (-1, layer.unit)), places[:: layer.unit])
        return choose(ask[0], None, runs, layer.index_scale, (places + 1) // layer.unit, layer.top)

    seen = module(*given)[0, 0]  # by tokens, with the incomplete run
    best = ours().ids[:, :, None] * layer.unit + torch.arange(layer.unit)
    found = torch.zeros(RUNS_READ, RUNS_READ + 1, dtype=torch.bool)
    found.scatter_(1, torch.where(best < 0, RUNS_READ, best).flatten(1), True)
    tail = (places >= ((places + 1) // layer.unit * layer.unit)[:, None]) & (places <= places[:, None])
    assert torch.equal(found[:, :-1] | tail, seen)
    theirs, mine = _milliseconds(lambda: module(*given), 1), _milliseconds(ours, 3)
    return {
        "model": "qwen4_exp, its index alone",
        "read": RUNS_READ,
        "call_tokens_per_s": round(RUNS_READ * 1000 / theirs, 1),
        "memory_tokens_per_s": round(RUNS_READ * 1000 / mine, 1),
    }


def _model_of_runs() -> Any:
    config = AutoConfig.for_model("qwen4_exp_text", **RUNS)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


class _Clock:
    """The processor time that a module takes."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._spent = 0.0
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end)

    def last(self, rounds: int) -> float:
        """Seconds since this was asked before, by the round."""
        spent, self._spent = self._spent, 0.0
        return spent / rounds

    def _begin(self, *_: object) -> None:
        self._spent -= time.process_time()

    def _end(self, *_: object) -> None:
        self._spent += time.process_time()


def peaks(model: Any, tokens: int) -> Iterator[dict[str, Any]]:
    """Peak of anonymous memory while random tokens are read, at a quarter of them and at the end."""
    ids = torch.randint(96, (tokens,), generator=torch.Generator().manual_seed(tokens))
    with tempfile.TemporaryDirectory() as folder, memstore.attach(model, f"{folder}/m", document="text") as reader:
        for start, stop in ((0, tokens // 4), (tokens // 4, tokens)):
            with PeakMemory() as peak:
                reader.append(ids[start:stop])
            yield {"read": stop, "peak_anonymous_mb": round(peak.anonymous_bytes / 1e6)}


def peak_after(model: Any, stored: int, read: int = 2048) -> dict[str, Any]:
    """Peak of anonymous memory while ``read`` random tokens are read after ``stored`` ones with random states."""
    with tempfile.TemporaryDirectory() as folder, memstore.attach(model, f"{folder}/m", document="text") as reader:
        spec, step = reader.memory.spec, 1024
        blocks = step // spec.block_size
        for _ in range(stored // step):
            with reader.memory.document("text").append(torch.randint(VOCABULARY, (step,))) as batch:
                for layer in range(spec.layers):
                    marks = torch.randn(blocks, 1, spec.block_size, spec.key_dim)
                    batch.put(layer, rows=torch.randn(blocks, *spec.fields["rows"]), landmarks=marks)
        with PeakMemory() as peak:
            reader.append(torch.randint(VOCABULARY, (read,)))
    return {"stored": stored, "read": read, "peak_anonymous_mb": round(peak.anonymous_bytes / 1e6)}


def _places() -> Iterator[tuple[str, str]]:
    yield "ram", "ram:"
    with tempfile.TemporaryDirectory() as folder:
        yield "lmdb", f"{folder}/memory"


def _milliseconds(work: Callable[[], object], rounds: int) -> float:
    """Of processor time, the median of ``rounds``, after one that is not counted: others may use the machine too."""
    spent = []
    for _ in range(rounds + 1):
        begun = time.process_time()
        work()
        spent.append(1000 * (time.process_time() - begun))
    return round(statistics.median(spent[1:]), 2)


if __name__ == "__main__":
    main()
