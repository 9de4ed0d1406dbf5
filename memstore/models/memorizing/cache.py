"""The state of a Memorizing Transformer between segments: a window for each layer, and its memory.

The module also reports to observers what the model retrieves.

One layer looks up single tokens, each head for itself. So every query head has a list, whose entries are a block and
the place of the token in it. A weight is the gate times the softmax over the tokens found. In a model with one softmax
over everything (``joint``), it is the token's part of that softmax.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from memstore.attention.knn import KNNAttention, Neighbours, Tell, TokenMemory
from memstore.attention.knn_memory import RecentTokens, check_row
from memstore.attention.layers import States, after
from memstore.device_copies import from_each
from memstore.errors import InvalidArgument
from memstore.memory.trace_file import TIERS, Array, Look
from memstore.models.cache import ModelCache, behind_zeros, of_rows
from memstore.models.memorizing.configuration import MemorizingConfig
from memstore.readers.observer import Choice, Draft, Looks, Origin, as_array


class MemorizingCache(ModelCache):
    """The ``past_key_values`` of a Memorizing Transformer. In training, the state that continues from step to step.

    Tokens of a document go into the memory one whole window at a time, just before the first token after the window is
    computed. So what a token can look up does not depend on how the text is cut into calls. The backward pass of a
    segment also finds the memory as the segment found it.
    """

    config: MemorizingConfig

    def __init__(self, config: MemorizingConfig, rows: int, memory: TokenMemory | None = None) -> None:
        """Start with ``memory``, such as ``StoredTokens``. If None, keep ``config.memory_size`` tokens in tensors."""
        super().__init__(config, rows)
        self.memory = memory
        self.windows: list[States | None] = [None] * config.num_hidden_layers
        self.empty: Tensor | None = None
        """``[B]``, in host memory: how many tokens of the windows do not exist; None if all exist in all rows."""
        self.waiting: list[list[Tensor]] = [[] for _ in range(rows)]
        """Tokens of each row that are not in the memory yet: the last ones of the window."""
        self._remaining: Sequence[int] = ()
        self._remembers = config.memory_layer is not None and (memory is not None or config.memory_size > 0)

    def __repr__(self) -> str:
        return f"MemorizingCache({self.rows} rows, {self.memory})"

    def fits(self, config: PreTrainedConfig) -> bool:
        """Compare as ``ModelCache`` does, except for the size of the memory, which each cache chooses itself."""
        own = {"memory_size": self.config.memory_size}
        return bool({**config.to_dict(), **own} == self.config.to_dict())

    @property
    def past(self) -> int:
        """Return the number of tokens that the windows hold."""
        return 0 if self.windows[0] is None else self.windows[0][0].shape[2]

    def room(self, remaining: Sequence[int]) -> int:
        """Return how many tokens may come at once until a row fills its window; row ``b`` has ``remaining[b]``."""
        rooms = [self.config.window - count for count, left in zip(self._counts(), remaining, strict=True) if left > 0]
        return min(rooms, default=self.config.window)

    def begin(self, remaining: Sequence[int] = ()) -> None:
        """Put full windows into the memory, just before a segment is computed.

        ``remaining``: tokens of each row from the beginning of the segment on, for observers.
        """
        self._remember(self.config.window)
        self._remaining = remaining

    def teller(self, layer: int, attention: nn.Module) -> Tell | None:
        """Return a function that tells observers what ``attention``, layer ``layer``, mixes; None without any."""
        if not self.observers or not isinstance(attention, KNNAttention):
            return None
        return partial(self._tell, layer, attention)

    def _tell(
        self, layer: int, attention: KNNAttention, q: Tensor, keys: Tensor, mask: Tensor, found: Neighbours
    ) -> None:
        ending = [row for row, left in enumerate(self._remaining) if 0 < left <= q.shape[2]]
        last = [left - 1 for left in self._remaining]
        self.tell(KNNChoice(layer, ending, last, attention, q, keys, mask, found, self.memory, self.origin))

    # A backward pass needs the tokens found in the forward pass unchanged, so a training call of several windows copies
    # the memory for each. Calls of one window, as in the recipes, copy nothing.
    def detach(self) -> None:
        """Continue with a copy of the memory in tensors: the backward pass needs the one that earlier segments saw."""
        if isinstance(self.memory, RecentTokens):
            self.memory = copy.deepcopy(self.memory)

    def flush(self) -> None:
        """Put everything into the memory, such as at the end of a document that will be queried later."""
        self._remember(1)

    def end(self, tokens: Sequence[Tensor], states: Sequence[States], given: int) -> None:
        """Keep ``states`` of a segment, ``[B, G, T, D]`` of each layer. Row ``b`` has the tokens ``tokens[b]``.

        ``given`` also counts the padding after them.
        """
        detached = [(k.detach(), v.detach()) for k, v in states]
        for waiting, new in zip(self.waiting, tokens, strict=True):
            waiting += [new] if self._remembers and len(new) else []
        self._slide(torch.tensor([len(each) for each in tokens]), detached)
        self.given += given

    def _remember(self, least: int) -> None:
        """Put the waiting tokens of the rows that have at least ``least`` into the memory."""
        counts = [count if count >= least else 0 for count in self._counts()]
        if not any(counts):
            return
        assert self.config.memory_layer is not None
        window = self.windows[self.config.memory_layer]
        assert window is not None
        if self.memory is None:
            sizes = (self.rows, window[0].shape[1], self.config.memory_size, window[0].shape[3])
            self.memory = RecentTokens(*sizes, dtype=window[0].dtype, device=window[0].device)
        at = from_each(self.past - torch.tensor(counts), max(counts), window[0].device)
        keys, values = (behind_zeros(x, 0, at.clamp(max=self.past - 1)) for x in window)
        tokens = [
            torch.cat(waiting) if count else torch.empty(0, dtype=torch.int64)
            for waiting, count in zip(self.waiting, counts, strict=True)
        ]
        self.memory.append(tokens, keys, values)
        self.waiting = [[] if count else waiting for waiting, count in zip(self.waiting, counts, strict=True)]

    def clear(self, row: int) -> None:
        """Forget a row before another document begins. The other rows stay as they are.

        Raises ``InvalidArgument`` for a row that does not exist, or that is kept in a store.
        """
        check_row(row, self.rows)
        if isinstance(self.memory, RecentTokens):
            self.memory.clear(row)
        elif self.memory is not None:
            raise InvalidArgument(
                "a row whose tokens are in a store cannot be cleared: use a new cache and a new document for the "
                "next text"
            )
        self.waiting[row] = []
        if self.windows[0] is not None:
            if self.empty is None:
                self.empty = torch.zeros(self.rows, dtype=torch.int64)
            self.empty[row] = self.past

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.memory is not None and not isinstance(self.memory, RecentTokens):
            raise InvalidArgument(
                "beams cannot share the documents of a store: generate without beams, or without a store"
            )
        super().reorder_cache(beam_idx)
        self.waiting = [list(self.waiting[row]) for row in beam_idx.tolist()]
        if isinstance(self.memory, RecentTokens):
            self.memory.reorder(beam_idx)
        self.windows = of_rows(self.windows, beam_idx)
        self.empty = None if self.empty is None else self.empty[beam_idx.cpu()]

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state needed to continue, as tensors. Raise ``InvalidArgument`` if the memory is in a store."""
        state = {"given": torch.tensor(self.given), "lengths": torch.tensor(self._counts())}
        waiting = [each for row in self.waiting for each in row]
        state["waiting"] = torch.cat(waiting) if waiting else torch.empty(0, dtype=torch.int64)
        for number, window in enumerate(self.windows):
            if window is not None:
                state |= {f"windows.{number}.{part}": x.contiguous() for part, x in zip("kv", window, strict=True)}
        if self.empty is not None:
            state["empty"] = self.empty
        if isinstance(self.memory, RecentTokens):
            state |= {f"memory.{name}": x for name, x in self.memory.state_dict().items()}
        elif self.memory is not None:
            raise InvalidArgument("a memory in a store is saved already: open its documents again with a new cache")
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the result of ``state_dict``. Raise ``InvalidArgument`` for a state of another size."""
        lengths = state["lengths"].tolist()
        if len(lengths) != self.rows:
            raise InvalidArgument(
                f"expected the state of {self.rows} rows, got {len(lengths)}: continue with the same batch size"
            )
        self._check_windows({name: x for name, x in state.items() if name.startswith("windows.")})
        kept = {name.removeprefix("memory."): x for name, x in state.items() if name.startswith("memory.")}
        memory = None
        if kept:
            keys = kept["keys"]
            sizes = (self.rows, self.config.num_key_value_heads, self.config.memory_size, self.config.head_dim)
            memory = RecentTokens(*sizes, dtype=keys.dtype, device=keys.device)
            memory.load_state_dict(kept)
        self.memory = memory
        self.given = int(state["given"])
        self.waiting = [[row] if len(row) else [] for row in state["waiting"].split(lengths)]
        self.empty = state["empty"].cpu() if "empty" in state else None
        names = [(f"windows.{number}.k", f"windows.{number}.v") for number in range(len(self.windows))]
        self.windows = [(state[k], state[v]) if k in state else None for k, v in names]

    def _check_windows(self, kept: dict[str, Tensor]) -> None:
        """Raise ``InvalidArgument`` for windows that no model of this configuration has."""
        config = self.config
        names = {f"windows.{number}.{part}" for number in range(config.num_hidden_layers) for part in "kv"}
        sizes = (self.rows, config.num_key_value_heads, config.head_dim)
        fits = all((*x.shape[:2], x.shape[3]) == sizes and x.shape[2] <= config.window for x in kept.values())
        if kept and (set(kept) != names or not fits):
            raise InvalidArgument(
                f"expected windows of at most {config.window} tokens in {config.num_hidden_layers} layers, with "
                f"{config.num_key_value_heads} heads of {config.head_dim}; got {len(kept) // 2} windows of "
                f"{list(next(iter(kept.values())).shape)}. Use the model that they were saved with"
            )

    def _counts(self) -> list[int]:
        """Return the number of tokens of each row that are not in the memory yet."""
        return [sum(map(len, waiting)) for waiting in self.waiting]

    def _slide(self, lengths: Tensor, states: list[States]) -> None:
        """Keep the last ``window`` existing tokens of each row, at the end of the windows."""
        past, total = self.past, self.past + states[0][0].shape[2]
        empty = torch.zeros_like(lengths) if self.empty is None else self.empty
        keep = min(self.config.window, total)
        windows = [after(before, new) for before, new in zip(self.windows, states, strict=True)]
        if bool((lengths == states[0][0].shape[2]).all()):
            self.windows = [(k[:, :, -keep:].clone(), v[:, :, -keep:].clone()) for k, v in windows]
        else:
            at = from_each(past + lengths, keep, states[0][0].device)
            self.windows = [(behind_zeros(k, keep, at), behind_zeros(v, keep, at)) for k, v in windows]
        missing = (keep - (past - empty + lengths)).clamp(min=0)
        self.empty = missing if bool(missing.any()) else None


OWN = TIERS.index("own")


@dataclass(eq=False)
class KNNChoice(Choice):
    """The tokens that the layer with the memory found for one segment."""

    layer: int
    rows: Sequence[int]
    last: Sequence[int]
    """Index of the last token of each row in the segment."""
    attention: Any
    """The layer, which has ``weights_of``: a ``KNNAttention``, or the ``KNNMemory`` of a stock model."""
    queries: Tensor
    """``[B, H, T, D]``, of length 1."""
    keys: Tensor
    """``[B, G, n, D]``: keys of the window."""
    mask: Tensor
    """``[B or 1, H, T, n]``: the bias of the window."""
    found: Neighbours
    memory: Any
    """``DocumentTokens``; or ``RecentTokens`` if nobody needs a draft."""
    origin: Origin = field(default_factory=Origin)
    searched = True

    def places(self) -> Tensor:
        """Return ``[B, H, T, K]``: places in the text of the tokens found, -1 for none."""
        places: Tensor = self.memory.numbers_of(self.found.ids)
        return places

    def weights(self, row: int, at: int) -> tuple[Tensor, Tensor]:
        """Return scores and weights ``[H, K]`` of the tokens that one token of the segment found."""
        one, token = slice(row, row + 1), slice(at, at + 1)
        mine = Neighbours(self.found.keys[one], self.found.values[one], self.found.ids[one, :, token])
        mask = self.mask[one if len(self.mask) > 1 else slice(None), :, token]
        scores, weights = self.attention.weights_of(self.queries[one, :, token], self.keys[one], mask, mine)
        return scores[0, :, 0], weights[0, :, 0]

    def draft(self) -> Draft:
        now = time.perf_counter()
        asked = self.memory.stored.asked
        spent = (1e6 * (asked - self.memory.begun), 1e6 * (now - asked))
        places = as_array(self.places())
        return Looks(
            [
                self._look(row, places[row, :, self.last[row]], *spent)
                for row in self.rows
                if (places[row, :, self.last[row]] >= 0).any()
            ]
        )

    def _look(self, row: int, places: Array, search_us: float, gather_us: float) -> Look:
        """Return the look for tokens at ``places [H, K]`` of the text, -1 for none, best first."""
        scores, weights = map(as_array, self.weights(row, self.last[row]))
        stored = self.memory.stored
        size, tokens = stored.spec.block_size, len(stored.documents[row])
        there, theirs = places >= 0, (places >= 0) & (places < tokens)
        blocks = np.where(there, places // size, -1)
        before = {} if stored.tiers is None else stored.tiers[row]
        names = [before.get(block) for block in blocks.flatten().tolist()]
        tiers = np.array([OWN if name is None else TIERS.index(name) for name in names]).reshape(blocks.shape)
        return Look(
            layer=self.layer,
            row=row,
            documents=self.origin.names,
            document=np.where(theirs, 0, -1).astype(np.int16),
            blocks=blocks,
            offsets=np.where(there, places % size, -1),
            scores=scores,
            weights=weights,
            tiers=np.where(theirs, tiers, np.where(there, OWN, -1)).astype(np.int8),
            search_us=search_us,
            gather_us=gather_us,
        )
