"""Stores with a fault of their own, which the torture test is to find; and one without, as small as it gets."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np

from benchmarks.torture.harness import SHAPE, States, Subject, inflict

PLANTED = {
    ("Sound", "restart"): {"right"},
    ("Sound", "kill"): {"right"},
    ("Sound", "fill"): {"right"},
    ("Sound", "flip"): {"refused"},
    ("Sound", "truncate"): {"refused"},
    ("Sound", "swap"): {"refused"},
    ("Sound", "roll-back"): {"refused"},
    ("Unchecked", "flip"): {"wrong"},
    ("Unchecked", "swap"): {"wrong"},
    ("Unchecked", "roll-back"): {"wrong"},
    ("Overwriting", "kill"): {"lost"},
    ("Overwriting", "fill"): {"lost"},
    ("Late", "kill"): {"lost"},
    ("Piecewise", "kill"): {"torn"},
    ("Forgetful", "truncate"): {"lost"},
    ("Emptied", "truncate"): {"lost"},
    ("Careless", "fill"): {"lost", "wrong"},
    ("Crashing", "flip"): {"crashed"},
    ("Amnesiac", "restart"): {"lost"},
}
"""A store and a fault, and what it is to be found to do: one of these."""
CHANCE = {("Unchecked", "roll-back"), ("Late", "kill")}
"""Found with every seed, although most histories and most moments would hide it."""
BLOCK_BYTES = 4 * int(np.prod(SHAPE))


class Sound(Subject):
    """One file, written beside the old one, synced and renamed; a digest of all of it in front."""

    name = "sound"

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "states"
        self.blocks: list[bytes] = self.load()

    def __len__(self) -> int:
        return len(self.blocks)

    def append(self, states: States) -> None:
        self.blocks += [each.tobytes() for each in states]
        self.save()

    def cut(self, blocks: int) -> None:
        del self.blocks[blocks:]
        self.save()

    def read(self, block: int) -> States:
        return np.frombuffer(self.blocks[block], np.float32).reshape(SHAPE)

    def load(self) -> list[bytes]:
        if not self.file.exists():
            return []
        content = self.file.read_bytes()
        self.check(content)
        return [content[at : at + BLOCK_BYTES] for at in range(16, len(content), BLOCK_BYTES)]

    def check(self, content: bytes) -> None:
        if digest(content[16:]) != content[:16]:
            raise ValueError("the digest does not fit")

    def save(self) -> None:
        content = b"".join(self.blocks)
        self.put(digest(content) + content)

    def put(self, content: bytes) -> None:
        beside = self.file.with_suffix(".new")
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.file)


class Unchecked(Sound):
    """Believes what it reads."""

    def check(self, content: bytes) -> None:
        pass


class Overwriting(Sound):
    """Writes over the old file, in pieces."""

    def put(self, content: bytes) -> None:
        with self.file.open("wb", buffering=0) as file:
            for at in range(0, len(content), 4096):
                file.write(content[at : at + 4096])


class Late(Sound):
    """Writes when it is closed."""

    def put(self, content: bytes) -> None:
        self.content = content

    def close(self) -> None:
        super().put(self.content)


class Piecewise(Sound):
    """Commits one block after the other."""

    def append(self, states: States) -> None:
        for each in states:
            super().append(each[None])


class Forgetful(Sound):
    """Leaves out what is damaged, without a word."""

    def check(self, content: bytes) -> None:
        pass

    def load(self) -> list[bytes]:
        return [block for block in super().load() if len(block) == BLOCK_BYTES]


class Emptied(Sound):
    """Begins anew where something is damaged."""

    def load(self) -> list[bytes]:
        with suppress(ValueError):
            return super().load()
        return []


class Careless(Sound):
    """Swallows that the disk is full."""

    def put(self, content: bytes) -> None:
        with suppress(OSError):
            super().put(content)


class Crashing(Sound):
    """Ends its process where something is damaged."""

    def check(self, content: bytes) -> None:
        try:
            super().check(content)
        except ValueError:
            os.abort()


class Amnesiac(Sound):
    """Has its last block only as long as it is open."""

    def save(self) -> None:
        content = b"".join(self.blocks[:-1])
        self.put(digest(content) + content)


def digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def main() -> None:
    """Print, as JSON, what each pair of ``PLANTED`` did in some rounds, each pair of ``CHANCE`` with more seeds."""
    found = []
    memory = Path("/dev/shm")  # noqa: S108 - no disk is tried, so none is waited for
    folder = memory if memory.is_dir() else None
    for store, fault in PLANTED:
        for seed in range(4 if (store, fault) in CHANCE else 1):
            outcome = inflict(globals()[store], fault, 10 if fault == "kill" else 6, seed, folder)
            found.append([store, fault, seed, outcome.verdicts])
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
