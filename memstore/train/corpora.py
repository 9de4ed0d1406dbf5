"""Texts from files, folders of them, Hugging Face dataset folders or Python itself, and their tokens.

For training, documents are cut into segments of equal length. A seed decides their order.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from memstore.errors import InvalidArgument, NotFound
from memstore.eval.filler import encoded_pieces

Tokens = NDArray[np.int32]
Rows = NDArray[np.int32]
"""``[N, T]``."""
DATASET_FILE = "state.json"
"""The file that distinguishes a dataset folder from a folder of texts."""


class Documents:
    """The documents of files, folders of them, and dataset folders, in a fixed order; each pass reads them again."""

    def __init__(self, paths: Sequence[str | Path], *, column: str = "text") -> None:
        """Raises ``NotFound`` if a path does not exist, ``InvalidArgument`` if there is no text.

        Args:
            paths: text files, folders that are searched for ``*.txt``, or folders made by ``Dataset.save_to_disk``.
            column: the column of a dataset that holds the text.
        """
        if isinstance(paths, str | Path):
            raise InvalidArgument(f"the texts must be a list of files and folders: pass [{str(paths)!r}]")
        if not paths:
            raise InvalidArgument("there is nothing to train on: name text files, or folders with text files")
        self._column = column
        self._sources = [source for path in paths for source in _sources(Path(path).expanduser())]

    def __iter__(self) -> Iterator[str]:
        for source in self._sources:
            if source.is_dir():
                yield from _dataset(source, self._column)
            else:
                yield _text(source)


def digest(texts: Iterable[str]) -> str:
    """Return a checksum of ``texts``."""
    state = xxhash.xxh3_64()
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def _sources(path: Path) -> list[Path]:
    if not path.exists():
        raise NotFound(
            f"there is no file or folder {path}. Name text files, folders of .txt files, or a dataset folder."
        )
    if not path.is_dir() or (path / DATASET_FILE).exists():
        return [path]
    if (path / "dataset_dict.json").exists():
        parts = ", ".join(sorted(each.name for each in path.iterdir() if each.is_dir()))
        raise InvalidArgument(f"{path} holds several datasets: name the folder of one of them ({parts})")
    found = sorted(path.rglob("*.txt"))
    if not found:
        raise InvalidArgument(f"the folder {path} has no .txt files, and it is not a dataset folder ({DATASET_FILE})")
    return found


def _text(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except PermissionError:
        raise InvalidArgument(f"{path} cannot be read: permission denied. Change its permissions.") from None
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path} is not UTF-8 text (at byte {error.start:,}); convert it first.") from None
    if "\0" in text:
        raise InvalidArgument(f"{path} is binary: it has NUL bytes. Name a text file.")
    return text.replace("\r\n", "\n")


def _dataset(path: Path, column: str) -> Iterator[str]:
    try:
        import datasets
    except ModuleNotFoundError:
        raise NotFound(
            f"{path} is a dataset folder; reading it needs the package datasets: pip install 'torch-memstore[train]'"
        ) from None
    dataset = datasets.load_from_disk(str(path))
    if column not in dataset.column_names:
        raise InvalidArgument(
            f"the dataset {path} has no column {column!r}: its columns are {', '.join(dataset.column_names)}. "
            "Choose with --column."
        )
    for row in dataset:
        yield str(row[column])


def encoded(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[Tokens]:
    """Yield the token ids of each document that is not empty."""
    return (np.array(ids, np.int32) for ids in encoded_pieces(tokenizer, documents) if ids)


def sources(characters: int = 2_000_000) -> str:
    """Return the first ``characters`` of the standard library's own modules."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    parts, total = [], 0
    for path in sorted(folder.glob("*.py")):
        parts.append(path.read_text(encoding="utf-8", errors="replace"))
        total += len(parts[-1]) + 2
        if total >= characters:
            break
    if not parts:
        raise NotFound(f"the sources of the standard library, which recipes train on, are not in {folder}")
    return "\n\n".join(parts)[:characters]


END_OF_TEXT = "<|end|>"
PADDING = "<|pad|>"
# Words with the space before them, single digits, and runs of other signs, in any language.
_PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of ``vocabulary`` tokens in which every digit is a token of its own.

    Single digits let a small model copy numbers that it has never seen. The landmark is not among the tokens: it
    belongs to the model.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=PADDING)


def cut(documents: Iterable[Tokens], context: int, end: int) -> Rows:
    """Cut ``documents`` into segments ``[N, context]``. Raises ``InvalidArgument`` if they do not fill a single one.

    A document that fills a segment starts one: its segments begin at its start, without a gap. Remainders and shorter
    documents are joined one after another, each closed by the token ``end``, and cut in the same way. The last
    incomplete segment is left out.
    """
    rows: list[Tokens] = []
    rest: list[Tokens] = []
    for document in documents:
        whole = len(document) // context
        rows += np.split(document[: whole * context], whole) if whole else []
        rest.append(np.append(document[whole * context :], np.int32(end)))
    joined = np.concatenate(rest) if rest else np.empty(0, np.int32)
    count = len(joined) // context
    rows += np.split(joined[: count * context], count) if count else []
    if not rows:
        raise InvalidArgument(
            f"the texts have {len(joined):,} tokens, but one segment needs {context:,}: use more text or a "
            "smaller --context"
        )
    return np.stack(rows)


def held_out(rows: Rows, fraction: float) -> tuple[Rows, Rows]:
    """Split ``rows`` for training and measuring: the measured ``fraction`` is evenly spaced over the corpus."""
    if not 0 <= fraction < 1:
        raise InvalidArgument(f"--valid must be the share of the text to hold out, from 0 to below 1, not {fraction}")
    if not fraction:
        return rows, rows[:0]
    count = max(1, round(fraction * len(rows)))
    if count >= len(rows):
        raise InvalidArgument(
            f"the texts have {len(rows)} segments, so holding out {fraction:g} leaves nothing to train on. Use "
            "more text or a smaller --context."
        )
    held = np.zeros(len(rows), bool)
    held[(np.arange(count) * len(rows)) // count + len(rows) // count // 2] = True
    return rows[~held], rows[held]


class ShuffledItems(Dataset[Any]):
    """``count`` items drawn from ``items``. Each pass has a new order, which depends only on the seed and the pass."""

    def __init__(self, items: Any, count: int, seed: int) -> None:
        self._items = items
        self._count = count
        self._seed = seed
        self._pass, self._order = -1, np.empty(0, np.int64)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Any:
        turn, place = divmod(number, len(self._items))
        if turn != self._pass:
            self._pass, self._order = turn, np.random.default_rng([self._seed, turn]).permutation(len(self._items))
        return self._items[int(self._order[place])]


def collate(rows: list[Tokens]) -> dict[str, Tensor]:
    """Return a batch in which every token is also a label."""
    ids = torch.from_numpy(np.stack(rows).astype(np.int64))
    return {"input_ids": ids, "labels": ids}
