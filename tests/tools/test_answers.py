"""`benchmarks/answers.py`: a model says behind the states of a text what it says to the text."""

from __future__ import annotations

import sys
from itertools import product

import pytest
import torch

import memstore
from benchmarks.answers import COMPRESSED, END, NOTHING, RIGHT, WHOLE, Asking
from benchmarks.carriers import CARRIERS, SOURCES, Carriers, interval, table
from benchmarks.questions.answers import MOST
from memstore.train.questions import Pool, Question, QuestionSet
from tests.instruct import instruct_model, instruct_tokenizer

PARAGRAPHS = ("The lamp hangs in the hall.", "The key lies under the mat.", "Nobody has seen the cat.")
ASKED = (Question("key", "Where is the key?", ("under the mat",), (1,)), Question("cat", "Is it 2?", ("no",), (2,)))


def test_answers_behind_kept_states_are_those_to_the_whole_prompt() -> None:
    model, tokenizer = instruct_model(), instruct_tokenizer()
    asked = QuestionSet("rooms", "none", PARAGRAPHS, ASKED)
    with memstore.attach(instruct_model(), "ram:", tokenizer=tokenizer, block_size=16) as reader:
        reader.read("\n\n".join(PARAGRAPHS), document="pool")
        asking = Asking(model, reader, asked, ["one block, ", "and another"], [], 1, "Answer.")
        said = {way: [next(asking.rows(each, [way]))["said"] for each in ASKED] for way in (WHOLE, RIGHT, END, NOTHING)}
        for question, answer in zip(ASKED, said[WHOLE], strict=True):
            ids = torch.tensor([asking.prompt((*PARAGRAPHS, question.text))])
            made = model.generate(ids, max_new_tokens=MOST, do_sample=False, eos_token_id=asking.ends)
            assert answer == str(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)).strip() != ""
        assert [*asking.kept] == [WHOLE], "computed once"
        assert said[WHOLE] == [next(asking.rows(each, [WHOLE]))["said"] for each in ASKED], "and left as they were"


def test_kvpress_is_asked_for_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.answers import main

    monkeypatch.setitem(sys.modules, "kvpress", None)
    monkeypatch.setattr("sys.argv", ["answers.py", "squad", "--model", "none", "--ways", COMPRESSED, "--out", "none"])
    with pytest.raises(ModuleNotFoundError, match="kvpress"):
        main()


def test_a_memory_is_made_to_choose_a_list() -> None:
    tokenizer = instruct_tokenizer()
    asked = QuestionSet("rooms", "none", PARAGRAPHS * 3, ASKED)
    pool = Pool.of(asked.paragraphs, tokenizer)
    with memstore.attach(instruct_model(), "ram:", tokenizer=tokenizer, block_size=16) as reader:
        reader.read(pool.tokens, document="pool")
        carriers = Carriers(instruct_model(), reader, asked, pool, lambda texts: torch.eye(len(texts), 99), 2)
        usual = [match.block for match in reader.search(ASKED[0].text, 3)]
        for blocks in ([2, 4], [4, 2, 3]):
            with carriers._choosing(blocks, quoted=False):
                assert [match.block for match in reader.search(ASKED[0].text, len(blocks))] == blocks
        assert [match.block for match in reader.search(ASKED[0].text, 3)] == usual
        ways = [*product(SOURCES, CARRIERS)]
        rows = [{"set": "rooms", "pool": 0, **carriers.row(ASKED[0], *way)} for way in ways]
    assert [(row["list"], row["as"]) for row in rows] == ways
    assert [(row["list"], row["as"]) for row in table(rows[2:7])] == ways[2:7]
    assert "has_minus_text" not in table(rows[2:7])[0], "it was not measured"


def test_ways_are_compared_on_the_questions_that_both_answered() -> None:
    ours, theirs = ([{"pool": 0, "id": n, "has": has} for n in range(first, 5)] for has, first in ((1, 0), (0, 1)))
    assert interval(ours, theirs) == [1, 1]
