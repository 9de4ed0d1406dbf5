"""Give a stock Hugging Face model a memory of tokens late, and train what the memory is mixed in by.

All weights of the model stay as they are: a gate and a scale for each head of one layer are trained. So the model
without its memory is the stock model itself, and what it gains with the memory, it gains by the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from memstore.errors import InvalidArgument
from memstore.models.memorizing import KNNMemory, add_knn_memory
from memstore.train.corpora import Documents, encoded
from memstore.train.family import load_weights
from memstore.train.session import Report, Session, session
from memstore.train.settings import Optimisation, Runtime
from memstore.train.start import Folder, digest_of_files, load_tokenizer
from memstore.train.streams import Streams, StreamTrainer, collate

LAYER = -6
"""Of the layers of SmolLM2-135M, the one whose heads gain most."""
RATE = 0.1
"""Learning rate of gates and scales, which are few and begin at 0."""


class StockTrainer(StreamTrainer):
    """Trains on the batches of ``Streams``, with the memory that ``add_knn_memory`` put into the model."""

    def __init__(self, *arguments: Any, memory: KNNMemory, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.memory = memory

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of a segment of each row; a row where a document begins forgets the one before."""
        given = self.segment(inputs) | {"use_cache": False}
        return super().compute_loss(model, given, return_outputs, num_items_in_batch)

    def clear(self, row: int) -> None:
        """See ``StreamTrainer``."""
        self.memory.clear(row)

    def remembered(self) -> dict[str, Tensor]:
        """See ``StreamTrainer``."""
        return self.memory.remembered()

    def remember(self, state: dict[str, Tensor]) -> None:
        """See ``StreamTrainer``."""
        self.memory.remember(state)

    def finish(self) -> None:
        """Let the model be saved as it is."""
        self.memory.clear()


# Weights that learn too would learn the style of the texts, and nobody could tell what the memory is worth; so without
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
    """Give the model in ``init`` a memory, and train its gates on documents; the report, with the model in ``out``.

    ``memstore.models.memorizing.load_knn_memory`` loads the result.

    Args:
        texts: see ``Documents``; each file, and each row of a dataset, is a document.
        out: a new folder, or that of the same run, which then goes on.
        init: the folder of a stock causal LM, with its tokenizer.
        layer: see ``add_knn_memory``, as ``memory_size`` and ``top_k``. To be named for models of fewer than 6 layers.
        memory_size: tokens that can be found.
        window: tokens of a segment, which the model sees in a call, beside what it finds.
        top_k: tokens that each query of each head looks up.
        column: of a dataset.
        optimisation: what decides the result; ``batch`` is the number of rows, each of which streams documents.
        runtime: what does not.
    """
    optimisation, runtime = optimisation or Optimisation(learning_rate=RATE), runtime or Runtime()
    if min(memory_size, window) < 1:
        raise InvalidArgument(f"memory_size and window must be at least 1 to be trained, not {memory_size}, {window}")
    documents = Documents(texts, column=column)
    memory = {"layer": layer, "memory_size": memory_size, "top_k": top_k}
    settings = {
        "kind": "memory of a stock model",
        "texts": documents.digest(),
        "init": digest_of_files(Path(init), "*.safetensors"),
        "window": window,
        **memory,
        "optimisation": optimisation.to_dict(),
    }
    with session(out, settings, optimisation, runtime) as opened:
        return opened.run.report or _on_documents(opened, init, documents, window, memory)


def _on_documents(opened: Session, init: Folder, documents: Documents, window: int, settings: dict[str, int]) -> Report:
    wanted = opened.optimisation
    tokenizer = load_tokenizer(init)
    with opened.state.main_process_first():
        tokenizer.save_pretrained(opened.run.out)
    model, memory = _closed(init, window, settings)
    end = int(tokenizer.eos_token_id or 0)
    shape = {"window": window, "processes": opened.state.num_processes, "end": end}
    data = Streams.of(encoded(documents, tokenizer), wanted, **shape)
    trainer = StockTrainer(
        opened.run,
        model,
        opened.arguments(model.config, len(data), wanted.batch),
        wanted,
        data=data,
        collate=partial(collate, window=window, padding=end),
        tokenizer=tokenizer,
        fresh=False,
        memory=memory,
    )
    trained = sum(each.numel() for each in memory.parameters())
    measured = {"trained_parameters": trained, **data.facts, **settings}
    return opened.fit(trainer, lambda: measured)


def _closed(init: Folder, window: int, settings: dict[str, int]) -> tuple[Any, KNNMemory]:
    """The stock model with a memory whose gates are closed, and with nothing else to train."""
    model = load_weights(AutoModelForCausalLM, init)
    if hasattr(model.config, "knn_memory"):
        raise InvalidArgument(f"the model {init} has a memory already: start from the stock model that it was made of")
    layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    if settings["layer"] == LAYER and layers < -LAYER:
        raise InvalidArgument(
            f"the model {init} has {layers} layers; unless another is named, the {-LAYER}th from the end gets the "
            f"memory: name one from 0 to {layers - 1} with --layer"
        )
    model.requires_grad_(False)
    memory = add_knn_memory(model, **settings)
    model.config.knn_memory["window"] = window
    return model, memory
