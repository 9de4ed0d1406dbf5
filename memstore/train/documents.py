"""Train a Memorizing Transformer on long documents, or give a trained one a memory, or one of another size."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch

from memstore.attention.knn import KNNAttention
from memstore.errors import InvalidArgument
from memstore.models.memorizing import MemorizingConfig, MemorizingForCausalLM
from memstore.train.corpora import Documents, encoded, train_tokenizer
from memstore.train.family import MEMORIZING
from memstore.train.memorizing import MemorizingTrainer
from memstore.train.session import Report, Session, session
from memstore.train.settings import Optimisation, Runtime
from memstore.train.start import Folder, Start, starting
from memstore.train.streams import Streams, collate

LATE_GATE = -2.0
"""Where the gates of a model begin that was trained without a memory: an eighth of what is found."""


def train_on_documents(
    texts: Sequence[Folder],
    out: Folder,
    *,
    config: MemorizingConfig | None = None,
    tokenizer: Folder | None = None,
    init: Folder | None = None,
    memory_size: int | None = None,
    refresh_every: int | None = None,
    column: str = "text",
    optimisation: Optimisation | None = None,
    runtime: Runtime | None = None,
) -> Report:
    """Train on documents, a window of each in a step; the report, with the model in ``out``.

    Args:
        texts: see ``Documents``; each file, and each row of a dataset, is a document.
        out: a new folder, or that of the same run, which then goes on.
        config: the model's; the preset ``tiny`` if None. With a tokenizer given, its vocabulary replaces the config's.
        tokenizer: a folder; if None, that of ``init``, or one is trained on the texts.
        init: the folder of a Memorizing Transformer to start from, instead of ``config``.
        memory_size: tokens that can be found, as the configuration says if None; also where ``init`` was trained with
            fewer or none, which the paper finds to catch up soon. After none, gates begin nearly closed.
        refresh_every: steps after which the memory is computed again with the present weights; None: never.
        column: of a dataset.
        optimisation: what decides the result; ``batch`` is the number of rows, each of which streams documents.
        runtime: what does not.
    """
    optimisation, runtime = optimisation or Optimisation(), runtime or Runtime()
    start = starting(config, init, tokenizer, family=MEMORIZING)
    late = init is not None and start.config.memory_size == 0 and bool(memory_size)
    if memory_size is not None:
        start = _with_memory(start, memory_size)
    documents = Documents(texts, column=column)
    settings = {
        "kind": "documents",
        "texts": documents.digest(),
        "refresh_every": refresh_every,
        **start.settings(),
        "optimisation": optimisation.to_dict(),
    }
    with session(out, settings, optimisation, runtime) as opened:
        return opened.run.report or _on_documents(opened, start, documents, refresh_every, late)


# A model whose layer is ready for it (`memory_size=0` while training: normalised queries and keys, a gate that nothing
# moved). One with `memory_layer=None` is the Transformer-XL baseline, whose weights mean something else.
def _with_memory(start: Start, memory_size: int) -> Start:
    if memory_size < 0:
        raise InvalidArgument(f"memory_size must be at least 0, not {memory_size}")
    if memory_size and start.config.memory_layer is None:
        raise InvalidArgument(
            f"the model {start.init or ''} has no layer with a memory (memory_layer is None). To give a model its "
            "memory late, train it with memory_size=0 first: its layer is ready for one"
        )
    start.config.memory_size = memory_size
    return start


@torch.no_grad()
def _close_gates(model: MemorizingForCausalLM) -> None:
    """Let little of the memory through at first: its layer has learned to do without."""
    gate = cast("KNNAttention", cast("Any", model.model.layers)[model.config.memory_layer].attention).gate
    if gate is not None:
        gate.fill_(LATE_GATE)


def _on_documents(opened: Session, start: Start, documents: Documents, refresh_every: int | None, late: bool) -> Report:
    wanted, config = opened.optimisation, start.config
    with opened.state.main_process_first():
        tokenizer = start.tokenizer_of(opened.run, lambda: train_tokenizer(documents, config.vocab_size))
    end = config.vocab_size - 1 if tokenizer.eos_token_id is None else int(tokenizer.eos_token_id)
    shape = {"window": config.window, "processes": opened.state.num_processes, "end": end}
    data = Streams.of(encoded(documents, tokenizer), wanted, **shape)
    model = start.model(tokenizer, wanted.seed)
    model.config.memory_size = config.memory_size
    if late:
        _close_gates(model)
    trainer = MemorizingTrainer(
        opened.run,
        model,
        opened.arguments(config, len(data), wanted.batch),
        wanted,
        data=data,
        collate=partial(collate, window=config.window, padding=end),
        tokenizer=tokenizer,
        fresh=start.init is None,
        refresh_every=refresh_every,
    )
    return opened.fit(trainer, lambda: {**data.facts, "memory_size": config.memory_size})
