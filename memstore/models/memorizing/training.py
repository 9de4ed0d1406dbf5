"""Training with a memory, whose stored keys grow old: measure how far they are from the present ones, and renew them.

Wu et al. 2022, section 3.2: the memory keeps keys that earlier weights computed, and keys of length 1 shift less. Keys
of the layer with the memory depend on the windows of the layers below it, and on nothing that was retrieved. So they
can be computed again from the tokens alone.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM

from memstore.attention.knn import KNNAttention
from memstore.attention.knn_memory import RecentTokens
from memstore.attention.layers import States, after
from memstore.errors import DamagedError, InvalidArgument
from memstore.eval.pairs import IGNORED
from memstore.models.memorizing import (
    KNNMemory,
    MemorizingCache,
    MemorizingConfig,
    MemorizingForCausalLM,
    add_knn_memory,
)
from memstore.models.memorizing.options import MemorizingTraining
from memstore.readers import kinds
from memstore.train.corpora import Documents, Tokens, digest, encoded, train_tokenizer
from memstore.train.options import OPTIMISATION, Optimisation, Runtime, optimisation_of, refuse_unfit
from memstore.train.run import Run, digest_of_files
from memstore.train.session import Report, Session, session
from memstore.train.trainer import MemoryTrainer
from memstore.train.training import (
    Folder,
    Start,
    Training,
    config_of,
    load_tokenizer,
    load_weights,
    starting,
)


@torch.no_grad()
def key_shift(
    model: MemorizingForCausalLM, memory: RecentTokens, texts: Sequence[Tensor], *, oldest: int | None = None
) -> float | None:
    """Return 1 minus the mean cosine of keys in ``memory`` and keys of the present weights; None without tokens.

    ``texts`` are, for each row, all tokens read of its document ``[n]``; empty for rows that are left out. Only the
    ``oldest`` tokens of a row are compared, or all if None. Raises ``InvalidArgument`` for texts that are shorter than
    their part in the memory.
    """
    cosines = []
    for row, text in enumerate(texts):
        numbers = memory.numbers(row)[:oldest] if len(text) else range(0)
        if numbers:
            keys, _ = present_states(model, text, numbers)
            stored = memory.keys[row][:, _slots(memory, numbers)]
            cosines.append(F.cosine_similarity(stored.double(), keys.double(), dim=-1).flatten())
    return 1 - float(torch.cat(cosines).mean()) if cosines else None


def refresh(model: MemorizingForCausalLM, memory: RecentTokens, texts: Sequence[Tensor]) -> None:
    """Replace keys and values in ``memory`` by those of the present weights; see ``key_shift`` for ``texts``."""
    for row, text in enumerate(texts):
        numbers = memory.numbers(row)
        if numbers and len(text):
            slots = _slots(memory, numbers)
            for ring, states in zip((memory.keys, memory.values), present_states(model, text, numbers), strict=True):
                ring[row].index_copy_(1, slots, states.to(ring.dtype))


@torch.no_grad()
def present_states(model: MemorizingForCausalLM, text: Tensor, numbers: range) -> States:
    """Return keys and values ``[G, len(numbers), D]`` of the memory's layer for tokens of the document ``text [n]``.

    Only tokens that these depend on are read: a window for each layer below.
    """
    layer, window = model.config.memory_layer, model.config.window
    if layer is None:
        raise InvalidArgument("this model has no memory layer: its memory_layer is None")
    if numbers.stop > len(text):
        raise InvalidArgument(f"the memory has tokens up to {numbers.stop:,}, but the text has only {len(text):,}")
    first = max(0, numbers.start - layer * window)
    layers = model.model.layers
    windows: list[States | None] = [None] * layer
    parts = []
    for part in text[first : numbers.stop].to(model.device).split(window):
        x = model.model.embed_tokens(part[None])
        for number in range(layer):
            x, states = layers[number](x, windows[number], None, None)
            k, v = after(windows[number], states)
            windows[number] = k[:, :, -window:], v[:, :, -window:]
        parts.append(layers[layer].attention.project(layers[layer].attention_norm(x))[1])
    keys, values = (torch.cat(each, 2)[0, :, numbers.start - first :] for each in zip(*parts, strict=True))
    return keys, values


def _slots(memory: RecentTokens, numbers: range) -> Tensor:
    return torch.arange(numbers.start, numbers.stop, device=memory.keys.device) % memory.capacity


class _Segment(NamedTuple):
    """The part of a document that a row reads in one step."""

    tokens: Tokens
    """At most a window of tokens, and the next one. Each is predicted from those before it."""
    begins: bool
    """Whether the segment is the first of its document."""


# The seed decides beforehand which document a row reads at which step. So the Trainer may skip batches when it
# continues, and several processes read what the rows of one would. A refresh can also get the tokens that a row has
# read so far, without keeping them.
class Streams(Dataset[_Segment]):
    """Segments of documents in the order of training: item ``n`` is row ``n % rows`` at step ``n // rows``.

    A row that has read its document takes the next of a shuffled pass, and then of the pass after it.
    """

    def __init__(self, documents: Sequence[Tokens], *, window: int, rows: int, steps: int, seed: int) -> None:
        """Plan the steps for ``documents``, which have at least two tokens each."""
        self.rows = rows
        self._documents = documents
        self._window = window
        self._steps = steps
        segments = [segments_of(each, window) for each in documents]
        self.facts = {"documents": len(documents), "segments": sum(segments)}
        """The number of documents and segments."""
        self._turns = _turns(segments, rows, steps, seed)

    @classmethod
    def of(cls, texts: Iterable[Tokens], optimisation: Optimisation, *, window: int, processes: int, end: int) -> Self:
        """Return the batches of a training on ``texts``, each closed by the token ``end``; see ``shared_out``."""
        rows = optimisation.batch * processes
        documents = shared_out(texts, rows, end)
        segments = sum(segments_of(each, window) for each in documents)
        steps = optimisation.steps or math.ceil(optimisation.epochs * segments / (rows * optimisation.accumulate))
        return cls(documents, window=window, rows=rows, steps=steps * optimisation.accumulate, seed=optimisation.seed)

    def __len__(self) -> int:
        return self.rows * self._steps

    def __getitem__(self, number: int) -> _Segment:
        step, row = divmod(number, self.rows)
        document, start = self._place(row, step)
        return _Segment(document[start : start + self._window + 1], start == 0)

    def before(self, row: int, step: int) -> Tensor:
        """Return the tokens that ``row`` read before ``step`` of its document, or of the one it has just finished."""
        if step == 0:
            return torch.empty(0, dtype=torch.int64)
        document, start = self._place(row, step - 1)
        return torch.from_numpy(document[: min(start + self._window, len(document) - 1)].astype(np.int64))

    def _place(self, row: int, step: int) -> tuple[Tokens, int]:
        begun, number = self._turns[row][bisect_right(self._turns[row], step, key=lambda turn: turn[0]) - 1]
        return self._documents[number], (step - begun) * self._window


def segments_of(document: Tokens, window: int) -> int:
    """Return the steps that a document takes. Nothing follows its last token, which is only predicted."""
    return math.ceil((len(document) - 1) / window)


def _turns(segments: Sequence[int], rows: int, steps: int, seed: int) -> list[list[tuple[int, int]]]:
    """Return for each row the steps at which documents begin, and the numbers of these documents."""
    turns: list[list[tuple[int, int]]] = [[] for _ in range(rows)]
    order = _shuffled(len(segments), seed)
    free = [(0, row) for row in range(rows)]
    while free[0][0] < steps:
        step, row = heapq.heappop(free)
        number = next(order)
        turns[row].append((step, number))
        heapq.heappush(free, (step + segments[number], row))
    return turns


def _shuffled(count: int, seed: int) -> Iterator[int]:
    for turn in itertools.count():
        yield from np.random.default_rng([seed, turn]).permutation(count).tolist()


def shared_out(documents: Iterable[Tokens], rows: int, end: int) -> list[Tokens]:
    """Return ``documents``, each closed by the token ``end``, for ``rows`` rows to stream.

    A document that is longer than a row's part of the whole is cut. Otherwise several rows would read the same at once.
    Raises ``InvalidArgument`` if there are no tokens.
    """
    closed = [np.append(document, np.int32(end)) for document in documents]
    if not closed:
        raise InvalidArgument("the texts have no tokens: pass texts that are not empty")
    part = max(2, math.ceil(sum(map(len, closed)) / rows))  # from one token nothing is predicted
    parts = [each for whole in closed for each in np.array_split(whole, math.ceil(len(whole) / part))]
    return [each for each in parts if len(each) > 1]


# Labels are shifted over the whole document. Shifted within segments, a token in each window would go unlearned.
def collate(segments: list[_Segment], window: int, padding: int) -> dict[str, Tensor]:
    """Return a batch of segments, with ``padding`` after the shorter ones; ``begins [B]`` marks new documents."""
    ids = torch.full((len(segments), window), padding)
    labels = torch.full_like(ids, IGNORED)
    mask = torch.zeros_like(ids)
    for row, (tokens, _) in enumerate(segments):
        count = len(tokens) - 1
        ids[row, :count] = torch.from_numpy(tokens[:-1].astype(np.int64))
        labels[row, :count] = torch.from_numpy(tokens[1:].astype(np.int64))
        mask[row, :count] = 1
    begins = torch.tensor([segment.begins for segment in segments])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "shift_labels": labels, "begins": begins}


class _StreamTrainer(MemoryTrainer):
    """Trains on the batches of ``Streams``. Subclasses define the memory, which checkpoints hold too."""

    clear: Callable[[int], None]
    """Forgets the text of a row when another document begins."""
    remembered: Callable[[], dict[str, Tensor]]
    """Returns the texts of all rows, as tensors."""
    remember: Callable[[dict[str, Tensor]], None]
    """The inverse of ``remembered``."""
    passed: dict[str, Any]
    """Arguments of the model beside a batch."""

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of a segment of each row. A row where a document begins forgets the one before."""
        given = dict(inputs)
        for row in given.pop("begins").nonzero().flatten().tolist():
            self.clear(row)
        return super().compute_loss(model, given | self.passed, return_outputs, num_items_in_batch)

    def keep(self, checkpoint: Path) -> None:
        save_file(self.remembered(), self._file(checkpoint))

    def resume(self, checkpoint: Path) -> None:
        """Load the memory. Raise ``DamagedError`` if it is not whole."""
        path = self._file(checkpoint)
        try:
            state = load_file(path, device=str(self.args.device))
        except (OSError, SafetensorError) as error:
            raise DamagedError(
                f"{path} cannot be read: {error}. Remove the folder {checkpoint}; the training then continues "
                "from the checkpoint before it."
            ) from None
        self.remember(state)

    def _file(self, checkpoint: Path) -> Path:
        return checkpoint / f"memory-{self.args.process_index}.safetensors"


# 1 minus the mean cosine of stored keys and keys of the present weights. Keys of the layer with the memory do not
# depend on what was retrieved, so only tokens within a window for each layer below are read again. For the two oldest
# windows of one row that costs a fraction of a step.
COMPARED_WINDOWS = 2
"""Windows of the oldest keys that a line of the log compares with present ones: a small part of a step's time."""


class MemorizingTrainer(_StreamTrainer):
    """Trains on the batches of ``Streams``."""

    def __init__(
        self, run: Run, model: Any, *rest: Any, data: Streams, refresh_every: int | None = None, **options: Any
    ) -> None:
        """Recompute the whole memory after every ``refresh_every`` steps; None: never."""
        if refresh_every is not None and refresh_every < 1:
            raise InvalidArgument(f"refresh_every must be at least 1, got {refresh_every}")
        super().__init__(run, model, *rest, data=data, **options)
        self.streams = data
        self.cache = MemorizingCache(model.config, self.args.per_device_train_batch_size)
        self.clear, self.remembered, self.remember = self.cache.clear, self.cache.state_dict, self.cache.load_state_dict
        self.passed = {"past_key_values": self.cache, "use_cache": True}
        self.refresh_every = refresh_every
        self._refreshed = 0

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Refresh the memory when it is time, then train a step; see ``MemoryTrainer``."""
        step = self.state.global_step
        if self.refresh_every is not None and step % self.refresh_every == 0 and step != self._refreshed:
            self._refreshed = step
            if isinstance(self.cache.memory, RecentTokens):
                refresh(self.trained, self.cache.memory, self.texts())
        return super().training_step(model, inputs, num_items_in_batch)

    def texts(self, rows: int | None = None) -> list[Tensor]:
        """Return the tokens that the first ``rows`` rows (None: all) of this process have read of their documents."""
        batch = self.args.per_device_train_batch_size
        first = self.args.process_index * batch
        step = self.state.global_step * self.args.gradient_accumulation_steps
        return [self.streams.before(first + row, step) for row in range(batch if rows is None else rows)]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add to the log how far the oldest keys of the first row have shifted."""
        if "loss" in logs and isinstance(self.cache.memory, RecentTokens):
            oldest = COMPARED_WINDOWS * self.trained.config.window
            shift = key_shift(self.trained, self.cache.memory, self.texts(rows=1), oldest=oldest)
            if shift is not None:
                self.parts["key_shift"] = [torch.tensor(shift)]
        super().log(logs, start_time)


LATE_GATE = -2.0
"""First value of the gates of a model that was trained without a memory. It lets an eighth of the memory through."""


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
    """Train on documents, one window of each in a step. Return the report; the model is in ``out``.

    Args:
        texts: see ``Documents``; each file, and each row of a dataset, is a document.
        out: a new folder, or the folder of the same run, which then continues.
        config: the model's; the preset ``tiny`` if None. The size of a given tokenizer's vocabulary replaces its own.
        tokenizer: a folder; if None, that of ``init``, or a new tokenizer is trained on the texts.
        init: the folder of a Memorizing Transformer to start from, instead of ``config``.
        memory_size: tokens that can be found; as configured if None. ``init`` may have had fewer or none in
            training; the paper finds that it soon catches up. After none, gates begin nearly closed.
        refresh_every: steps after which the memory is computed again with the present weights; None: never.
        column: the text column of a dataset.
        optimisation: options that decide the result; ``batch`` is the number of rows; each row streams documents.
        runtime: options that do not.
    """
    optimisation, runtime = optimisation or Optimisation(), runtime or Runtime()
    start = starting(config, init, tokenizer, family=MEMORIZING)
    late = init is not None and start.config.memory_size == 0 and bool(memory_size)
    if memory_size is not None:
        start = _with_memory(start, memory_size)
    documents = Documents(texts, column=column)
    settings = {
        "kind": "documents",
        "texts": digest(documents),
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
            f"the model {start.init or ''} has no memory layer (memory_layer is None). To add the memory later, "
            "train the model with memory_size=0 first, which reserves a layer"
        )
    start.config.memory_size = memory_size
    return start


@torch.no_grad()
def _close_gates(model: MemorizingForCausalLM) -> None:
    """Let little of the memory through at first, because its layer was trained without one."""
    gate = cast("KNNAttention", cast("Any", model.model.layers)[model.config.memory_layer].attention).gate
    if gate is not None:
        gate.fill_(LATE_GATE)


def _on_documents(opened: Session, start: Start, documents: Documents, refresh_every: int | None, late: bool) -> Report:
    config = start.config
    with opened.state.main_process_first():
        tokenizer = start.tokenizer_of(opened.run, lambda: train_tokenizer(documents, config.vocab_size))
    end = config.vocab_size - 1 if tokenizer.eos_token_id is None else int(tokenizer.eos_token_id)
    model = start.model(tokenizer, opened.optimisation.seed)
    model.config.memory_size = config.memory_size
    if late:
        _close_gates(model)
    own = {"fresh": start.init is None, "refresh_every": refresh_every}
    trainer, facts = _streaming(opened, MemorizingTrainer, model, tokenizer, documents, config.window, end, **own)
    return opened.fit(trainer, lambda: {**facts, "memory_size": config.memory_size})


def _streaming(
    opened: Session, kind: Any, model: Any, tokenizer: Any, documents: Documents, window: int, end: int, **own: Any
) -> tuple[Any, dict[str, int]]:
    """Return a trainer of ``kind`` for ``documents``, each closed by the token ``end``, and the amount of text."""
    wanted = opened.optimisation
    shape = {"window": window, "processes": opened.state.num_processes, "end": end}
    data = Streams.of(encoded(documents, tokenizer), wanted, **shape)
    arguments = opened.arguments(model.config, len(data), wanted.batch)
    own |= {"data": data, "collate": partial(collate, window=window, padding=end), "tokenizer": tokenizer}
    return kind(opened.run, model, arguments, wanted, **own), data.facts


LAYER = -6
"""The layer of SmolLM2-135M whose heads gain most, counted from the last."""
RATE = 0.1
"""Learning rate of gates and scales. They are few and begin at 0."""


class StockTrainer(_StreamTrainer):
    """Trains on the batches of ``Streams``, with the memory that ``add_knn_memory`` put into the model."""

    def __init__(self, *arguments: Any, memory: KNNMemory, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.memory = memory
        self.clear, self.remembered, self.remember = memory.clear, memory.remembered, memory.remember
        self.passed = {"use_cache": False}

    def finish(self) -> None:
        """Make the model ready to be saved as it is."""
        self.memory.clear()


# Weights that learn too would learn the style of the texts, and nobody could see what the memory is worth. So without
# its memory the model is bit for bit the stock one.
def train_stock_memory(
    texts: Sequence[Folder],
    out: Folder,
    *,
    init: Folder,
    layer: int = LAYER,
    memory_size: int = 8192,
    window: int = 512,
    top_k: int = 32,
    column: str = "text",
    optimisation: Optimisation | None = None,
    runtime: Runtime | None = None,
) -> Report:
    """Give the model in ``init`` a memory and train its gates on documents. Return the report; the model is in ``out``.

    ``memstore.models.memorizing.load_knn_memory`` loads the result.

    Args:
        texts: see ``Documents``; each file, and each row of a dataset, is a document.
        out: a new folder, or the folder of the same run, which then continues.
        init: the folder of a stock causal LM, with its tokenizer.
        layer: see ``add_knn_memory``, also for ``memory_size`` and ``top_k``. Required below 6 layers.
        memory_size: tokens that can be found.
        window: tokens of a segment. The model sees them in a call, with the tokens it finds.
        top_k: tokens that each query of each head looks up.
        column: the text column of a dataset.
        optimisation: options that decide the result; ``batch`` is the number of rows; each row streams documents.
        runtime: options that do not.
    """
    optimisation, runtime = optimisation or Optimisation(learning_rate=RATE), runtime or Runtime()
    if min(memory_size, window) < 1:
        raise InvalidArgument(f"memory_size and window must be at least 1, got {memory_size} and {window}")
    documents = Documents(texts, column=column)
    memory = {"layer": layer, "memory_size": memory_size, "top_k": top_k}
    settings = {
        "kind": "memory of a stock model",
        "texts": digest(documents),
        "init": digest_of_files(Path(init), "*.safetensors"),
        "window": window,
        **memory,
        "optimisation": optimisation.to_dict(),
    }
    with session(out, settings, optimisation, runtime) as opened:
        return opened.run.report or _stock_on_documents(opened, init, documents, window, memory)


def _stock_on_documents(
    opened: Session, init: Folder, documents: Documents, window: int, settings: dict[str, int]
) -> Report:
    tokenizer = load_tokenizer(init)
    with opened.state.main_process_first():
        tokenizer.save_pretrained(opened.run.out)
    model, memory = _closed(init, window, settings)
    end, own = int(tokenizer.eos_token_id or 0), {"fresh": False, "memory": memory}
    trainer, facts = _streaming(opened, StockTrainer, model, tokenizer, documents, window, end, **own)
    trained = sum(each.numel() for each in memory.parameters())
    return opened.fit(trainer, lambda: {"trained_parameters": trained, **facts, **settings})


def _closed(init: Folder, window: int, settings: dict[str, int]) -> tuple[Any, KNNMemory]:
    """Return the stock model with a memory whose gates are closed. Nothing else is trained."""
    model = load_weights(AutoModelForCausalLM, init)
    if hasattr(model.config, "knn_memory"):
        raise InvalidArgument(
            f"the model {init} already has a memory: start from the stock model that it was made from"
        )
    layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    if settings["layer"] == LAYER and layers < -LAYER:
        raise InvalidArgument(
            f"the model {init} has {layers} layers, but the default layer is the {-LAYER}th from the end: choose "
            f"one from 0 to {layers - 1} with --layer"
        )
    model.requires_grad_(False)
    memory = add_knn_memory(model, **settings)
    model.config.knn_memory["window"] = window
    return model, memory


_MODEL = {"vocabulary": "vocab_size", "window": "window", "top_k": "retrieval_top_k", "memory_size": "memory_size"}
"""Options that define a model, and their names in its configuration."""
_OF_STOCK = {*OPTIMISATION, "init", "layer", "memory_size", "window", "top_k", "column"}
"""Options for the memory of a stock model."""


def train(options: MemorizingTraining, runtime: Runtime) -> dict[str, Any]:
    """Run ``memstore train memorizing``. Raise ``InvalidArgument`` for options that do not belong together."""
    given, texts = options.given(), options.text or []
    if options.init is not None and not MEMORIZING.has(options.init):
        refuse_unfit(given, _OF_STOCK, "a stock model")
        chosen = {name: value for name, value in given.items() if name not in OPTIMISATION}
        optimisation = optimisation_of({"learning_rate": RATE, **given})
        return train_stock_memory(texts, options.out, **chosen, optimisation=optimisation, runtime=runtime)
    refuse_unfit(given, given.keys() - {"layer"}, "a Memorizing Transformer")
    config = config_of(MEMORIZING, given, _MODEL, free=("memory_size",))
    names = ("tokenizer", "init", "memory_size", "refresh_every", "column")
    settings = {name: given[name] for name in names if name in given}
    settings |= {"optimisation": optimisation_of(given), "runtime": runtime}
    return train_on_documents(texts, options.out, config=config, **settings)


MEMORIZING = Training(kinds.MEMORIZING, MemorizingConfig, MemorizingForCausalLM, train, MemorizingTrainer)
