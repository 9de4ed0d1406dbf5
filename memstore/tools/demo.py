"""``memstore demo``: a model reads into a memory on disk; a new process opens it and finds the hidden passkeys.

The DRT was trained in minutes on a CPU: ``memstore train drt --recipe passkey-cpu``.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

import memstore
from memstore.errors import InvalidArgument
from memstore.readers.kinds import PASSKEY, load_folder, quiet_transformers, shipped_model
from memstore.report import Page, Report
from memstore.tools.models import (
    DRT,
    LoadedModel,
    kind_named,
    load_model,
    load_recorded,
    record_model,
    remember,
    resolve_model,
)
from memstore.tools.verb import Dtype, Json, Threads, use_threads

if TYPE_CHECKING:
    from memstore.eval.filler import Filler
    from memstore.eval.needles import Haystack, Needle
    from memstore.eval.tasks import Sample

TOKENS, VOLUMES = 1_000_000, 5
"""Tokens that the DRT reads."""
STOCK_TOKENS = 32_768
"""Tokens of each of the two texts of the stock model."""
SCORED = 2_048
"""Tokens at the end of the prose whose perplexity is measured."""
ANSWER_TOKENS = 12
TOP_K = 8
FILLER, PROSE = "filler", "prose"
_AROUND = 70
"""Characters shown on each side of a passkey."""
_MEBI = 1 / 2**20

Keep = Annotated[Path | None, typer.Option(help="Keep the memory in this folder. Default: a temporary folder.")]


def demo(
    *,
    model: Annotated[
        str,
        typer.Option(
            help="Run this model: drt (the small DRT in this package) or smollm2 (a stock model from the package "
            "index). Or name a Hugging Face directory or hub id."
        ),
    ] = DRT,
    dtype: Dtype = "auto",
    threads: Threads = None,
    seed: Annotated[int, typer.Option(help="Seed of the passkeys and of the places of the needles.")] = 0,
    keep: Keep = None,
    json: Json = False,
) -> Report:
    """See it work: read a million tokens, reopen, answer.

    A DRT of 0.2 million parameters reads five volumes of 200,000 tokens into a memory on disk. A new process opens it
    and finds the passkey that is hidden in each. It takes half a minute on two cores. With --keep you can look at the
    reasons afterwards: the retrieved blocks of each answer are recorded, for memstore trace and memstore view.

    With --model smollm2, an unchanged stock model reads four times its training length and answers from the memory in a
    new process. That takes about five minutes. The first run fetches 93 MB.

    Example:

        memstore demo

    In Python: memstore.attach.
    """
    use_threads(threads)
    source = str(shipped_model(PASSKEY)) if model == DRT else model
    from memstore.eval.evaluation import evaluation_of

    run = run_stock if evaluation_of(kind_named(source)).ask is None else run_drt
    data = run(source, json=json, dtype=dtype, threads=threads, seed=seed, keep=keep)
    return Report(data=data, text=lambda _: None)


@contextmanager
def _new_folder(keep: Path | None) -> Iterator[Path]:
    """Give the folder of the memory: ``keep``, which is removed again on failure, or else a temporary folder."""
    if keep is not None and keep.exists():
        raise InvalidArgument(f"{keep} exists already. Name a new folder with --keep")
    with tempfile.TemporaryDirectory(prefix="memstore-demo-") as scratch:
        folder = Path(scratch) / "demo.mem" if keep is None else keep
        try:
            yield folder
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)  # so that you can run the same command again
            raise


def _in_new_process(ask: Callable[..., dict[str, Any]], *given: object, say: bool) -> dict[str, Any]:
    """Return the result of ``ask(*given)`` in a new process."""
    if say:
        print("\nThe memory is closed. A new process opens it and asks for the hidden facts.\n", flush=True)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        answer = pool.submit(ask, *given).result()
    return answer | {"reopened_in_new_process": answer["pid"] != os.getpid()}


def what_to_type(keep: Path | None, command: str = "memstore demo") -> list[str]:
    """Return the last lines after ``command``: the commands that show the reasons of each answer."""
    if keep is None:
        return [f"To keep the memory and see why the model found its passkeys: {command} --keep demo.mem"]
    memory = quote(str(keep))
    return [
        "See why it found them:",
        f"  memstore trace {memory}  the blocks that each token of the last answer used",
        f"  memstore view {memory}   the memory and all answers, in a browser",
    ]


# A DRT


def run_drt(
    model: str | Path,
    *,
    json: bool = False,
    dtype: str = "auto",
    threads: int | None = None,
    seed: int = 0,
    keep: Path | None = None,
    tokens: int = TOKENS,
) -> dict[str, Any]:
    """Run the demo of a DRT and return its figures. Without ``json`` it also prints its progress."""
    if dtype not in ("auto", "float32"):
        raise InvalidArgument(f"a DRT computes in float32 only; --dtype {dtype} is for stock models (--model smollm2)")
    from memstore.resources import disk_bytes

    weights = Path(resolve_model(str(model)))
    with _new_folder(keep) as folder:
        figures, samples = _read_volumes(weights, folder, seed, tokens, say=not json)
        asked = _in_new_process(_ask_volumes, weights, folder, samples, threads, say=not json)
        result = figures | asked | {"disk_bytes": disk_bytes(folder), "seed": seed}
    if not json:
        _show_volumes(result)
        print("", *what_to_type(keep), sep="\n")
    return result


def _read_volumes(
    weights: Path, folder: Path, seed: int, tokens: int, *, say: bool
) -> tuple[dict[str, Any], dict[str, Sample]]:
    """Write the memory; return the figures and the passkey hidden in each volume."""
    from memstore.eval.filler import load_filler
    from memstore.eval.run import memory_spec
    from memstore.memory import open_memory
    from memstore.resources import PeakMemory

    with quiet_transformers():
        model, tokenizer = load_folder(weights)
    filler = load_filler(tokenizer, at_most=tokens)
    samples = _passkeys(model, tokenizer, filler, seed, tokens)
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


def _passkeys(model: Any, tokenizer: Any, filler: Filler, seed: int, tokens: int) -> dict[str, Sample]:
    """Return a passkey at a random place of each volume. The volumes follow one another in the filler."""
    from memstore.eval.run import block_tokens
    from memstore.eval.tasks import Phrases, passkey, plant

    rng, length = random.Random(seed), tokens // VOLUMES
    size = block_tokens(model)
    riddles = [passkey(Phrases(tokenizer), rng) for _ in range(VOLUMES)]
    return {
        f"volume-{number + 1}": plant(riddle, length, filler, size, rng, start=number * length)
        for number, riddle in enumerate(riddles)
    }


def _ask_volumes(weights: Path, folder: Path, samples: dict[str, Sample], threads: int | None) -> dict[str, Any]:
    """Open the memory and ask each volume: the work of the second process."""
    use_threads(threads)
    begun = time.perf_counter()
    with quiet_transformers():
        model, tokenizer = load_folder(weights)
    with memstore.open(folder, mode="r") as memory:
        answers = [_ask_volume(model, tokenizer, memory, name, sample) for name, sample in samples.items()]
    return {
        "answers": answers,
        "passkeys_asked": len(answers),
        "passkeys_found": sum(answer["found"] for answer in answers),
        "ask_seconds": round(time.perf_counter() - begun, 2),
        "pid": os.getpid(),
    }


def _ask_volume(model: Any, tokenizer: Any, memory: Any, name: str, sample: Sample) -> dict[str, Any]:
    from memstore.eval.evaluation import needle_blocks
    from memstore.eval.run import ask, block_tokens, past_of

    # The question without the filler that aligns it with a block.
    question = "|" + str(tokenizer.decode(sample.prompt)).rpartition("|")[2]
    with memstore.attach(model, memory, document=name, tokenizer=tokenizer) as reader:
        with reader.record(sample.prompt, question=question) as recorder:
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


def _show_volumes(result: dict[str, Any]) -> None:
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
    page.facts(
        {
            "passkeys found": f"{result['passkeys_found']} of {result['passkeys_asked']}",
            "tokens read": f"{result['tokens_read']:,}, in {VOLUMES} volumes of {result['filler']}",
            "reading": f"{result['read_tokens_per_s']:,} tokens/s ({result['read_seconds']:.1f} s), committed to disk",
            "asking, including the start of a process": f"{result['ask_seconds']:.1f} s",
            "parameters of the model": f"{result['parameters']:,}",
            "peak memory while reading, anonymous": f"{result['peak_anonymous_bytes'] * _MEBI:,.0f} MiB",
            "on disk": f"{result['disk_bytes'] * _MEBI:,.0f} MiB",
        }
    )


# A stock model


def run_stock(
    model: str = "smollm2",
    *,
    json: bool = False,
    dtype: str = "auto",
    threads: int | None = None,
    seed: int = 0,
    keep: Path | None = None,
    tokens: int = STOCK_TOKENS,
    scored: int = SCORED,
) -> dict[str, Any]:
    """Run the demo of a stock model and return its figures. Without ``json`` it also prints its progress."""
    from memstore.resources import PeakMemory, disk_bytes

    with _new_folder(keep) as folder:
        with PeakMemory() as peak:
            loaded = load_model(model, dtype)
            texts = _texts(loaded, seed, tokens)
            figures = _read_texts(loaded, texts, folder, model, scored=scored, say=not json)
        del loaded
        questions = [(name, needle) for name, hay in texts.items() for needle in hay.needles]
        asked = _in_new_process(_ask_texts, folder, questions, threads, say=not json)
        peaks = {name: max(getattr(peak, name), asked[f"peak_{name}"]) for name in ("anonymous_bytes", "rss_bytes")}
        result = figures | asked | {f"peak_{name}": value for name, value in peaks.items()}
        result |= {"disk_bytes": disk_bytes(folder), "seed": seed}
    if not json:
        _show_texts(result)
        print("", *what_to_type(keep, f"memstore demo --model {quote(model)}"), sep="\n")
    return result


def _texts(loaded: LoadedModel, seed: int, tokens: int) -> dict[str, Haystack]:
    """Return the filler with five pass keys, and the prose with five needles of other kinds."""
    from memstore.eval import needles

    rng, tokenizer = random.Random(seed), loaded.tokenizer
    keys = needles.passkeys(5, rng)
    facts = needles.prose_needles(needles.KINDS, rng)
    return {
        FILLER: needles.hide(needles.filler_text(8 * tokens), keys, tokenizer, tokens, rng),
        PROSE: needles.hide(needles.prose_text(), facts, tokenizer, tokens, rng),
    }


def _read_texts(
    loaded: LoadedModel, texts: dict[str, Haystack], folder: Path, name: str, *, scored: int, say: bool
) -> dict[str, Any]:
    results = {}
    with _attached(loaded, folder) as attached:
        record_model(attached.memories[0], name, loaded)
        for text, hay in texts.items():
            score = scored if text == PROSE else 0
            results[text] = attached.read(hay.tokens, text, progress=say, score=score, reuse=False)
    read = sum(result.new_tokens for result in results.values())
    # With sink and window alone; the rest of the text is not even read.
    with memstore.attach(loaded.model, "ram:", tokenizer=loaded.tokenizer) as attached:
        near = texts[PROSE].tokens[-(scored + 1024) :]
        window = attached.read(near, "near", score=scored, retrieve=False).perplexity
    return {
        "tokens_read": read,
        "read_tokens_per_s": round(read / sum(result.seconds for result in results.values()), 1),
        "ppl_window": round(window, 3),
        "ppl_memory": round(results[PROSE].perplexity, 3),
    }


def _attached(loaded: LoadedModel, memory: memstore.Memory | Path, document: str | None = None) -> Any:
    retrieval = memstore.Retrieval(top_k=TOP_K)
    return memstore.attach(loaded.model, memory, document=document, tokenizer=loaded.tokenizer, retrieval=retrieval)


def _ask_texts(folder: Path, questions: list[tuple[str, Needle]], threads: int | None) -> dict[str, Any]:
    """Open the memory and ask all questions: the work of the second process."""
    from memstore.resources import PeakMemory

    use_threads(threads)
    with PeakMemory() as peak, memstore.open(folder, mode="r") as memory:
        loaded = load_recorded(memory, None, None, device="cpu")
        answers = [_ask_text(loaded, memory, *question) for question in questions]
    keys, facts = ([each["found"] for each in answers if each["document"] == text] for text in (FILLER, PROSE))
    return {
        "answers": answers,
        "passkeys_asked": len(keys),
        "needles_asked": len(facts),
        "passkeys_found": sum(keys),
        "needles_found": sum(facts),
        "peak_anonymous_bytes": peak.anonymous_bytes,
        "peak_rss_bytes": peak.rss_bytes,
        "pid": os.getpid(),
    }


def _ask_text(loaded: LoadedModel, memory: memstore.Memory, document: str, needle: Needle) -> dict[str, Any]:
    with _attached(loaded, memory, document) as attached:
        told = attached.ask(needle.prompt, raw=True, max_tokens=ANSWER_TOKENS, trace=True)
        blocks = told.sources()
    return {
        "document": document,
        "kind": needle.kind,
        "prompt": needle.prompt.strip(),
        "expected": needle.answer,
        "answer": told.text.strip(),
        "found": needle.found_in(told.text),
        "blocks": [{"block": each.block, "text": each.text} for each in blocks],
        "trace": told.trace,
    }


def _show_texts(result: dict[str, Any]) -> None:
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
    page.facts(
        {
            "pass keys found in filler": f"{result['passkeys_found']} of {result['passkeys_asked']}",
            "needles found in prose": f"{result['needles_found']} of {result['needles_asked']}",
            "tokens read": result["tokens_read"],
            "reading": f"{result['read_tokens_per_s']:,.0f} tokens/s",
            f"perplexity of the last {SCORED:,} tokens of prose, window only": f"{result['ppl_window']:.2f}",
            f"perplexity of the last {SCORED:,} tokens of prose, with memory": f"{result['ppl_memory']:.2f}",
            "peak memory, anonymous": f"{result['peak_anonymous_bytes'] * _MEBI:,.0f} MiB",
            "peak memory, with mapped pages": f"{result['peak_rss_bytes'] * _MEBI:,.0f} MiB",
            "on disk": f"{result['disk_bytes'] * _MEBI:,.0f} MiB",
        }
    )
