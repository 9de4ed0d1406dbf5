"""``memstore ask``: a model answers from a memory, and shows the blocks that it used."""

from __future__ import annotations

import time
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

import memstore
from memstore.errors import InvalidArgument, NotFound
from memstore.tools import ask_models
from memstore.tools.models import Loaded, encode, load_recorded
from memstore.tools.options import TOP_K, Device, Index, MemoryUrl, Threads, TopK, use_threads
from memstore.tools.output import Page, Report, cell, index_bar
from memstore.tools.trust import chosen_name

if TYPE_CHECKING:
    from memstore.memory import Memory, Recorder
    from memstore.readers.stock.attached import Attached

Question = Annotated[
    str, typer.Argument(metavar="QUESTION", help="What the model reads after the document.", show_default=False)
]
DocumentName = Annotated[str | None, typer.Option(help="Name of the document. Not needed if there is only one.")]
Dtype = Annotated[str | None, typer.Option(help="Precision of the model. Without it: the one that read.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Length of the answer at most, in tokens.")]
Trace = Annotated[bool, typer.Option("--trace", help="Record what is retrieved for each token: see memstore trace.")]
Model = Annotated[str | None, typer.Option(help="The model that answers. Without it: the one that read.")]


def ask(
    memory: MemoryUrl,
    question: Question,
    *,
    document: DocumentName = None,
    top_k: TopK = None,
    max_tokens: MaxTokens = 40,
    model: Model = None,
    dtype: Dtype = None,
    threads: Threads = None,
    device: Device = "cpu",
    index: Index = "exact",
    trace: Trace = False,
) -> Report:
    """Let the model that read a memory go on from your question.

    The answer comes first, then the blocks that were retrieved for it. With --trace it is also recorded, beside the
    memory, which of them each token was written with.

    Example:

        memstore ask notes.mem "The name of the white whale is" --document moby-dick

    In Python: memstore.attach, and generate of the model inside.
    """
    if not question.strip():
        raise InvalidArgument("the question is empty. Give the words that the answer should follow.")
    use_threads(threads)
    with memstore.open(memory, mode="r", index=index) as opened, index_bar():
        name = document_name(opened, document)
        chosen = chosen_name(opened, model)
        if ask_models.is_own(chosen):
            own = ask_models.ask(
                opened,
                chosen,
                question,
                document=name,
                top_k=top_k,
                max_tokens=max_tokens,
                dtype=dtype,
                device=device,
                trace=trace,
            )
            return Report(data=own, text=lambda page: ask_models.show(page, own, memory))
        loaded = load_recorded(opened, chosen, dtype, device=device)
        attach = memstore.attach(
            loaded.model,
            opened,
            document=name,
            tokenizer=loaded.tokenizer,
            retrieval=memstore.Retrieval(top_k=top_k or TOP_K),
            block_size=opened.spec.block_size,
        )
        with attach as attached:
            data = {"document": name, "question": question, **_answer(attached, loaded, question, max_tokens, trace)}
            data["blocks"] = used_blocks(attached, opened, loaded)
    return Report(data=data, text=lambda page: _show(page, data, memory))


def document_name(memory: Memory, wanted: str | None) -> str:
    """``wanted`` if the memory has it, or its only document."""
    names = [document.name for document in memory.documents()]
    if not names:
        raise NotFound("the memory holds no documents yet. Add one with: memstore read TEXT MEMORY")
    if wanted is None and len(names) > 1:
        shown = ", ".join(cell(quote(name)) for name in names[:10]) + (", ..." if len(names) > 10 else "")
        raise InvalidArgument(f"the memory holds several documents; choose one with --document: {shown}")
    return memory.document(wanted).name if wanted is not None else names[0]


def _answer(attached: Attached, loaded: Loaded, question: str, max_tokens: int, trace: bool) -> dict[str, Any]:
    """See ``answer``; with ``trace`` also the number of the trace."""
    if not trace:
        return answer(loaded, question, max_tokens)
    with attached.record(question=question) as recorder:
        return {**answer(loaded, question, max_tokens, recorder), "trace": recorder.number}


def answer(loaded: Loaded, question: str, max_tokens: int, recorder: Recorder | None = None) -> dict[str, Any]:
    """Continue from ``question``, always with the likeliest token. The memory is attached to the model."""
    import torch

    ids = torch.tensor([encode(loaded.tokenizer, question)], device=loaded.model.device)
    start = time.perf_counter()
    with torch.inference_mode():
        generated = loaded.model.generate(ids, max_new_tokens=max_tokens, do_sample=False)  # type: ignore[operator]
    new = generated[0, ids.shape[1] :]
    if recorder is not None:
        recorder.close(new.tolist())
    return {
        "answer": loaded.tokenizer.decode(new, skip_special_tokens=True),
        "tokens": len(new),
        "seconds": round(time.perf_counter() - start, 3),
    }


def used_blocks(attached: Attached, memory: Memory, loaded: Loaded) -> list[dict[str, Any]]:
    """The blocks retrieved so far, each once with its best score, best first."""
    best: dict[tuple[str, int], float] = {}
    for step in attached.trace:
        for block, score in zip(step.blocks, step.scores, strict=True):
            key = (step.document, block)
            best[key] = max(score, best.get(key, score))
    return [
        {
            "document": name,
            "block": block,
            "score": score,
            "text": loaded.tokenizer.decode(memory.document(name).tokens(block)),
        }
        for (name, block), score in sorted(best.items(), key=lambda item: -item[1])
    ]


def _show(page: Page, data: dict[str, Any], memory: str) -> None:
    page.line(data["answer"].strip())
    for used in data["blocks"]:
        page.line()
        page.line(f"[{used['document']} block {used['block']:,}, score {used['score']:.3g}]")
        page.line(used["text"])
    if "trace" in data:
        page.line()
        page.line(f"which block each token was written with: memstore trace {quote(memory)} {data['trace']}")
