"""Prompts and their answers, from a JSON Lines file, aligned with blocks: the loss is on the answers alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from memstore.errors import InvalidArgument, NotFound

IGNORED = -100


@dataclass(frozen=True)
class Pair:
    """Token ids of a prompt, aligned, and of what is to follow it."""

    prompt: list[int]
    answer: list[int]


def read_pairs(path: Path, *, prompt: str = "prompt", answer: str = "answer") -> list[tuple[str, str]]:
    """The pairs of texts in ``path``, one JSON object a line; ``prompt`` and ``answer`` name its fields.

    Raises ``NotFound`` without the file, and ``InvalidArgument`` for a line that is no such object.
    """
    try:
        lines = path.read_text("utf-8-sig").split("\n")
    except FileNotFoundError:
        raise NotFound(f"no file {path}. Name a JSON Lines file of prompts and answers.") from None
    except IsADirectoryError:
        raise InvalidArgument(f"{path} is a folder; a JSON Lines file was expected.") from None
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path} is not UTF-8 text (byte {error.start:,}).") from None
    found = [
        _pair(line, f"line {number} of {path}", prompt, answer) for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not found:
        raise InvalidArgument(f"{path} is empty: give one JSON object with a prompt and its answer a line.")
    return found


def _pair(line: str, where: str, prompt: str, answer: str) -> tuple[str, str]:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise InvalidArgument(f"{where} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidArgument(f"{where} is not an object with {prompt!r} and {answer!r}, but {type(value).__name__}")
    for name in (prompt, answer):
        if name not in value:
            raise InvalidArgument(
                f"{where} has no text {name!r}; its fields are {', '.join(map(repr, value)) or 'none'}. "
                "Choose fields with --prompt-field and --answer-field."
            )
        if not isinstance(value[name], str) or not value[name].strip():
            raise InvalidArgument(f"{where} has no text {name!r}, but {json.dumps(value[name])[:40]}: give text.")
    return value[prompt], value[answer]


def encode_pairs(pairs: list[tuple[str, str]], tokenizer: PreTrainedTokenizerBase, tokens_per_block: int) -> list[Pair]:
    """Pairs as tokens: prompts are aligned with blocks, answers end with the end-of-text token."""
    filler = filler_token(tokenizer)
    end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    prompts = tokenizer([prompt for prompt, _ in pairs], add_special_tokens=False, verbose=False)["input_ids"]
    answers = tokenizer([answer for _, answer in pairs], add_special_tokens=False, verbose=False)["input_ids"]
    return [
        Pair(align(prompt, tokens_per_block, filler), answer + end)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def collate_pairs(pairs: list[Pair]) -> dict[str, Tensor]:
    """A batch, filled up at the end, where a causal model cannot see it; so it needs no mask."""
    width = max(len(pair.prompt) + len(pair.answer) for pair in pairs)
    ids = torch.zeros(len(pairs), width, dtype=torch.int64)
    labels = torch.full_like(ids, IGNORED)
    for row, pair in enumerate(pairs):
        start, stop = len(pair.prompt), len(pair.prompt) + len(pair.answer)
        ids[row, :stop] = torch.tensor(pair.prompt + pair.answer)
        labels[row, start:stop] = ids[row, start:stop]
    return {"input_ids": ids, "labels": labels}


def align(prompt: Sequence[int], tokens_per_block: int, filler: int) -> list[int]:
    """``prompt`` with as many ``filler`` tokens in front that its last token is the first of a block.

    A block retrieves for the *next* block. So the question has to stand in complete blocks, all but its last token, and
    the answer is written with what those blocks retrieved.
    """
    return [filler] * ((1 - len(prompt)) % tokens_per_block) + list(prompt)


def filler_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token to fill up with: a newline, or the last piece of one."""
    ids: list[int] = tokenizer("\n", add_special_tokens=False)["input_ids"]
    if ids:
        return ids[-1]
    return int(tokenizer.eos_token_id or 0)
