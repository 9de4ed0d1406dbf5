"""The blocks of an exact index, in chunks that grow geometrically and are never copied again.

The place of a block is the number of its chunk times ``PLACES``, plus its row there. It never changes, and later blocks
have larger places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memstore.device_copies import to_device
from memstore.index.contract import allows
from memstore.index.files import Content
from memstore.index.sieve import LARGEST_TURNED_DIM, Codes, Frame, group_rows, usable
from memstore.kernels.best_codes import BYTE, hold, numbers
from memstore.kernels.search_blocks import KeyChunk, KeyChunks

PLACES = 1 << 32
FIRST_CHUNK_KEYS = 4096
LARGEST_CHUNK_KEYS = 1 << 18
LARGEST_CHUNK_BYTES = 1 << 28
"""Limit for the keys of a chunk on a GPU, if larger: every chunk takes the same launches, however large it is."""
GATHERED_NUMBERS = 1 << 18
"""Key numbers gathered at a time, to stay in the processor's cache."""
CODED_AFTER = 64
"""Queries after which new keys get codes: to encode a key takes as long as some hundred queries take to read it."""
SHARED = 4
"""Queries for each block of a chunk above which its keys are multiplied in place."""
GATHERED_QUERIES = 1 << 10
"""Queries whose keys are gathered at a time on a GPU."""


class Tile(NamedTuple):
    """Some blocks of a chunk, small enough that their scores stay in the processor's cache."""

    keys: Tensor
    """``[G, n, P, D]``, as stored"""
    ids: Tensor
    """``[n]`` int64"""
    rows: Tensor
    """``[n]`` int64: rows of the blocks in their chunk."""


class Chunk:
    """Room for ``capacity`` blocks: ``keys [G, capacity, P, D]``, with rows ``< used`` filled.

    Signs (``dtype`` bool) are stored as ``memstore.kernels.best_codes.hold`` makes them: uint8, with last dimension
    ``ceil(D / 8)``.

    With a ``frame``, complete groups of blocks also get int8 codes in it, when a search first reads codes.
    """

    def __init__(
        self,
        capacity: int,
        sizes: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        frame: Frame | None = None,
    ) -> None:
        heads, keys_per_block, dim = sizes
        held, width = held_as(dtype, dim)
        with torch.inference_mode(False):  # tensors made in inference mode could not be filled outside of it
            self.keys = torch.empty(heads, capacity, keys_per_block, width, dtype=held, device=device)
            self.ids = torch.empty(capacity, dtype=torch.int64, device=device)
            self.alive = torch.zeros(capacity, dtype=torch.bool, device=device)
            self.codes = None if frame is None else Codes(capacity, sizes, frame)
        self.used = 0
        self.count = 0
        """Blocks that were not removed."""
        self.ascending = True
        """Whether ids grow with the rows."""
        self._first_id = self._last_id = -1
        """Ids of the first and the last row, known without waiting for a device."""
        self._sealed = False

    @classmethod
    def of(cls, ids: Tensor, keys: Tensor, codes: Codes | None) -> Chunk:
        """Make a read-only chunk around ``ids [n]``, ``keys [G, n, P, D]`` and their codes, without a copy."""
        heads, n, keys_per_block, width = keys.shape
        chunk = cls(0, (heads, keys_per_block, width), keys.dtype, keys.device)
        chunk.ids, chunk.keys, chunk.codes = ids, keys, codes
        chunk.alive = torch.ones_like(ids, dtype=torch.bool)  # on the device of the keys
        chunk.used = chunk.count = n
        chunk._sealed = True
        chunk.ascending = bool((ids[1:] > ids[:-1]).all())
        chunk._first_id, chunk._last_id = int(ids[0]), int(ids[-1])
        return chunk

    @property
    def room(self) -> int:
        """Return how many more blocks can be added."""
        return 0 if self._sealed else self.ids.numel() - self.used

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.ids.nbytes + self.alive.nbytes + (self.codes.nbytes if self.codes else 0)

    @property
    def smallest_id(self) -> int:
        """Return the smallest id, possibly of a removed block."""
        return self._first_id if self.ascending else int(self.ids[: self.used].min())

    @property
    def largest_id(self) -> int:
        """Return the largest id of the blocks that were not removed."""
        return self._last_id if self.ascending else int(self.live().max())

    def live(self) -> Tensor:
        """Return the ids ``[n]`` of the blocks in this chunk, in the order they were added."""
        return self.ids[: self.used][self.alive[: self.used]]

    def live_keys(self) -> Tensor:
        """Return their keys ``[G, n, P, D]``, as stored."""
        alive = self.alive[: self.used]
        keys = self.keys[:, : self.used]
        return keys if bool(alive.all()) else keys[:, alive]

    def fill(self, ids: Tensor, keys: Tensor) -> None:
        """Copy blocks ``ids [n]``, ascending, with stored-form ``keys [n, G, P, D]``, to the next free rows."""
        rows = slice(self.used, self.used + ids.numel())
        self.ascending &= not self.used or int(ids[0]) > self._last_id
        self._first_id = self._first_id if self.used else int(ids[0])
        self._last_id = int(ids[-1])
        self.ids[rows], there = to_device([ids, keys], self.keys.device)
        self.keys[:, rows].copy_(there.transpose(0, 1))
        self.alive[rows] = True
        self.used += ids.numel()
        self.count += ids.numel()

    def of_head(self, head: int, number: int, wanted: Tensor | None) -> KeyChunk:
        """Return the keys of a head, for searches in C; ``number`` is that of this chunk."""
        codes = None if self.codes is None else self.codes.of_head(head)
        return KeyChunk(self.keys[head, : self.used], self.ids, wanted, number * PLACES, codes)

    def holds(self, ids: Tensor) -> Tensor:
        """Return which of the ascending ``ids [n]`` are in this chunk."""
        return self._find(ids)[1]

    def drop(self, ids: Tensor) -> None:
        """Remove the blocks of this chunk that are in the ascending ``ids [n]``; rows at the end become free again."""
        rows, here = self._find(ids)
        self.alive[rows[here]] = False
        self.count -= int(here.sum())
        if not self.alive[self.used - 1 : self.used].any():
            alive = self.alive[: self.used].nonzero()
            self.used = int(alive[-1]) + 1 if alive.numel() else 0
            self._last_id = int(self.ids[self.used - 1]) if self.used else -1
        self.ascending |= not self.used
        if self.codes is not None:
            self.codes.cut(self.used)

    def tiles(self, rows_per_tile: int, rows: Tensor) -> Iterator[Tile]:
        """Yield the blocks at ascending ``rows [n]``, some at a time: views of adjacent rows, else copies."""
        for start in range(0, rows.numel(), rows_per_tile):
            piece = rows[start : start + rows_per_tile]
            first, last = int(piece[0]), int(piece[-1])
            if last - first + 1 == piece.numel():
                yield Tile(self.keys[:, first : last + 1], self.ids[first : last + 1], piece)
            else:
                yield Tile(self.keys.index_select(1, piece), self.ids[piece], piece)

    def wanted(self, allowed: range | Tensor | None) -> Tensor:
        """Return which rows ``[used]`` hold a block that is ``allowed``."""
        ids = self.ids[: self.used]
        alive = self.alive[: self.used]
        return alive.clone() if allowed is None else alive & allows(allowed, ids)

    # Rows on the host, so nothing waits for a device.
    def run_of(self, allowed: range | Tensor | None) -> Tensor | None:
        """Return rows ``[n]`` of ``allowed`` blocks if all ids are consecutive and a range is allowed; else None."""
        first, last = self._first_id, self._last_id
        one_run = self.ascending and self.count == self.used == last - first + 1
        if not one_run or not (allowed is None or (isinstance(allowed, range) and allowed.step == 1)):
            return None
        wanted = range(first, last + 1) if allowed is None else allowed
        start = max(0, wanted.start - first)
        return torch.arange(start, max(start, min(last + 1, wanted.stop) - first))

    def _find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows ``[n]`` of ``ids [n]``, and which of them are right; the other ids are not in this chunk."""
        if not self.used or not ids.numel():
            return torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
        held, order = self.ids[: self.used], None
        if not self.ascending:
            held, order = held.sort(stable=True)
        if int(ids[0]) > int(held[-1]) or int(ids[-1]) < int(held[0]):
            return torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
        # The last of equal ids: if a block was removed and added again, the row before it is dead.
        rows = (torch.searchsorted(held, ids, right=True) - 1).clamp(min=0)
        same = held[rows] == ids
        rows = rows if order is None else order[rows]
        return rows, same & self.alive[rows]


def held_as(dtype: torch.dtype, dim: int) -> tuple[torch.dtype, int]:
    """Return the stored type of keys of ``dim`` numbers, and the stored length of one."""
    return (torch.uint8, -(-dim // BYTE)) if dtype == torch.bool else (dtype, dim)


class Chunks:
    """All chunks of an index, by their numbers.

    ``sizes``: key heads ``G``, keys of a block ``P``, numbers of a key ``D``. Codes are stored beside the keys if the
    processor is faster with them.
    """

    def __init__(self, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.sizes, self.dtype, self.device = sizes, dtype, device
        self.coded = dtype.is_floating_point and usable(device, sizes[2])
        self.by_number: dict[int, Chunk] = {}
        self.next_number = 0
        self.largest_id = -1
        self._frame: Frame | None = None
        self._whole: KeyChunks | None = None
        """What ``in_c`` returns for all blocks; None: to be made."""
        self._asked = 0
        """Queries since keys got codes."""
        self._uncoded = False
        """Whether keys were added since."""

    def __len__(self) -> int:
        return sum(chunk.count for chunk in self.by_number.values())

    @property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in self.by_number.values())

    @property
    def ascending(self) -> bool:
        """Whether ids grow with the rows in every chunk."""
        return all(chunk.ascending for chunk in self.by_number.values())

    @property
    def end(self) -> int:
        """Return the place after the last block."""
        if not self.by_number:
            return 0
        number = max(self.by_number)
        return number * PLACES + self.by_number[number].used

    def add(self, ids: Tensor, keys: Tensor) -> None:
        """Add new blocks ``ids [n]``, ascending, with ``keys [n, G, P, D]``.

        Raises ``InvalidArgument`` for numbers that ``dtype`` cannot hold.
        """
        keys, start = keys if self.dtype.is_floating_point else hold(keys, self.dtype), 0
        self._whole, self._uncoded = None, True
        while start < ids.numel():
            chunk = self._with_room()
            stop = min(start + chunk.room, ids.numel())
            chunk.fill(ids[start:stop], keys[start:stop])
            start = stop
        if ids.numel():
            self.largest_id = max(self.largest_id, int(ids[-1]))

    def remove(self, ids: Tensor) -> None:
        """Remove all blocks in the ascending ``ids [n]`` that exist."""
        self._whole = None
        for number, chunk in list(self.by_number.items()):
            chunk.drop(ids)
            if not chunk.used:
                del self.by_number[number]
        self.largest_id = max((chunk.largest_id for chunk in self.by_number.values()), default=-1)
        self._frame = self._frame if self.by_number else None

    def holds(self, ids: Tensor) -> Tensor:
        held = torch.zeros_like(ids, dtype=torch.bool)
        for chunk in self.by_number.values():
            held |= chunk.holds(ids)
        return held

    def wanted(self, allowed: range | Tensor | None, first: int = 0) -> dict[int, Tensor | None]:
        """Return which rows ``[used]`` of each chunk from ``first`` on hold an ``allowed`` block; None: all."""
        everything = self._all_allowed(allowed)
        return {
            number: None if everything and chunk.count == chunk.used else chunk.wanted(allowed)
            for number, chunk in self.by_number.items()
            if number >= first
        }

    def in_c(self, allowed: range | Tensor | None, queries: int, start: int = 0) -> KeyChunks:
        """Return the keys of ``allowed`` blocks, from place ``start`` on, for a search in C; they hold until a change.

        Once enough ``queries`` were asked, keys without codes get them.
        """
        self._asked += queries
        if self._uncoded and self._asked >= CODED_AFTER:
            for chunk in self.by_number.values():
                if chunk.codes is not None:
                    chunk.codes.extend(chunk.keys, chunk.used)
            self._asked, self._uncoded, self._whole = 0, False, None  # last: other threads search too
        whole, coded = self._whole, not self._uncoded
        if whole is not None and not start and self._all_allowed(allowed):
            return whole
        first, row = divmod(start, PLACES)
        wanted, chunks = self.wanted(allowed, first), [pair for pair in self.by_number.items() if pair[0] >= first]
        if row and first in wanted:
            here = wanted[first]
            wanted[first] = here = torch.ones(self.by_number[first].used, dtype=torch.bool) if here is None else here
            here[:row] = False
        codes = [chunk.codes for _, chunk in chunks if chunk.codes is not None]
        heads, frames = [], []
        for head in range(self.sizes[0]):
            heads.append([chunk.of_head(head, number, wanted[number]) for number, chunk in chunks])
            frames += [codes[0].frame.of_head(head, codes)] if codes else []
        made = KeyChunks(heads, frames, len(self))
        if not start and self._all_allowed(allowed) and coded != self._uncoded:  # another thread may have made codes
            self._whole = made
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_whole": None}  # addresses

    def _all_allowed(self, allowed: range | Tensor | None) -> bool:
        if not isinstance(allowed, range) or allowed.step != 1 or not self.by_number:
            return allowed is None
        least = min(chunk.smallest_id for chunk in self.by_number.values())
        return allowed.start <= least and self.largest_id < allowed.stop

    def ids_at(self, places: Tensor) -> Tensor:
        """Return the ids of the blocks at ``places [...]``; -1 for place -1."""
        ids = torch.full_like(places, -1)
        for number, chunk in self.by_number.items():
            here = places.div(PLACES, rounding_mode="floor") == number
            ids[here] = chunk.ids[places[here] % PLACES]
        return ids

    def places(self) -> Tensor:
        places = [chunk.alive[: chunk.used].nonzero().squeeze(1) + n * PLACES for n, chunk in self.by_number.items()]
        return torch.cat(places) if places else torch.empty(0, dtype=torch.int64)

    def score(self, places: Tensor, queries: Tensor, head: int) -> tuple[Tensor, Tensor]:
        """Return scores of the blocks at ``places [R, n]`` for ``queries [R, D]``, and the matching keys, ``[R, n]``.

        Scores are float32 for keys of any type; -inf and -1 for place -1.
        """
        if self.device.type != "cpu":
            return self._score_there(places, queries, head)
        scores = torch.full(places.shape, -torch.inf, dtype=torch.float32)
        offsets = torch.full_like(places, -1)
        for number, chunk in self.by_number.items():
            row, column = (places.div(PLACES, rounding_mode="floor") == number).nonzero().unbind(1)
            blocks, keys = places[row, column] % PLACES, chunk.keys[head].flatten(1)
            scores[row, column], offsets[row, column] = self._score_each(keys, blocks, queries, row)
        return scores, offsets

    def _score_each(self, keys: Tensor, blocks: Tensor, queries: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores ``[V]`` and offsets of ``blocks [V]``, rows of ``keys [n, P * D]``, for ``queries[row]``."""
        _, keys_per_block, dim = self.sizes
        per_step = max(1, GATHERED_NUMBERS // (keys_per_block * dim))
        if keys_per_block > 1 and len(blocks) > max(per_step, SHARED * len(keys)):
            # Many queries found the same blocks: each block is multiplied in place with all of its queries.
            by_block = blocks.argsort(stable=True)
            found, counts = blocks[by_block].unique_consecutive(return_counts=True)
            asking = row[by_block].split(counts.tolist())
            best = [
                (queries.index_select(0, rows) @ self._numbers(keys[block : block + 1])[0].T).max(1)
                for block, rows in zip(found.tolist(), asking, strict=True)
            ]
            back = by_block.argsort()
            return torch.cat([each.values for each in best])[back], torch.cat([each.indices for each in best])[back]
        scores, offsets = torch.empty(len(blocks), dtype=torch.float32), torch.empty_like(blocks)
        for at in range(0, len(blocks), per_step):
            step = slice(at, at + per_step)
            products = self._numbers(keys.index_select(0, blocks[step])).bmm(queries[row[step]].unsqueeze(2))
            scores[step], offsets[step] = products.squeeze(2).max(1)
        return scores, offsets

    def _score_there(self, places: Tensor, queries: Tensor, head: int) -> tuple[Tensor, Tensor]:
        """Score on a GPU: every place in every chunk, because selecting the right chunk makes the host wait."""
        _, keys_per_block, dim = self.sizes
        scores, offsets = [], []
        for some, asked in zip(places.split(GATHERED_QUERIES), queries.split(GATHERED_QUERIES), strict=True):
            best = torch.full(some.shape, -torch.inf, dtype=torch.float32, device=self.device)
            which = torch.full_like(some, -1)
            for number, chunk in self.by_number.items():
                here = some.div(PLACES, rounding_mode="floor") == number
                rows = torch.where(here, some % PLACES, 0)
                keys = self._numbers(chunk.keys[head].flatten(1).index_select(0, rows.flatten()))
                keys = keys.view(len(some), -1, dim)  # [R, n * P, D]
                products = keys.bmm(asked.unsqueeze(2)).view(*some.shape, keys_per_block)
                highest, offset = products.max(2)
                best, which = torch.where(here, highest, best), torch.where(here, offset, which)
            scores.append(best)
            offsets.append(which)
        return torch.cat(scores), torch.cat(offsets)

    def _numbers(self, keys: Tensor) -> Tensor:
        """Return stored keys of blocks, ``[n, P * D]``, as ``[n, P, D]`` float32."""
        _, keys_per_block, dim = self.sizes
        keys = keys.unflatten(1, (keys_per_block, -1))
        return keys.float() if self.dtype.is_floating_point else numbers(keys, dim)

    def content(self) -> tuple[Tensor, Tensor]:
        """Return ids ``[n]`` in the order of their places, and stored keys ``[G, n, P, D]``, on the CPU."""
        heads, keys_per_block, dim = self.sizes
        held, width = held_as(self.dtype, dim)
        none = torch.empty(heads, 0, keys_per_block, width, dtype=held)
        chunks = self.by_number.values()
        ids = torch.cat([torch.empty(0, dtype=torch.int64), *(chunk.live().cpu() for chunk in chunks)])
        return ids, torch.cat([none, *(chunk.live_keys().cpu() for chunk in chunks)], 1)

    def tensors(self) -> dict[str, Tensor]:
        """Return the content of a file: all blocks in the order of their places, with their codes, on the CPU."""
        ids, keys = self.content()
        tensors = {"ids": ids, "keys": keys}
        if self.coded and len(self) > group_rows(self.sizes[1]):
            frame = Frame.of(tensors["keys"].flatten(1, 2)) if self._frame is None else self._frame
            codes = Codes(len(self), self.sizes, frame)
            codes.extend(tensors["keys"], len(self))
            tensors |= {f"code_{name}": tensor for name, tensor in codes.tensors().items()}
        return tensors

    def check_codes(self, content: Content) -> None:
        """Raise ``DamagedError`` if a file of ``tensors`` has codes that do not fit its keys."""
        if not any(name.startswith("code_") for name in content.tensors):
            return
        heads, keys_per_block, dim = self.sizes
        rows = group_rows(keys_per_block)
        turned = dim if dim <= LARGEST_TURNED_DIM else 0
        of_groups = {f"code_{name}": (torch.float32, (heads, "g")) for name in ("scales", "lost", "longest")}
        content.check(
            code_values=(torch.int8, (heads, "g", rows * keys_per_block, dim)),
            code_centre=(torch.float32, (heads, dim)),
            code_turn=(torch.float64, (heads, turned, turned)),
            code_back=(torch.float64, (heads, turned, turned)),
            code_stretch=(torch.float64, (heads,)),
            **of_groups,
        )
        content.require(content.tensors["code_scales"].shape[1] * rows <= len(content.tensors["ids"]), "codes")

    def replace(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the content by the result of ``tensors``, in one chunk, without a copy."""
        ids, keys = tensors["ids"], tensors["keys"]
        coded = {name.removeprefix("code_"): tensor for name, tensor in tensors.items() if name.startswith("code_")}
        self.by_number, self._frame, self._whole, self._uncoded = {}, None, None, True
        if ids.numel():
            codes = Codes.of(self.sizes[1], coded) if coded and self.coded else None
            self._frame = None if codes is None else codes.frame
            self.by_number[self.next_number] = Chunk.of(ids.to(self.device), keys.to(self.device), codes)
            self.next_number += 1
        self.largest_id = int(ids.max()) if ids.numel() else -1

    @property
    def _largest(self) -> int:
        """Return the number of keys of the largest chunk."""
        if self.device.type == "cpu":
            return LARGEST_CHUNK_KEYS
        heads, _, dim = self.sizes
        held, width = held_as(self.dtype, dim)
        return max(LARGEST_CHUNK_KEYS, LARGEST_CHUNK_BYTES // (heads * width * held.itemsize))

    def _with_room(self) -> Chunk:
        last = self.by_number.get(self.next_number - 1)
        if last is None or not last.room:
            keys_per_block = self.sizes[1]
            held = sum(chunk.ids.numel() for chunk in self.by_number.values()) * keys_per_block
            keys = min(max(held, FIRST_CHUNK_KEYS), self._largest)
            if last is not None and self._frame is None and self.coded:
                # One frame for all chunks: any frame is correct, and the first chunk is a good sample of this model's
                # keys. A better frame would only reduce the scoring.
                self._frame = Frame.of(last.keys[:, : last.used].flatten(1, 2))
                with torch.inference_mode(False):
                    last.codes = Codes(last.ids.numel(), self.sizes, self._frame)
            last = Chunk(max(1, keys // keys_per_block), self.sizes, self.dtype, self.device, self._frame)
            self.by_number[self.next_number] = last
            self.next_number += 1
        return last
