"""``python -m benchmarks.questions``, on sets of a few paragraphs."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from benchmarks.questions import chat, hotpotqa, ruler
from benchmarks.questions.__main__ import VERBS, main
from benchmarks.questions.ruler import RulerSample
from memstore.train.questions import own_questions
from tests.questions.test_chat import wheel_file
from tests.questions.test_conversations import beam_folder, locomo_file
from tests.questions.test_sets import HOTPOT, SQUAD
from tests.tools.conftest import Cli, Outcome


def lengths(texts: Sequence[str]) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor([len(text) % 8 for text in texts]), 8).float()


@pytest.fixture(autouse=True)
def nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    long = {"data": [{"paragraphs": SQUAD["data"][0]["paragraphs"] * 1}]}
    filler = {"context": "Nothing happened that day, nor on the next one. " * 60, "qas": []}
    long["data"][0]["paragraphs"] = [*long["data"][0]["paragraphs"], filler]
    monkeypatch.setattr("benchmarks.questions.squad.load_json", lambda name: long)
    monkeypatch.setattr("benchmarks.questions.hotpotqa.load_json", lambda name: HOTPOT * 20)
    monkeypatch.setattr("benchmarks.questions.rankers.minilm", lambda: lengths)


@pytest.fixture
def questions(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run the command in this process."""

    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Outcome(code, *capsys.readouterr())

    return run


def test_a_row_for_each_ranker_and_number_of_blocks(questions: Cli, model_folder: Path, tmp_path: Path) -> None:
    memory = tmp_path / "squad.mem"
    arguments = ("squad", "--model", model_folder, "--half", "chosen", "--memory", memory, "--json")
    done = questions(*arguments, "--top-k", "1,4", "--picture", tmp_path / "found.svg")
    assert done.code == 0, done.err
    drawn = (tmp_path / "found.svg").read_text()
    assert {"bm25+minilm", "4 blocks"} <= {*re.findall(">([^<]+)<", drawn)}
    assert re.search("squad: 2 questions about [0-9,]+ tokens", drawn)
    assert (done.json["task"], done.json["questions"], done.json["paragraphs"]) == ("squad", 2, 3)
    rankers = ["memory", "bm25", "minilm", "bm25+minilm", "memory+bm25"]
    assert [(row["ranker"], row["top_k"]) for row in done.json["rows"]] == [(r, k) for r in rankers for k in (1, 4)]
    assert all(0 <= row["all"] <= row["any"] <= 1 for row in done.json["rows"])
    again = questions(*arguments, "--no-baselines")
    assert (again.code, again.json["tokens_per_second"]) == (0, None)  # the text was read before
    assert [row["ranker"] for row in again.json["rows"]] == ["memory"]


def test_people_get_a_table(questions: Cli, model_folder: Path) -> None:
    done = questions("hotpotqa", "--model", model_folder, "--half", "all", "--pooled", 2, "--no-baselines")
    assert done.code == 0, done.err
    assert done.out.startswith("hotpotqa: 2 questions (all) about 3 paragraphs")


def test_facts_are_asked_in_three_ways(questions: Cli, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.questions.manual.topics", lambda: ["Nothing happened that day.\n" * 2000])
    done = questions("facts", "--model", model_folder, "--half", "held-out", "--json")
    assert done.code == 0, done.err
    rows = [(row["set"], row["ranker"]) for row in done.json["rows"][:4]]
    assert rows == [
        ("facts-own", "memory"),
        ("facts-plain", "memory"),
        ("facts-other", "memory"),
        ("facts-own", "bm25"),
    ]
    by_words = {row["set"]: row["all"] for row in done.json["rows"] if row["ranker"] == "bm25"}
    assert by_words["facts-own"] == by_words["facts-plain"] == 1 > by_words["facts-other"]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (("--top-k", "few"), "write numbers of blocks such as 8 or 4,8,16"),
        (("--half", "best"), "half must be one of chosen, held-out, all"),
    ],
)
def test_wrong_arguments_are_told(questions: Cli, model_folder: Path, wrong: tuple[str, ...], says: str) -> None:
    done = questions("squad", "--model", model_folder, *wrong)
    assert done.code == 2
    assert says in done.err


def test_the_model_answers_from_the_memory_and_from_text(questions: Cli, instruct_folder: Path) -> None:
    done = questions("squad", "--model", instruct_folder, "--half", "all", "--answers", 1, "--top-k", 16, "--json")
    assert done.code == 0, done.err
    ways = [f"{ranker}, as text" for ranker in ("memory", "bm25", "minilm", "bm25+minilm", "memory+bm25")]
    rows = done.json["answers"]
    assert [row["with"] for row in rows] == ["memory", *ways, "the right paragraphs", "nothing"]
    assert all(row["answered"] == 1 and 0 <= row["em"] <= row["has"] <= 1 and row["f1"] <= 1 for row in rows)


def test_the_first_paragraphs_alone(questions: Cli, model_folder: Path) -> None:
    done = questions("squad", "--model", model_folder, "--half", "all", "--pooled", 1, "--no-baselines", "--json")
    assert (done.code, done.json["paragraphs"], done.json["questions"]) == (0, 1, 1), done.err


def test_conversations_are_measured(questions: Cli, model_folder: Path, tmp_path: Path) -> None:
    file, folder = locomo_file(tmp_path), beam_folder(tmp_path)
    options = ("--model", model_folder, "--half", "all", "--no-baselines", "--json")
    for which in ((), ("--conversation", "conv-1")):
        done = questions("locomo", file, *which, *options)
        assert (done.code, done.json["questions"], done.json["rows"][0]["all"]) == (0, 2, 1), done.err
    done = questions("beam", folder, *options)
    assert (done.code, done.json["questions"], done.json["rows"][0]["all"]) == (0, 2, 1), done.err
    done = questions("locomo", file, "--conversation", "conv-2", *options[:-1])
    assert done.code == 2
    assert "has no conversation 'conv-2'; it has conv-1" in done.err


def test_what_a_user_said_in_earlier_sessions_is_asked_for(
    questions: Cli, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = chat.data_in(wheel_file(tmp_path))
    monkeypatch.setattr(chat, "fetched", lambda: data)
    options = ("--model", model_folder, "--half", "all", "--no-baselines", "--json")
    done = questions("chat", "student", *options)
    assert (done.code, done.json["questions"], done.json["paragraphs"]) == (0, 2, 3), done.err
    done = questions("chat", "teacher", *options[:-1])
    assert done.code == 2
    assert "no scenario 'teacher'; choose from customer, finance" in done.err


def test_ruler_has_a_row_for_each_task_and_length(questions: Cli, instruct_folder: Path, tmp_path: Path) -> None:
    arguments = ("ruler", "--model", instruct_folder, "--samples", 1, "--tasks", "niah_single_1,vt")
    picture = tmp_path / "ruler.png"
    done = questions(*arguments, "--lengths", "300,500", "--router", "fit", "--picture", picture, "--json")
    assert (done.code, picture.exists()) == (0, True), done.err
    rows = done.json["rows"]
    lengths = [("niah_single_1", 300), ("vt", 300), ("niah_single_1", 500), ("vt", 500)]
    assert [(row["task"], row["length"]) for row in rows] == lengths
    assert all(0 <= row["score"] <= 1 and abs(row["tokens"] - row["length"]) < 100 for row in rows)
    assert all(row["alone"] is None or 0 <= row["alone"] <= 1 for row in rows)


def test_ruler_behind_all_states_of_the_text_scores_as_the_text_in_the_prompt(
    questions: Cli, instruct_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, RulerSample]] = []

    def record(said: str, sample: RulerSample) -> float:
        asked.append((said, sample))
        return 1.0

    monkeypatch.setattr(ruler, "score", record)
    monkeypatch.setattr(ruler, "SHARE", None)
    monkeypatch.setitem(sys.modules, "kvpress", ModuleType("kvpress"))
    arguments = ("ruler", "--model", instruct_folder, "--samples", 1, "--tasks", "vt", "--lengths", 300)
    done = questions(*arguments, "--ways", "alone,kvpress", "--json")
    assert done.code == 0, done.err
    (row,) = done.json["rows"]
    assert (row["score"], row["alone"], row["kvpress"], row["ms_to_answer"]) == (None, 1.0, 1.0, None)
    alone, behind = asked
    assert alone == behind
    done = questions(*arguments, "--ways", "alone,aloud")
    assert (done.code, "no way aloud; choose from memory," in done.err) == (2, True)


@pytest.mark.parametrize("name", [each.__name__ for each in VERBS])
def test_help_has_an_example(questions: Cli, name: str) -> None:
    done = questions(name, "--help")
    assert done.code == 0
    assert f"python -m benchmarks.questions {name}" in done.out
    assert "--json" in done.out


def test_a_set_that_is_written_to_a_file_is_the_same_set(questions: Cli, tmp_path: Path) -> None:
    out, asked = tmp_path / "hotpotqa.jsonl", hotpotqa.load()
    done = questions("export", "hotpotqa", out, "--json")
    assert (done.code, done.json["questions"]) == (0, len(HOTPOT) * 20), done.err
    found = own_questions(out)
    assert found.paragraphs == asked.paragraphs
    assert [(q.text, q.evidence, q.half) for q in found.questions] == [
        (q.text, q.evidence, q.half) for q in asked.questions
    ]
    done = questions("export", "chat", out)
    assert (done.code, "choose from squad-train, squad, hotpotqa, facts" in done.err) == (2, True)
