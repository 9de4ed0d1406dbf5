"""Reading and writing with a memory beside the bare model, with random weights of the shapes of real models."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import memstore
from benchmarks.on_gpu.child import Piece

SHAPES: dict[str, dict[str, Any]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
    "135m": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
             "num_key_value_heads": 3, "vocab_size": 49152},
    "tiny": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 97},
}  # fmt: skip


def speed(here: Piece) -> None:
    """One shape: the bare model, attaching, reading, writing, and where the time goes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = "tiny" if here.tiny else here.piece.split()[0]
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=16384)
    if here.tiny:
        from tests.pretended import on_device

        model: Any = on_device(LlamaForCausalLM(config).eval())
    else:
        with torch.device("cuda"):
            model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    gen = torch.Generator().manual_seed(0)
    ids = torch.randint(1, config.vocab_size, (here.size(4096, 96),), generator=gen)
    bare = _bare(here, model, ids)
    for pool in (0, 8 << 30)[: 1 if here.tiny or shape != "8b" else 2]:
        for segment in (here.size(256, 32), here.size(1024, 64)):
            title = f"{here.piece}, segments of {segment}, device pool of {pool >> 30} GB"
            with here.attempt(title, least=here.size(12, 0)):
                _with_memory(here, title, model, ids, segment, pool, bare)


def _bare(here: Piece, model: Any, ids: torch.Tensor) -> dict[str, float]:
    """Tokens per second of the model alone, by the length of a segment, and of writing."""
    found: dict[str, float] = {}
    there = ids.to("cuda")[None]
    for length in (here.size(256, 32), here.size(1024, 64), here.size(4096, 96)):
        with here.attempt(f"{here.piece} bare, {length} tokens"), torch.no_grad():
            (ms,) = here.times([lambda n=length: model(there[:, :n], logits_to_keep=1)], warmups=2, repeats=5)  # type: ignore[misc]
            found[str(length)] = 1000 * length / ms
            here.row(f"{here.piece} bare, {length} tokens", ms=ms, value=found[str(length)], unit="tokens/s")
    with here.attempt(f"{here.piece} bare, writing"):
        found["writing"] = _writing(here, model, there[:, :16])
        here.row(f"{here.piece} bare, writing", value=found["writing"], unit="tokens/s")
    return found


def _writing(here: Piece, model: Any, prompt: torch.Tensor) -> float:
    """Tokens per second of 64, the first left out."""
    count, options = here.size(64, 3), {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    model.generate(prompt, max_new_tokens=2, **options)
    spent = []
    for tokens in (1, count + 1):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        model.generate(prompt, max_new_tokens=tokens, **options)
        torch.cuda.synchronize()
        spent.append(time.perf_counter() - begun)
    return float(count / max(1e-9, spent[1] - spent[0]))


def _with_memory(
    here: Piece, title: str, model: Any, ids: torch.Tensor, segment: int, pool: int, bare: dict[str, float]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "memory")
        options: dict[str, Any] = {"segment": segment, "block_size": here.size(64, 16), "window": here.size(512, 32)}
        begun = time.perf_counter()
        with memstore.attach(model, path, **options) as reader:
            here.row(f"{title}: attaching", value=time.perf_counter() - begun, unit="s")
            half = len(ids) // 2
            reader.read(ids[:half], document="d")  # warms up
            begun = time.perf_counter()
            reader.read(ids, document="d")
            rate = (len(ids) - half) / (time.perf_counter() - begun)
            known = bare.get(str(segment), 0.0)
            here.row(f"{title}: reading", value=rate, unit="tokens/s", ratio=rate / known if known else None)
            if not here.tiny and here.left > 10:
                with here.attempt(f"{title}: where reading spends its time"):
                    _profiled(here, f"{title}: reading a segment", lambda: reader.append(ids[:segment], document="d"))
        given: dict[str, Any] = {"device_bytes": pool, "device": "cuda"} if pool else {}
        prompt = ids[:16].to("cuda")[None]
        with memstore.open(path, **given) as memory, memstore.attach(model, memory, document="d", **options):
            rate = _writing(here, model, prompt)
            known = bare.get("writing", 0.0)
            here.row(f"{title}: writing", value=rate, unit="tokens/s", ratio=rate / known if known else None)
            if not here.tiny and here.left > 10:
                with here.attempt(f"{title}: where writing spends its time"):
                    written = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
                    _profiled(here, f"{title}: writing 8 tokens", lambda: model.generate(prompt, **written))


def _profiled(here: Piece, title: str, call: Any) -> None:
    """Kernels, bytes copied, how long the device did nothing, and what took the host longest."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        begun = time.perf_counter()
        call()
        torch.cuda.synchronize()
        wall = 1e6 * (time.perf_counter() - begun)
    events = found.events() or []
    there = [event for event in events if str(event.device_type).endswith("CUDA")]
    copies = [event for event in there if "memcpy" in event.name.lower()]
    busy = sum(event.time_range.elapsed_us() for event in there)
    longest = sorted(found.key_averages(), key=lambda event: -event.self_cpu_time_total)[:6]
    here.row(
        title, ms=wall / 1000, kernels=len(there) - len(copies), copies=len(copies),
        copy_us=sum(event.time_range.elapsed_us() for event in copies), value=max(0.0, 1 - busy / wall),
        unit="of the time the device is idle",
        note="; ".join(f"{event.key} {event.self_cpu_time_total / 1000:.1f} ms" for event in longest),
    )  # fmt: skip
