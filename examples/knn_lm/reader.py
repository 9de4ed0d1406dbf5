"""Reading a text with a kNN-LM, and letting it look things up."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.knn_lm.kind import KNN_LM
from examples.knn_lm.modeling import KNNLMForCausalLM
from memstore import MemorySpec
from memstore.memory.search import Match, check_layer, search_vectors
from memstore.memory.trace_file import Look
from memstore.readers.asking import Query
from memstore.readers.attachment import Job
from memstore.readers.caches import cache_in
from memstore.readers.fingerprint import fingerprint_of
from memstore.readers.observer import Choice, Draft, Looks, Origin, as_array
from memstore.readers.reader import Reader


class KNNLMReader(Reader):
    """A document of a memory, and the kNN-LM that reads it."""

    kind = KNN_LM
    model: KNNLMForCausalLM

    def spec(self, made: MemorySpec | None = None) -> MemorySpec:  # noqa: ARG002 - nothing of it is free
        """What is stored: of each token a hidden state of length 1, which is its landmark too."""
        config = self.model.config
        size, dim = config.block_size, config.hidden_size
        return MemorySpec(
            layers=1,
            fields={"h": (1, size, dim)},
            index_layers=(0,),
            key_heads=1,
            key_dim=dim,
            block_size=size,
            keys_per_block=size,
            fingerprint=fingerprint_of(
                self.model,
                self.tokenizer,
                architecture=f"knn-lm/{config.num_hidden_layers}x{dim}",
                positions="from the beginning of each block",
                layout="hidden states of length 1 before the head",
                block_size=size,
            ),
        )

    # Reading: memstore cuts the text, and asks for the states of each piece.

    @property
    def _segment_tokens(self) -> int:
        return 16 * int(self.model.config.block_size)

    def _read_segments(self, job: Job, segments: Iterator[Tensor]) -> Generator[int]:
        document = job.document
        for tokens in segments:
            waiting = len(document) % self.model.config.block_size
            begun = document.tokens(document.n_blocks - 1) if waiting else tokens[:0]
            states = self._keys(self.model.states(torch.cat([begun, tokens])))
            with document.append(tokens) as batch:  # committed at the end of the block, all of it or nothing
                blocks = self._in_blocks(states, len(batch.blocks))
                batch.put(0, landmarks=blocks, h=blocks)
            yield len(tokens)

    def _in_blocks(self, states: Tensor, count: int) -> Tensor:
        """States ``[n, D]`` as blocks ``[count, 1, S, D]``; the last one ends with zeros."""
        size = self.model.config.block_size
        padded = F.pad(states, (0, 0, 0, count * size - len(states)))
        return padded.view(count, 1, size, -1)

    # Asking: inside the ``with`` block the model has a memory.

    def _install(self, stack: ExitStack) -> None:
        self.model.neighbours = self._neighbours
        stack.callback(setattr, self.model, "neighbours", None)
        hook = self.model.register_forward_pre_hook(self._call_begins, with_kwargs=True)
        stack.callback(hook.remove)

    def _call_begins(self, _: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        ids, past = args[0] if args else given.get("input_ids"), cache_in(given)
        for observer in self.observers:
            observer.begin(None if ids is None else ids[0], fresh=past is None or not past.get_seq_length())

    def _neighbours(self, hidden: Tensor) -> Tensor:
        """See ``KNNLMForCausalLM.neighbours``. The k best tokens lie in the k best blocks, so those are compared."""
        config, document = self.model.config, self._continued()
        view, size = document.layer(0), config.block_size
        queries = self._keys(hidden).flatten(0, 1)  # [B * T, D]
        found = torch.zeros(len(queries), config.vocab_size)
        begun = time.perf_counter()
        blocks = view.search(queries[None], config.knn_tokens).blocks.unique().tolist()
        blocks = [block for block in blocks if block >= 0]
        if len(document) % size:
            blocks.append(document.n_blocks - 1)  # which is not complete, and so in no index
        places = (torch.tensor(blocks, dtype=torch.int64)[:, None] * size + torch.arange(size)).flatten()
        known = places < len(document) - 1  # of the last token nobody knows what comes next
        if known.any():
            tiers = self.origin.tiers(0, np.array(blocks))
            asked = time.perf_counter()
            places, keys = places[known], view.gather(blocks)["h"].flatten(0, 2)[known]
            scores, best = (queries @ keys.T).topk(min(config.knn_tokens, len(keys)))
            weights = (scores / config.knn_temperature).softmax(-1)
            found.scatter_add_(1, document.tokens()[places[best] + 1], weights)
            spent = 1e6 * (asked - begun), 1e6 * (time.perf_counter() - asked)
            at, rows = dict(zip(blocks, tiers, strict=True)), len(hidden)
            told = (each.view(rows, hidden.shape[1], -1)[:, -1:] for each in (places[best], scores, weights))
            choice = KNNLMChoice(*told, size=size, at=at, origin=self.origin, spent=spent)
            for observer in self.observers:
                observer.choice(choice)
        return found.view(*hidden.shape[:2], -1)

    @property
    def origin(self) -> Origin:
        """Where what is found is from."""
        return Origin(self.document, self.model.device, stored=self.document.n_blocks)

    def _keys(self, hidden: Tensor) -> Tensor:
        return F.normalize(hidden.float(), dim=-1).cpu()

    def _search(self, query: Query, top_k: int, layer: int | None) -> list[Match]:
        """Blocks by their best token for the query's last one."""
        layer = check_layer(self.memory, layer)
        if not self.document.complete_blocks:
            return []
        queries = self._keys(self.model.states(query.tokens)[None, -1:])
        return search_vectors([self.document], queries, top_k, layer=layer)

    def _described(self) -> dict[str, Any]:
        return {"mechanism": "knn-lm", "layers": [0], "heads": 1, "top_k": self.model.config.knn_tokens}


@dataclass(frozen=True)
class KNNLMChoice(Choice):
    """The stored tokens that vote for what follows the last token of each row."""

    places: Tensor
    """``[B, 1, K]``: where they stand in the document."""
    scores: Tensor
    weights: Tensor
    size: int
    """Tokens of a block."""
    at: dict[int, int]
    """The tier that each block was in."""
    origin: Origin
    spent: tuple[float, float]
    """Microseconds of searching and gathering."""
    layer = 0
    searched = True

    @property
    def rows(self) -> Sequence[int]:  # type: ignore[override]  # all end in this call
        """See ``Choice``."""
        return range(len(self.places))

    def draft(self) -> Draft:
        """See ``Choice``."""
        return Looks([self._look(row) for row in self.rows])

    def _look(self, row: int) -> Look:
        places = as_array(self.places[row])
        blocks = places // self.size
        return Look(
            layer=0,
            row=row,
            documents=self.origin.names,
            document=self.origin.documents(blocks),
            blocks=blocks,
            offsets=places % self.size,
            scores=as_array(self.scores[row]),
            weights=as_array(self.weights[row]),
            tiers=np.vectorize(self.at.get, otypes=[np.int8])(blocks),
            search_us=self.spent[0],
            gather_us=self.spent[1],
        )
