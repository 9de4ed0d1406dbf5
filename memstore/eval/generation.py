"""Answers to prompts: exact match, and ROUGE by the package ``rouge_score``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import torch

from memstore.errors import NotFound
from memstore.eval.pairs import encode_pairs

ROUGE = {"rouge1": "rouge1", "rouge2": "rouge2", "rougeL": "rougeL"}
"""Our names of the measures, and the package's."""


def rouge_scorer() -> Any:
    """The scorer, with the stemmer that papers use. Raises ``NotFound`` without its package."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ModuleNotFoundError:
        raise NotFound("ROUGE needs the package rouge-score: pip install 'torch-memstore[eval]'") from None
    return RougeScorer(list(ROUGE.values()), use_stemmer=True)


@torch.no_grad()
def generate_answers(
    model: Any,
    tokenizer: Any,
    pairs: Sequence[tuple[str, str]],
    *,
    max_tokens: int = 64,
    advance: Callable[[int], None] = lambda tokens: None,  # noqa: ARG005 - nobody listens
) -> list[str]:
    """What the model says after each prompt, always the likeliest token, to its end or ``max_tokens``.

    Prompts are aligned as they are in training: their last token is the first of a block.
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
    """Each answer with its measures: ``exact``, and the F measures of ROUGE-1, 2 and L."""
    scorer = rouge_scorer()
    judged = []
    for (prompt, expected), answer in zip(pairs, answers, strict=True):
        scores = scorer.score(expected, answer)
        rouge = {name: round(scores[theirs].fmeasure, 4) for name, theirs in ROUGE.items()}
        exact = answer.split() == expected.split()
        judged.append({"prompt": prompt, "expected": expected, "answer": answer, "exact": exact, **rouge})
    return judged


def means(judged: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The mean of each measure."""
    return {name: round(fmean(each[name] for each in judged), 4) for name in ("exact", *ROUGE)}
