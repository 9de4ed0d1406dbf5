from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from memstore.errors import InvalidArgument, NotFound
from memstore.eval.pairs import IGNORED, collate_pairs, encode_pairs, read_pairs
from memstore.models.drt import DRTForCausalLM
from memstore.train import Optimisation, train_on_pairs
from tests.train.conftest import Trained
from tests.train.helpers import RUNTIME, losses

PAIRS = [
    {"prompt": "Say a.", "answer": "a"},
    {"prompt": "Say b." * 40, "answer": "b and no more"},
    {"prompt": "Say c. " * 9, "answer": "c"},
]


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_the_loss_is_on_answers_which_begin_behind_the_first_token_of_a_block(trained: Trained) -> None:
    tokenizer = AutoTokenizer.from_pretrained(trained.folder)
    pairs = encode_pairs([(pair["prompt"], pair["answer"]) for pair in PAIRS], tokenizer, 31)
    batch = collate_pairs(pairs)
    for ids, labels, pair in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), PAIRS, strict=True):
        asked = [i for i, label in enumerate(labels) if label != IGNORED]
        assert asked[0] % 31 == 1
        assert str(tokenizer.decode(ids[: asked[0]])).lstrip("\n") == pair["prompt"]
        assert tokenizer.decode([labels[i] for i in asked]) == pair["answer"] + tokenizer.eos_token
        assert all(labels[i] == ids[i] for i in asked)


def test_padding_at_the_end_of_a_row_changes_nothing(trained: Trained) -> None:
    model = DRTForCausalLM.from_pretrained(trained.folder)
    tokenizer = AutoTokenizer.from_pretrained(trained.folder)
    pairs = encode_pairs([(pair["prompt"], pair["answer"]) for pair in PAIRS], tokenizer, 31)
    together = model(**collate_pairs(pairs), use_cache=False).loss
    apart = [model(**collate_pairs([pair]), use_cache=False).loss * len(pair.answer) for pair in pairs]
    mean = sum(apart) / sum(len(pair.answer) for pair in pairs)
    assert float(together.detach()) == pytest.approx(float(mean.detach()), rel=1e-5)


def test_fine_tuning_learns_the_answers(trained: Trained, tmp_path: Path) -> None:
    file = write(tmp_path / "pairs.jsonl", *PAIRS)
    optimisation = Optimisation(steps=12, batch=3, learning_rate=2e-3)
    report = train_on_pairs(file, tmp_path / "run", init=trained.folder, optimisation=optimisation, runtime=RUNTIME)
    values = [loss for _, loss in losses(tmp_path / "run")]
    assert values[-1] < 0.8 * values[0]
    assert report["pairs"] == 3
    assert (tmp_path / "run/tokenizer.json").exists()
    DRTForCausalLM.from_pretrained(tmp_path / "run")


def test_fields_can_be_named(tmp_path: Path) -> None:
    file = write(tmp_path / "pairs.jsonl", {"q": "1", "a": "2"}, "", {"q": "3", "a": "4", "more": 5})
    assert read_pairs(file, prompt="q", answer="a") == [("1", "2"), ("3", "4")]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{not json", r"line 2 of .* not valid JSON"),
        ("[" * 100_000, r"line 2 of .* not valid JSON: it has more than 100 levels"),
        ('{"prompt": "half \\ud83d", "answer": "x"}', r"line 2 of .* not valid JSON: .*surrogates"),
        ("[1]", r"line 2 of .* must be an object with 'prompt' and 'answer', not list"),
        ({"prompt": "x"}, r"line 2 of .* has no field 'answer'; its fields are 'prompt'\..*--answer-field"),
        ({"prompt": "x", "answer": 3}, r"line 2 of .*: the field 'answer' must be a non-empty text, not 3"),
        ({"prompt": " ", "answer": "y"}, r"line 2 of .*: the field 'prompt' must be a non-empty text"),
    ],
)
def test_bad_lines_are_named_by_number(line: object, words: str, tmp_path: Path) -> None:
    file = write(tmp_path / "pairs.jsonl", PAIRS[0], line)
    with pytest.raises(InvalidArgument, match=words):
        read_pairs(file)


def test_no_file_and_no_pairs_are_errors(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no file"):
        read_pairs(tmp_path / "nothing.jsonl")
    with pytest.raises(InvalidArgument, match="is a folder"):
        read_pairs(tmp_path)
    with pytest.raises(InvalidArgument, match="empty"):
        read_pairs(write(tmp_path / "empty.jsonl", ""))
    with pytest.raises(NotFound, match="no file"):
        read_pairs(tmp_path / "empty.jsonl/x")
    for path in (tmp_path / ("x" * 300), Path("x\0y")):
        with pytest.raises(InvalidArgument, match="Name a JSON Lines file"):
            read_pairs(path)


def test_a_pipe_is_read_as_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=write, args=(tmp_path / "pipe", '{"prompt": "p", "answer": "a"}'))
    writer.start()
    assert read_pairs(tmp_path / "pipe") == [("p", "a")]
    writer.join()
