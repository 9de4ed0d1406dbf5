from __future__ import annotations

import sys

import pytest
import torch

from memstore.errors import NotFound
from memstore.eval.pairs import encode_pairs, generate_answers, judged, means, rouge_scorer
from tests.eval.drts import byte_tokenizer, small_drt


def test_answers_are_the_models_own_after_aligned_prompts() -> None:
    model, tokenizer = small_drt(), byte_tokenizer()
    pairs = [("What is it?", "x"), ("A longer question, over some blocks", "y")]
    answers = generate_answers(model, tokenizer, pairs, max_tokens=5)
    for pair, answer in zip(encode_pairs(pairs, tokenizer, model.config.tokens_per_block), answers, strict=True):
        assert len(pair.prompt) % model.config.tokens_per_block == 1
        ids = pair.prompt[:]
        for _ in range(5):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert answer == tokenizer.decode(ids[len(pair.prompt) :], skip_special_tokens=True)


def test_answers_are_judged_by_words() -> None:
    pairs = [("p", "the cat sat on the mat"), ("q", "a b")]
    each = judged(pairs, ["the  cat sat on the mat\n", "cats"])
    assert [one["exact"] for one in each] == [True, False]
    assert [one["rouge2"] for one in each] == [1.0, 0.0]
    assert judged([("p", "the cat sat")], ["the cat ran"])[0]["rouge1"] == pytest.approx(2 / 3, abs=1e-4)
    assert judged([("p", "the cat sat")], ["the cat ran"])[0]["rouge2"] == 0.5
    assert judged([("p", "a b c d")], ["a x c"])[0]["rougeL"] == pytest.approx(4 / 7, abs=1e-4)
    assert means(each) == {"exact": 0.5, "rouge1": 0.5, "rouge2": 0.5, "rougeL": 0.5}


def test_without_rouge_it_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(NotFound, match=r"torch-memstore\[eval\]"):
        rouge_scorer()
