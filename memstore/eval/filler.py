"""Filler for haystacks: tokens of real texts, from any place on, and how often they repeat."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memstore.errors import InvalidArgument, NotFound
from memstore.eval.needles import prose_text

PIECE = 1 << 16
"""Characters that are tokenised as one text."""
BATCH = 32
"""Texts that are tokenised at a time."""
OWN_TEXTS = "Python's language reference and library, on which recipes train too"

Tokens = NDArray[np.int64]


class Filler:
    """A long text as tokens, two or four bytes each. After its last token it begins again."""

    def __init__(self, tokens: NDArray[Any], name: str) -> None:
        if not len(tokens):
            raise InvalidArgument(f"the filler ({name}) is empty: name text files with --filler.")
        self.tokens = tokens
        self.name = name

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"Filler({self.name!r}, {len(self):,} tokens)"

    def take(self, start: int, count: int) -> Tokens:
        """Return ``count`` tokens from place ``start`` on; ``count`` may exceed the length of the text."""
        start %= len(self)
        if start + count <= len(self):
            return self.tokens[start : start + count].astype(np.int64)
        return self.tokens.take(np.arange(start, start + count), mode="wrap").astype(np.int64)

    def repeats(self, count: int) -> int:
        """Return how often ``count`` consecutive tokens begin this text again; 0: no token repeats."""
        return max(0, -(-count // len(self)) - 1)


def load_filler(
    tokenizer: Any,
    files: Sequence[Path] = (),
    *,
    at_most: int,
    advance: Callable[[int], None] = lambda tokens: None,  # noqa: ARG005 - nobody listens
) -> Filler:
    """Load up to ``at_most`` tokens of ``files``, one after the other; by default texts that every Python carries.

    ``advance`` hears of every token. Raises ``NotFound`` if a file is missing, ``InvalidArgument`` if it is empty or no
    text.
    """
    name = ", ".join(path.name for path in files) if files else OWN_TEXTS
    pieces = (piece for path in files for piece in _file(path)) if files else _own_texts()
    dtype = np.uint16 if len(tokenizer) <= 1 << 16 else np.int32
    parts, count = [np.empty(0, dtype)], 0
    for ids in encoded_pieces(tokenizer, pieces):
        parts.append(np.array(ids[: at_most - count], dtype))
        count += len(parts[-1])
        advance(len(parts[-1]))
        if count >= at_most:
            break
    return Filler(np.concatenate(parts), name)


def check_files(files: Sequence[Path]) -> None:
    """Raise if a file is missing or does not begin as text, before any other work."""
    for path in files:
        next(_file(path), None)


def encoded_pieces(tokenizer: Any, pieces: Iterable[str]) -> Iterator[list[int]]:
    """Yield the token ids of each of ``pieces``."""
    pieces = iter(pieces)
    while batch := list(islice(pieces, BATCH)):
        # Names of control tokens in a text count as text.
        yield from tokenizer(batch, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]


def _own_texts() -> Iterator[str]:
    text = prose_text()
    yield from (text[start : start + PIECE] for start in range(0, len(text), PIECE))
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        if not {"site-packages", "dist-packages"} & set(path.parts[len(library.parts) :]):
            yield path.read_text("utf-8", errors="replace")


def _file(path: Path) -> Iterator[str]:
    """Yield the text in ``path`` in pieces, each up to the end of a line if lines are not too long."""
    some = False
    try:
        with path.open(encoding="utf-8-sig") as file:
            while piece := file.read(PIECE):
                piece += file.readline(PIECE)
                if "\0" in piece:
                    raise InvalidArgument(f"the filler {path} is binary: it has NUL bytes. Name a text file.")
                some = some or bool(piece.strip())
                yield piece
    except FileNotFoundError:
        raise NotFound(
            f"there is no filler file {path}. Name text files with --filler, or leave the option out."
        ) from None
    except IsADirectoryError:
        raise InvalidArgument(f"the filler {path} is a folder. Name text files, each with --filler.") from None
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"the filler {path} is not UTF-8 text (at byte {error.start:,} of a piece). Name a text file, or "
            "convert it to UTF-8."
        ) from None
    if not some:
        raise InvalidArgument(f"the filler {path} is empty. Name a file with text.")
