"""``generate(query=, opening=)``: what stands before every question is computed once, and knows of none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from memstore import Retrieval
from memstore.errors import InvalidArgument
from memstore.readers.caches import CACHE
from memstore.readers.stock.reader import StockReader
from tests.instruct import instruct_model, instruct_tokenizer
from tests.readers.lists import lists_of
from tests.readers.models import attach, tiny, tokens
from tests.readers.test_retrieval import reading

OPENING = 24
FRAME = tokens(OPENING, seed=5)
FIRST, SECOND = tokens(7, seed=11), tokens(9, seed=12)


@contextmanager
def asked(name: str = "llama", top_k: Any = 2, *, tail: bool = False) -> Iterator[StockReader]:
    with reading(tiny(name), Retrieval(top_k=top_k)) as reader, reader.seeing(tail=tail):
        yield reader


def logits(reader: StockReader, question: Tensor, opening: int = OPENING) -> Tensor:
    """Of the tokens of an answer ``[4, vocabulary]``."""
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "output_logits": True}
    ids = torch.cat((FRAME, question, tokens(3)))[None]
    made = reader.generate(ids, query=question, opening=opening, **options, return_dict_in_generate=True)
    assert made.sequences.shape[1] == ids.shape[1] + 4
    return torch.cat(made.logits)


def passes(reader: StockReader, question: Tensor) -> list[int]:
    """How many tokens each forward pass has, that of the question by itself aside."""
    seen: list[int] = []
    embeddings = reader.model.get_input_embeddings()
    hook = embeddings.register_forward_hook(lambda _, given, __: seen.append(given[0].shape[1]))
    try:
        logits(reader, question)
    finally:
        hook.remove()
    return [each for each in seen if each != len(question)]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text", "gpt_oss"])
def test_a_question_is_answered_as_if_none_had_been_asked_before(name: str) -> None:
    with asked(name) as reader:
        logits(reader, FIRST)
        later = logits(reader, SECOND)
    with asked(name) as reader:
        assert torch.equal(later, logits(reader, SECOND))


def test_a_question_under_autocast_leaves_nothing_to_those_after_it() -> None:
    with asked() as reader:
        with torch.autocast("cpu", torch.bfloat16):
            cast = logits(reader, FIRST)
        later = logits(reader, SECOND)
    with asked() as reader:
        assert torch.equal(later, logits(reader, SECOND))
        plain = logits(reader, FIRST)
    assert not torch.equal(cast, plain)
    assert float((cast - plain).abs().max() / plain.abs().max()) < 0.05, "8 bits of a product of a few layers"


def test_a_question_chooses_the_same_under_autocast() -> None:
    found = []
    for cast in (False, True):
        with asked() as reader, torch.autocast("cpu", torch.bfloat16, enabled=cast):
            logits(reader, FIRST)
            found.append([(each.blocks, each.scores) for each in lists_of(reader)])
    assert found[0] == found[1]


def test_an_opening_does_not_see_what_is_retrieved() -> None:
    with asked() as reader:
        assert not torch.allclose(logits(reader, SECOND), logits(reader, SECOND, opening=0), atol=1e-3)


def test_an_opening_is_computed_once_and_anew_when_something_was_read() -> None:
    rest = [3, 1, 1, 1]
    with asked() as reader:
        assert passes(reader, FIRST) == [OPENING, len(FIRST) + rest[0], *rest[1:]]
        assert passes(reader, SECOND) == [len(SECOND) + rest[0], *rest[1:]]
        reader.append(tokens(40, seed=9).tolist(), reader.document.name)
        assert passes(reader, SECOND)[0] == OPENING


def test_the_question_chooses_as_it_does_without_an_opening() -> None:
    with asked() as reader:
        found = []
        for opening in (0, OPENING):
            lists_of(reader).clear()
            logits(reader, FIRST, opening)
            found.append([each.blocks for each in lists_of(reader)])
        assert found[0] == found[1]


@pytest.mark.parametrize(("top_k", "tail"), [("all", False), (2, True)])
def test_the_whole_prompt_sees_what_is_the_same_for_every_question(top_k: Any, tail: bool) -> None:
    with asked(top_k=top_k, tail=tail) as reader:
        assert torch.equal(logits(reader, FIRST), logits(reader, FIRST, opening=0))


@pytest.mark.parametrize("alone", [{"use_cache": False}, {"cache_implementation": "dynamic"}, {CACHE: DynamicCache}])
def test_without_a_cache_of_its_own_the_whole_prompt_sees_what_is_retrieved(alone: dict[str, Any]) -> None:
    found = []
    for opening in (0, OPENING):
        with asked() as reader:
            options = {name: value() if callable(value) else value for name, value in alone.items()}
            ids = torch.cat((FRAME, FIRST))[None]
            options |= {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
            found.append(torch.cat(reader.generate(ids, query=FIRST, opening=opening, **options).logits))
            if CACHE in options:
                assert options[CACHE].get_seq_length() == ids.shape[1] + 3
    assert torch.equal(*found)


def test_an_opening_is_shorter_than_its_prompt() -> None:
    with asked() as reader, pytest.raises(InvalidArgument, match="opening must be shorter than the prompt"):
        logits(reader, FIRST, opening=OPENING + len(FIRST) + 3)


def test_a_trace_has_the_whole_prompt_and_weights_that_add_up() -> None:
    sizes: dict[str, Any] = {"block_size": 16, "window": 64, "sink": 16, "segment": 64}
    with attach(instruct_model(), "ram:", tokenizer=instruct_tokenizer(), **sizes) as reader:
        reader.read("\n".join(f"Line {i} of the log tells of nothing new." for i in range(60)), document="log")
        for question in ("What is new?", "What is old?"):
            answer = reader.ask(question, system="Be brief.", max_tokens=2, trace=True)
            trace = reader.memory.traces.get(answer.trace or 0)
            text = reader.tokenizer.decode(trace.info["prompt"])
            assert text == f"<|system|>Be brief.<|end|>\n<|user|>{question}<|end|>\n<|assistant|>"
            assert 0 < sum(weight for _, _, weight in answer.used) < 1
