"""Subjects that the torture test knows by name: memories of both stores, and usual ways to save states by hand."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import safetensors
import torch
from safetensors.torch import load_file, save_file

import memstore
from benchmarks.torture.harness import SHAPE, States, Subject
from memstore import MemorySpec
from memstore.memory.spec import Fingerprint
from memstore.store.zarr import store as zarr

_, _HEADS, _TOKENS, _DIM = SHAPE
_SPEC = MemorySpec(
    layers=1,
    fields=dict.fromkeys(("k", "v"), (_HEADS, _TOKENS, _DIM)),
    index_layers=(),
    key_heads=1,
    key_dim=_DIM,
    block_size=_TOKENS,
    keys_per_block=1,
    fingerprint=Fingerprint(
        architecture="none", weights="0", tokenizer=None, positions="none", layout="kv", dtype="float32",
        block_size=_TOKENS,
    ),
)  # fmt: skip


class _LmdbMemory(Subject):
    """A memory on LMDB."""

    name = f"memstore {memstore.__version__}, LMDB"

    def __init__(self, folder: Path) -> None:
        self._memory = memstore.open(self.url(folder), spec=_SPEC)
        self._text = self._memory.document("text")

    @staticmethod
    def url(folder: Path) -> str:
        return str(folder)

    def __len__(self) -> int:
        return len(self._text.blocks)

    def append(self, states: States) -> None:
        tokens = np.arange(len(self._text), len(self._text) + len(states) * _TOKENS)
        with self._text.append(tokens) as batch:
            fields = torch.from_numpy(states).unbind(1)
            batch.put(0, k=fields[0], v=fields[1])

    def cut(self, blocks: int) -> None:
        self._text.truncate(blocks)

    def read(self, block: int) -> States:
        found = self._text.layer(0).gather([block])
        return np.stack([found[name][0].numpy() for name in ("k", "v")])

    def close(self) -> None:
        self._memory.close()

    @staticmethod
    def files(folder: Path) -> list[Path]:
        """Return all files except LMDB's lock, the writer's mark, and the space that is reserved for deleting."""
        return [file for file in Subject.files(folder) if not file.name.startswith(("lock.mdb", "writer.", "reserve"))]


class _ZarrMemory(_LmdbMemory):
    """A memory in Zarr, with shards small enough that the test fills some."""

    name = f"memstore {memstore.__version__}, Zarr"

    def __init__(self, folder: Path) -> None:
        zarr.SHARD_BYTES = 64 << 10  # type: ignore[attr-defined]
        super().__init__(folder)

    @staticmethod
    def url(folder: Path) -> str:
        return f"zarr:{folder}"


class _BucketMemory(_ZarrMemory):
    """The same in object storage, here a folder. Values that are not in shards yet lie beside it."""

    name = f"memstore {memstore.__version__}, object storage"

    @staticmethod
    def url(folder: Path) -> str:
        return f"zarr+file://{folder}/bucket?tail={folder}/tail"


class _TorchFile(Subject):
    """All blocks in one file, saved again by ``torch.save`` after each change, as in most examples."""

    name = f"torch.save {torch.__version__}"

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "cache.pt"
        self._blocks = self._load() if self._file.exists() else torch.empty((0, *SHAPE))

    def __len__(self) -> int:
        return len(self._blocks)

    def append(self, states: States) -> None:
        self._blocks = torch.cat([self._blocks, torch.from_numpy(states)])
        self._save()

    def cut(self, blocks: int) -> None:
        self._blocks = self._blocks[:blocks].clone()
        self._save()

    def read(self, block: int) -> States:
        return self._blocks[block].numpy()

    def _load(self) -> torch.Tensor:
        loaded: torch.Tensor = torch.load(self._file, weights_only=True)
        return loaded

    def _save(self) -> None:
        torch.save(self._blocks, self._file)


class _SafetensorsFile(_TorchFile):
    """The same in a safetensors file."""

    name = f"safetensors {safetensors.__version__}"

    def _load(self) -> torch.Tensor:
        return load_file(self._file)["blocks"]

    def _save(self) -> None:
        save_file({"blocks": self._blocks}, self._file)


class _ReplacedTorchFile(_TorchFile):
    """The same as ``_TorchFile``, but carefully: written beside the old file, synced, and renamed over it."""

    name = f"torch.save {torch.__version__}, synced and renamed"

    def _save(self) -> None:
        beside = self._file.with_suffix(".new")
        with beside.open("wb") as file:
            torch.save(self._blocks, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._file)


class ArrayFiles(Subject):
    """One NumPy file for each block."""

    name = f"numpy.save {np.__version__}, a file a block"

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def __len__(self) -> int:
        return len(list(self._folder.glob("*.npy")))

    def append(self, states: States) -> None:
        for number, each in enumerate(states, len(self)):
            np.save(self._folder / f"{number}.npy", each)

    def cut(self, blocks: int) -> None:
        for number in range(len(self) - 1, blocks - 1, -1):
            (self._folder / f"{number}.npy").unlink()

    def read(self, block: int) -> States:
        found: States = np.load(self._folder / f"{block}.npy")
        return found


SUBJECTS: dict[str, type[Subject]] = {
    "lmdb": _LmdbMemory,
    "zarr": _ZarrMemory,
    "bucket": _BucketMemory,
    "torch": _TorchFile,
    "torch-replaced": _ReplacedTorchFile,
    "safetensors": _SafetensorsFile,
    "numpy": ArrayFiles,
}
"""Subjects by the name on the command line."""
