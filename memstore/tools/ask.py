"""``memstore ask``: a model answers from a memory, and shows the blocks that it used."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

import memstore
from memstore.errors import InvalidArgument, NotFound
from memstore.tools.models import Loaded, encode, load_model
from memstore.tools.options import Device, Index, MemoryUrl, Threads, TopK, use_threads
from memstore.tools.output import Page, Report

if TYPE_CHECKING:
    from memstore.attach.attached import Attached
    from memstore.memory import Memory

Question = Annotated[
    str, typer.Argument(metavar="QUESTION", help="What the model reads after the document.", show_default=False)
]
DocumentName = Annotated[str | None, typer.Option(help="Name of the document. Not needed if there is only one.")]
Dtype = Annotated[str | None, typer.Option(help="Precision of the model. Without it: the one that read.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Length of the answer at most, in tokens.")]
Model = Annotated[str | None, typer.Option(help="The model that answers. Without it: the one that read.")]


def ask(
    memory: MemoryUrl,
    question: Question,
    *,
    document: DocumentName = None,
    top_k: TopK = 8,
    max_tokens: MaxTokens = 40,
    model: Model = None,
    dtype: Dtype = None,
    threads: Threads = None,
    device: Device = "cpu",
    index: Index = "exact",
) -> Report:
    """Let the model that read a memory go on from your question.

    The answer comes first, then the blocks that were retrieved for it.

    Example:

        memstore ask notes.mem "The name of the white whale is" --document moby-dick
    """
    if not question.strip():
        raise InvalidArgument("the question is empty. Give the words that the answer should follow.")
    use_threads(threads)
    with memstore.open(memory, mode="r", index=index) as opened:
        name = document_name(opened, document)
        loaded = load_recorded(opened, model, dtype, device=device)
        attach = memstore.attach(
            loaded.model,
            opened,
            document=name,
            tokenizer=loaded.tokenizer,
            retrieval=memstore.Retrieval(top_k=top_k),
            block_size=opened.spec.block_size,
        )
        with attach as attached:
            data = {"document": name, "question": question, **answer(loaded, question, max_tokens)}
            data["blocks"] = used_blocks(attached, opened, loaded)
    return Report(data=data, text=lambda page: _show(page, data))


def document_name(memory: Memory, wanted: str | None) -> str:
    """``wanted`` if the memory has it, or its only document."""
    names = [document.name for document in memory.documents()]
    if not names:
        raise NotFound("the memory holds no documents yet. Add one with: memstore read TEXT MEMORY")
    if wanted is None and len(names) > 1:
        raise InvalidArgument(f"the memory holds several documents; choose one with --document: {', '.join(names)}")
    return memory.document(wanted).name if wanted is not None else names[0]


def load_recorded(memory: Memory, model: str | None, dtype: str | None, *, device: str) -> Loaded:
    """The model that read the memory, unless another one is named."""
    info = memory.get_info("model") or {}
    name = model or info.get("name")
    if name is None:
        raise InvalidArgument("the memory does not say which model it belongs to. Name it with --model.")
    return load_model(name, dtype or info.get("dtype", "auto"), device=device)


def answer(loaded: Loaded, question: str, max_tokens: int) -> dict[str, Any]:
    """Continue from ``question``, always with the likeliest token. The memory is attached to the model."""
    import torch

    ids = torch.tensor([encode(loaded.tokenizer, question)], device=loaded.model.device)
    start = time.perf_counter()
    with torch.inference_mode():
        generated = loaded.model.generate(ids, max_new_tokens=max_tokens, do_sample=False)  # type: ignore[operator]
    new = generated[0, ids.shape[1] :]
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


def _show(page: Page, data: dict[str, Any]) -> None:
    page.line(data["answer"].strip())
    for used in data["blocks"]:
        page.line()
        page.line(f"[{used['document']} block {used['block']:,}, score {used['score']:.3g}]")
        page.line(used["text"])
