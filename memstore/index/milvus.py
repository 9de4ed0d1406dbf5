"""Landmarks in Milvus: ``milvus:PATH.db`` is a file of the embedded engine, ``milvus:http://host:port`` a server.

One client serves both. Each index is a separate collection with a random name, and one entity for every key: block,
head, offset and vector. Milvus finds the best keys of one head by inner product. Scores are computed again from the
returned vectors, so rounding in its index does not matter. ``close`` drops the collection: the store is the truth, and
``save`` and ``load`` use a file as in any other index.

``pip install 'torch-memstore[milvus]'`` brings both. No other part of memstore imports them.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memstore.errors import InvalidArgument, MemstoreError
from memstore.index import contract, files
from memstore.index.contract import IndexCapabilities, SearchResult, VectorIndex

STEP = 1000
"""Entities of one request."""
MOST = 16_384
"""Most entities that Milvus returns for one query."""
SERVERS = ("http://", "https://", "tcp://", "unix:")


class MilvusIndex(VectorIndex):
    """Keys ``[G, D]`` of ``P`` per block in a collection. ``settings`` is a file, or the address of a server.

    The embedded engine searches exactly. A server uses the index that it builds by itself, which may miss blocks.
    """

    capabilities = IndexCapabilities(exact=False, dense=False)
    kind = "milvus"

    def _prepare(self, settings: str) -> None:
        self.where = settings
        self._client = _connect(settings)
        self._name = f"memstore_{uuid.uuid4().hex}"
        self._ids: set[int] = set()
        self._create()

    def __len__(self) -> int:
        return len(self._ids)

    def __repr__(self) -> str:
        return f"MilvusIndex({len(self)} blocks, {self.where})"

    @property
    def nbytes(self) -> int:
        """Return the bytes of the keys, wherever they are, and of the ids in this process."""
        return len(self._ids) * (self.key_heads * self.keys_per_block * (4 * self.key_dim + 32) + 8)

    def add(self, ids: Tensor, keys: Tensor) -> None:
        self._check_blocks(ids, keys)
        blocks = ids.tolist()
        contract.check_new(self._held(ids), ids)
        self._insert(blocks, keys)
        self._ids.update(blocks)

    def remove(self, ids: Tensor) -> None:
        contract.check_ids(ids)
        blocks = ids.tolist()
        contract.check_held(self._held(ids), ids)
        for some in _steps(blocks):
            self._call("delete", self._name, filter=f"block in {some}")
        self._ids.difference_update(blocks)

    def search(self, queries: Tensor, k: int, *, allowed: range | Tensor | None = None) -> SearchResult:
        contract.check_top_k(k)
        contract.check_allowed(allowed)
        grouped = self._grouped(queries).detach()
        scores = torch.full((*grouped.shape[:2], k), -torch.inf)
        ids, offsets = (torch.full((*grouped.shape[:2], k), -1) for _ in range(2))
        among = _among(self._ids, allowed)
        if among is not None and grouped.numel():
            for head in range(self.key_heads):
                for row, hits in enumerate(self._hits(grouped[head], head, k, among)):
                    best = _best_of_blocks(grouped[head, row], hits)[:k]
                    for place, (score, block, offset) in enumerate(best):
                        scores[head, row, place], ids[head, row, place] = score, block
                        offsets[head, row, place] = offset
        shape = (*queries.shape[:2], k)
        return SearchResult(*(part.reshape(shape).to(queries.device) for part in (scores, ids, offsets)))

    def facts(self) -> Mapping[str, Any]:
        return {"kind": self.kind, "where": self.where, "collection": self._name}

    def close(self) -> None:
        if self._client is not None:
            self._call("drop_collection", self._name)
            self._client.close()
            self._client = None

    def save(self, path: Path) -> None:
        ids = torch.tensor(sorted(self._ids), dtype=torch.int64)
        keys = torch.empty(len(ids), self.key_heads, self.keys_per_block, self.key_dim)
        rows = {block: row for row, block in enumerate(ids.tolist())}
        for some in _steps(ids.tolist(), max(1, MOST // (self.key_heads * self.keys_per_block) // 2)):
            for entity in self._call("query", self._name, filter=f"block in {some}", output_fields=FIELDS):
                vector = torch.tensor(entity["key"])
                keys[rows[entity["block"]], entity["head"], entity["offset"]] = vector
        files.save(path, self._about, {"ids": ids, "keys": keys})

    def load(self, path: Path) -> None:
        content = files.load(path, self._about)
        shape = ("n", self.key_heads, self.keys_per_block, self.key_dim)
        content.check(ids=(torch.int64, ("n",)), keys=(torch.float32, shape))
        old, self._name = self._name, f"memstore_{uuid.uuid4().hex}"
        self._create()
        self._ids = set()
        self.add(content.tensors["ids"], content.tensors["keys"])
        self._call("drop_collection", old)

    def _create(self) -> None:
        from pymilvus import DataType

        schema = self._client.create_schema(auto_id=True)
        schema.add_field("entity", DataType.INT64, is_primary=True)
        for name in ("block", "head", "offset"):
            schema.add_field(name, DataType.INT64)
        schema.add_field("key", DataType.FLOAT_VECTOR, dim=self.key_dim)
        index = self._client.prepare_index_params()
        index.add_index("key", index_type="AUTOINDEX", metric_type="IP")
        # Strong consistency: a search sees all earlier additions and removals.
        self._call("create_collection", self._name, schema=schema, index_params=index, consistency_level="Strong")

    def _insert(self, blocks: list[int], keys: Tensor) -> None:
        entities = [
            {"block": block, "head": head, "offset": offset, "key": key}
            for block, heads in zip(blocks, keys.float().cpu().numpy(), strict=True)
            for head, offsets in enumerate(heads)
            for offset, key in enumerate(offsets)
        ]
        try:
            for some in _steps(entities):
                self._call("insert", self._name, data=some)
        except MemstoreError:
            self._call("delete", self._name, filter=f"block in {blocks}")
            raise

    def _hits(self, queries: Tensor, head: int, k: int, among: str) -> list[list[Any]]:
        """Return the best entities of a head for each of ``queries [R, D]``, enough to contain ``k`` blocks."""
        limit = min(k * self.keys_per_block, MOST)
        found: list[list[Any]] = []
        for some in queries.split(64):
            arguments = {"filter": f"head == {head}{among}", "limit": limit, "output_fields": FIELDS}
            found += self._call("search", self._name, data=some.tolist(), anns_field="key", **arguments)
        return found

    def _call(self, what: str, *arguments: Any, **options: Any) -> Any:
        from pymilvus import MilvusException

        if self._client is None:
            raise InvalidArgument(f"this index is closed; open the memory again to search {self.where}")
        try:
            return getattr(self._client, what)(*arguments, **options)
        except MilvusException as error:
            raise MemstoreError(f"Milvus at {self.where} cannot {what.replace('_', ' ')}: {error.message}") from error

    def _held(self, ids: Tensor) -> Tensor:
        return torch.tensor([block in self._ids for block in ids.tolist()], dtype=torch.bool)


FIELDS = ["block", "head", "offset", "key"]


def _connect(where: str) -> Any:
    """Make a client. Raises ``InvalidArgument`` if the library is missing, ``MemstoreError`` if no server answers."""
    server = where.startswith(SERVERS)
    if not server and not where.endswith(".db"):
        raise InvalidArgument(
            "an index in Milvus needs a file ending in .db or a server, such as milvus:landmarks.db or "
            f"milvus:http://localhost:19530, not milvus:{where}"
        )
    try:
        import pymilvus

        if not server:
            import milvus_lite  # noqa: F401 - the client would ask for it later, in other words
    except ImportError as error:
        raise InvalidArgument(
            f"an index in Milvus needs the package {error.name}, which is not installed: pip install "
            "'torch-memstore[milvus]', or use index='exact'"
        ) from error
    if not server:
        Path(where).expanduser().parent.mkdir(parents=True, exist_ok=True)
    try:
        return pymilvus.MilvusClient(str(Path(where).expanduser()) if not server else where, timeout=10)
    except (pymilvus.MilvusException, OSError) as error:
        if not server:
            raise MemstoreError(
                f"Milvus cannot open {where}: {error}. Only one process can open such a file. Give each process a "
                "file of its own (memstore fills it from the memory), or use index='exact'."
            ) from error
        raise MemstoreError(f"no Milvus server answers at {where}: {error}. Start it, or use index='exact'.") from error


def _among(there: set[int], allowed: range | Tensor | None) -> str | None:
    """Return the filter for the allowed blocks; None if there are none."""
    if allowed is None:
        return "" if there else None
    if isinstance(allowed, range) and allowed.step == 1:
        return f" and block >= {allowed.start} and block < {allowed.stop}" if there and allowed else None
    among = allowed if isinstance(allowed, range) else set(allowed.tolist())
    wanted = sorted(block for block in there if block in among)
    return f" and block in {wanted}" if wanted else None


def _best_of_blocks(query: Tensor, hits: list[Any]) -> list[tuple[float, int, int]]:
    """Return score, block and offset of each block's best key, in order; equal scores by block."""
    best: dict[int, tuple[float, int]] = {}
    if hits:
        entities = [hit["entity"] for hit in hits]
        scores = (torch.tensor([entity["key"] for entity in entities]) @ query).tolist()
        for entity, score in zip(entities, scores, strict=True):
            if entity["block"] not in best or score > best[entity["block"]][0]:
                best[entity["block"]] = score, entity["offset"]
    return sorted(((score, block, at) for block, (score, at) in best.items()), key=lambda each: (-each[0], each[1]))


def _steps(items: list[Any], size: int = STEP) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
