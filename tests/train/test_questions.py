from __future__ import annotations

from pathlib import Path

from memstore.train.questions import Pool, Question, own_questions, recall
from tests.eval.drts import byte_tokenizer


def test_a_paragraph_is_found_by_any_block_that_it_reaches_into() -> None:
    pool = Pool.of(["abcdef", "ghijklmn", "op"], byte_tokenizer())  # with the separator 8, 10 and 4 bytes
    assert pool.starts == (0, 8, 18, 22)
    assert [list(pool.blocks(paragraph, 4)) for paragraph in range(3)] == [[0, 1], [2, 3, 4], [4, 5]]
    assert "".join(pool.texts(4, byte_tokenizer())) == "abcdef\n\nghijklmn\n\nop\n\n"


def test_recall_counts_all_the_evidence_and_any_of_it() -> None:
    pool = Pool.of(["abcdef", "ghijklmn", "op"], byte_tokenizer())
    questions = [Question("1", "?", (), (0, 1)), Question("2", "?", (), (1,)), Question("3", "?", (), (2, 0))]
    rows = list(recall(lambda question, depth: [3, 1][:depth], questions, pool, block_size=4, top_k=[1, 2]))
    assert [(row["top_k"], row["all"], row["any"]) for row in rows] == [(1, 0.3333, 0.6667), (2, 0.6667, 1.0)]


def test_own_questions_are_halved_by_their_id(tmp_path: Path) -> None:
    lines = [f'{{"question": "Is it {n}?", "evidence": ["It is."], "id": "{n % 2}"}}' for n in range(40)]
    (tmp_path / "own.jsonl").write_text("\n".join(lines))
    halves = [question.half for question in own_questions(tmp_path / "own.jsonl").questions]
    assert halves == halves[:2] * 20


def test_paragraphs_are_pooled_once_in_the_order_of_the_lines(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text(
        '{"question": "Who?", "evidence": ["Jan."], "others": ["Bo.", "Jan.", "Ada."]}\n'
        '{"question": "Where?", "evidence": ["Here.", "Bo."]}\n'
    )
    found = own_questions(tmp_path / "own.jsonl")
    assert found.paragraphs == ("Bo.", "Jan.", "Ada.", "Here.")
    assert [each.evidence for each in found.questions] == [(1,), (0, 3)]
