"""``generate(query=...)``: what a question chooses does not depend on what stands around it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import memstore
from memstore import Retrieval
from memstore.errors import InvalidArgument
from memstore.readers.stock.reader import StockReader
from tests.eval.drts import byte_tokenizer, small_drt
from tests.readers.lists import lists_of
from tests.readers.models import attach, tiny, tokens
from tests.readers.test_retrieval import prompt, reading

QUERY = tokens(7, seed=11)
GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}


def chosen(attached: StockReader, ids: Tensor, query: Any = QUERY, **more: Any) -> list[list[int]]:
    lists_of(attached).clear()
    attached.generate(ids, query=query, **GREEDY, **more)
    return [each.blocks for each in lists_of(attached)]


def test_a_question_chooses_the_same_blocks_wherever_it_stands() -> None:
    with reading(tiny("llama"), Retrieval(top_k=3)) as attached:
        around = [prompt(), torch.cat((prompt(40), QUERY[None], prompt(3)), 1), QUERY[None], prompt(1)]
        lists = [chosen(attached, ids) for ids in around]
        assert lists == [lists[0]] * len(around)
        assert len(lists[0]) == 1  # kept while the answer is generated


def test_the_answer_is_written_with_what_the_query_chose() -> None:
    ids = prompt()
    with reading(tiny("llama"), Retrieval(top_k=2)) as attached:
        own = attached.generate(ids, **GREEDY, output_logits=True, return_dict_in_generate=True)
        of_the_query = attached.generate(ids, query=QUERY, **GREEDY, output_logits=True, return_dict_in_generate=True)
        again = attached.generate(ids, **GREEDY, output_logits=True, return_dict_in_generate=True)
    assert not torch.equal(own.logits[0], of_the_query.logits[0])
    assert torch.equal(own.logits[0], again.logits[0])


def test_all_rows_and_all_steps_keep_the_list_of_the_query() -> None:
    with reading(tiny("llama"), Retrieval(top_k=3, every=1)) as attached:
        (one,) = {tuple(blocks) for blocks in chosen(attached, prompt())}
        assert {tuple(blocks) for blocks in chosen(attached, prompt().repeat(2, 1))} == {one}
        assert len({tuple(blocks) for blocks in chosen(attached, prompt(), None)}) > 1


def test_a_query_may_be_words() -> None:
    tokenizer = byte_tokenizer()
    model = tiny("llama", vocab_size=300)
    with attach(model, "ram:", tokenizer=tokenizer, block_size=16, window=32, segment=32, sink=16) as attached:
        attached.read("Call me Ishmael. Some years ago, never mind how long precisely. " * 6, document="whale")
        ids = tokenizer("And then?", return_tensors="pt").input_ids
        assert chosen(attached, ids, "years ago") == chosen(attached, ids, tokenizer("years ago").input_ids)


# What it refers to


def test_the_exchange_before_counts_a_fifth_where_a_question_refers_to_it() -> None:
    tokenizer, options = byte_tokenizer(), Retrieval(top_k=3, span=20)
    before = ["What does line 12 tell of?", "Of the path and of house 12."]
    with attach(tiny("llama", vocab_size=300), "ram:", tokenizer=tokenizer, retrieval=options, block_size=16) as reader:
        reader.read("".join(f"Line {i} tells of the path and of house {i}. " for i in range(20)), document="log")

        def scores(*said: str) -> Tensor:
            return torch.tensor([each.score for each in sorted(reader.search(said, 99), key=lambda each: each.block)])

        codes = reader.hooks.query_codes(reader._query([*before, "Who built it?"]), reader.memory.spec.index_layers[0])
        assert len(codes) == len("Who built it?"[1:]) + 19, "20 tokens of the exchange, but for the first"
        assert not torch.equal(scores(*before, "Who built it?"), scores("Who built it?"))
        assert torch.equal(scores("Hello.", "Hi.", *before, "Who built it?"), scores(*before, "Who built it?"))
        assert torch.equal(scores(*before, "Who built house 3?"), scores("Who built house 3?"))
        reader.selection.retrieval = Retrieval(span=1000, words=1000)  # words alone say nearly all
        own, other, both = (
            scores(*said)
            for said in (["Is it line 7?"], [before[0][-10:] + " Of the path"[:10]], [*before, "Is it line 7?"])
        )
        assert min(own.max(), other.max()) > 200
        torch.testing.assert_close(both, own + 0.2 * other, rtol=0, atol=20)


@pytest.mark.parametrize(
    ("query", "share", "says"),
    [
        (torch.empty(0, dtype=torch.int64), "model", "a query needs at least one token"),
        (torch.tensor([1, 1000]), "model", "token ids must be from 0 to 96"),
        (QUERY, "layer", "every layer searches with the prompt's own tokens"),
    ],
)
def test_what_cannot_choose_is_told(query: Tensor, share: Any, says: str) -> None:
    with (
        reading(tiny("llama"), Retrieval(share=share)) as attached,
        pytest.raises(InvalidArgument, match=says),
    ):
        attached.generate(prompt(), query=query, **GREEDY)


def test_models_that_were_trained_to_ask_take_no_query() -> None:
    with memstore.attach(small_drt(), "ram:") as reader:
        reader.read(tokens(200))
        with pytest.raises(InvalidArgument, match="query is for stock models, not for a DRT"):
            reader.generate(prompt(), query=QUERY, **GREEDY)


# Ranked again, by how likely the query is behind a block


def test_the_query_is_as_likely_behind_a_block_as_behind_its_tokens() -> None:
    model, text = tiny("llama"), tokens(300)
    with torch.no_grad():
        told = model(torch.cat((text[:16], QUERY))[None]).logits[0, 16:-1].log_softmax(-1)
    with attach(model, "ram:", document="text", window=32, sink=0, segment=32, block_size=16) as attached:
        attached.read(text)
        likely = attached._likelihood(attached._everything(), torch.tensor([0, 3]), QUERY)
    torch.testing.assert_close(likely[0], told.gather(-1, QUERY[1:, None]).mean())
    assert likely[0] != likely[1]


def test_a_long_query_is_read_behind_fewer_blocks_at_once() -> None:
    with reading(tiny("llama"), Retrieval(top_k=3, rerank=6)) as attached:
        sizes: list[int] = []
        attached.model.get_input_embeddings().register_forward_hook(lambda _, given, __: sizes.append(given[0].numel()))
        attached._likelihood(attached._everything(), torch.arange(6), tokens(300))
        assert sizes == [900, 900]


def test_both_orders_vote_and_the_other_blocks_follow() -> None:
    with reading(tiny("llama"), Retrieval(top_k=3, rerank=6)) as attached:
        everything = attached._everything()
        attached.selection.retrieval = Retrieval(top_k=3)
        before = [match.block for match in attached.search(QUERY, 99)]
        attached.selection.retrieval = Retrieval(top_k=3, rerank=6)
        likely = attached._likelihood(everything, torch.arange(len(everything)), QUERY).tolist()
        again = sorted(before[:6], key=lambda block: -likely[block])
        votes = {block: 1 / (20 + before.index(block)) + 1 / (20 + again.index(block)) for block in again}
        wanted = sorted(before[:6], key=lambda block: (-votes[block], block))  # of equal ones the first
        found = attached.search(QUERY, 99)
        assert [match.block for match in found] == [*wanted, *before[6:]] != before
        assert [match.score for match in found[:6]] == pytest.approx([votes[block] for block in wanted])
        with attached.seeing(tail=False):
            assert chosen(attached, prompt()) == [sorted(wanted[:3])]


@pytest.mark.parametrize(
    ("options", "says"),
    [({"rerank": -1}, "at least 0, got -1"), ({"rerank": 8, "share": "layer"}, "needs share='model'")],
)
def test_a_second_ranking_that_cannot_be_is_told(options: Any, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        Retrieval(**options)
