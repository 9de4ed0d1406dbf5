"""Prompts and answers from a JSON Lines file, aligned with blocks; a model's own answers, and their scores.

In training on pairs, only the answers count for the loss. Answers are scored by exact match, and by ROUGE with the
package ``rouge_score``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from memstore.errors import InvalidArgument, NotFound
from memstore.json_checks import parsed

IGNORED = -100
"""The label that the losses of transformers leave out."""
ROUGE = ("rouge1", "rouge2", "rougeL")


class _Pair(NamedTuple):
    """Token ids of an aligned prompt, and of its answer."""

    prompt: list[int]
    answer: list[int]


def json_lines(path: Path, what: str) -> list[tuple[str, Any]]:
    """Read a file of ``what`` with one JSON object a line; return each value with a text that names its line.

    Raises ``NotFound`` without the file, and ``InvalidArgument`` if it is empty or has other content.
    """
    try:
        lines = path.read_text("utf-8-sig").split("\n")
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(f"there is no file {path}. Name a JSON Lines file of {what}.") from None
    except IsADirectoryError:
        raise InvalidArgument(f"{path} is a folder. Name a JSON Lines file.") from None
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path} is not UTF-8 text (at byte {error.start:,}). Convert it to UTF-8.") from None
    except (OSError, ValueError) as error:  # a name that is too long, or has a NUL
        raise InvalidArgument(f"{path} cannot be read ({error}). Name a JSON Lines file.") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"line {number} of {path}"
        try:
            value = parsed(line.encode())
            json.dumps(value, ensure_ascii=False).encode()  # JSON allows half of a character, tokenizers do not
        except ValueError as error:
            raise InvalidArgument(f"{where} is not valid JSON: {error}") from None
        found.append((where, value))
    if not found:
        raise InvalidArgument(f"{path} is empty: write one JSON object per line, with {what}.")
    return found


def read_pairs(path: Path, *, prompt: str = "prompt", answer: str = "answer") -> list[tuple[str, str]]:
    """Read the pairs of texts in ``path``, one JSON object a line; ``prompt`` and ``answer`` name its fields.

    Raises ``NotFound`` without the file, and ``InvalidArgument`` for a line that is no such object.
    """
    return [_pair(value, where, prompt, answer) for where, value in json_lines(path, "prompts and answers")]


def _pair(value: Any, where: str, prompt: str, answer: str) -> tuple[str, str]:
    if not isinstance(value, dict):
        raise InvalidArgument(f"{where} must be an object with {prompt!r} and {answer!r}, not {type(value).__name__}")
    for name in (prompt, answer):
        if name not in value:
            raise InvalidArgument(
                f"{where} has no field {name!r}; its fields are {', '.join(map(repr, value)) or 'none'}. Choose "
                "fields with --prompt-field and --answer-field."
            )
        if not isinstance(value[name], str) or not value[name].strip():
            raise InvalidArgument(
                f"{where}: the field {name!r} must be a non-empty text, not {json.dumps(value[name])[:40]}."
            )
    return value[prompt], value[answer]


def encode_pairs(
    pairs: list[tuple[str, str]], tokenizer: PreTrainedTokenizerBase, tokens_per_block: int
) -> list[_Pair]:
    """Encode pairs as tokens: prompts are aligned with blocks, answers end with the end-of-text token."""
    filler = filler_token(tokenizer)
    end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    prompts = tokenizer([prompt for prompt, _ in pairs], add_special_tokens=False, verbose=False)["input_ids"]
    answers = tokenizer([answer for _, answer in pairs], add_special_tokens=False, verbose=False)["input_ids"]
    return [
        _Pair(align(prompt, tokens_per_block, filler), answer + end)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def collate_pairs(pairs: list[_Pair]) -> dict[str, Tensor]:
    """Make a batch, padded at the end. A causal model does not see the padding, so it needs no mask."""
    width = max(len(pair.prompt) + len(pair.answer) for pair in pairs)
    ids = torch.zeros(len(pairs), width, dtype=torch.int64)
    labels = torch.full_like(ids, IGNORED)
    for row, pair in enumerate(pairs):
        start, stop = len(pair.prompt), len(pair.prompt) + len(pair.answer)
        ids[row, :stop] = torch.tensor(pair.prompt + pair.answer)
        labels[row, start:stop] = ids[row, start:stop]
    return {"input_ids": ids, "labels": labels}


def align(prompt: Sequence[int], tokens_per_block: int, filler: int) -> list[int]:
    """Put ``filler`` tokens before ``prompt`` until its last token is the first of a block.

    A block retrieves for the *next* block. So the question has to stand in complete blocks, except for its last token.
    The answer is then written with the blocks that those blocks retrieved.
    """
    return [filler] * ((1 - len(prompt)) % tokens_per_block) + list(prompt)


def filler_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token for padding: a newline, or the last piece of one."""
    ids: list[int] = tokenizer("\n", add_special_tokens=False)["input_ids"]
    if ids:
        return ids[-1]
    return int(tokenizer.eos_token_id or 0)


def rouge_scorer() -> Any:
    """Return the scorer, with the stemmer that papers use. Raises ``NotFound`` without its package."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ModuleNotFoundError:
        raise NotFound("ROUGE needs the package rouge-score: pip install 'torch-memstore[eval]'") from None
    return RougeScorer(list(ROUGE), use_stemmer=True)


@torch.no_grad()
def generate_answers(
    model: Any,
    tokenizer: Any,
    pairs: Sequence[tuple[str, str]],
    *,
    max_tokens: int = 64,
    advance: Callable[[int], None] = lambda tokens: None,  # noqa: ARG005 - nobody listens
) -> list[str]:
    """Generate an answer to each prompt, always the likeliest token, to its end or ``max_tokens``.

    Prompts are aligned as in training: their last token is the first of a block.
    """
    answers = []
    for pair in encode_pairs(list(pairs), tokenizer, model.config.tokens_per_block):
        ids = torch.tensor([pair.prompt], device=model.device)
        generated = model.generate(
            ids,
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        answers.append(tokenizer.decode(generated[0, len(pair.prompt) :], skip_special_tokens=True))
        advance(len(pair.prompt))
    return answers


def judged(pairs: Sequence[tuple[str, str]], answers: Sequence[str]) -> list[dict[str, Any]]:
    """Return each answer with its scores: ``exact``, and the F measures of ROUGE-1, 2 and L."""
    scorer = rouge_scorer()
    judged = []
    for (prompt, expected), answer in zip(pairs, answers, strict=True):
        scores = scorer.score(expected, answer)
        rouge = {name: round(scores[name].fmeasure, 4) for name in ROUGE}
        exact = answer.split() == expected.split()
        judged.append({"prompt": prompt, "expected": expected, "answer": answer, "exact": exact, **rouge})
    return judged


def means(judged: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the mean of each score."""
    return {name: round(fmean(each[name] for each in judged), 4) for name in ("exact", *ROUGE)}
