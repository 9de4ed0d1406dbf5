"""Answers through a memory are those of one pass, however the memory came to be."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import memstore
from memstore.errors import ForeignMemory, InvalidArgument
from memstore.eval.evaluation import NeedleScore, Reply, needle_blocks
from memstore.eval.filler import Filler
from memstore.eval.run import CellResult, Outcome, TaskPlan, draw, evaluate
from memstore.eval.tasks import TASKS, Phrases, Sample, plant
from memstore.memory import Memory
from memstore.models.drt import DRTCache, DRTForCausalLM, DRTReader
from memstore.models.drt.evaluation import ask
from memstore.models.drt.reader import memory_spec
from tests.eval.drts import byte_tokenizer, small_drt

TOKENIZER = byte_tokenizer()


def noise(count: int = 4000) -> Filler:
    return Filler(np.random.default_rng(0).integers(0, 256, count).astype(np.uint16), "noise")


def memory_for(model: DRTForCausalLM, url: str = "ram:") -> Memory:
    return memstore.open(url, spec=memory_spec(model, TOKENIZER))


def sample_of(model: DRTForCausalLM, task: str, length: int, seed: int) -> Sample:
    rng = random.Random(seed)
    return plant(TASKS[task](Phrases(TOKENIZER), rng), length, noise(), model.config.tokens_per_block, rng)


@pytest.mark.parametrize("task", ["passkey", "two-hop"])
def test_the_answer_through_a_memory_is_that_of_one_pass(task: str) -> None:
    model = small_drt(retrieval_top_k=1000)
    answers = set()
    for seed in range(4):
        sample = sample_of(model, task, 500 + seed, seed)
        text = [int(token) for chunk in sample.haystack(noise()) for token in chunk] + sample.prompt
        with DRTReader(model, memory_for(model), "hay", tokenizer=TOKENIZER) as reader:
            reader.read(text[: sample.length])
            reply = ask(model, reader.cache(), sample)
        ids = torch.tensor([text])
        generated = model.generate(ids, max_new_tokens=len(sample.answer), do_sample=False)
        assert reply.tokens == generated[0, len(text) :].tolist()
        answers.add(tuple(reply.tokens))

        output = model(ids, past_key_values=DRTCache(model.config, 1), output_retrieval=True)
        for hop, chosen, found in zip(sample.hops, output.retrieval, reply.found, strict=False):
            blocks = needle_blocks(hop, model.config.tokens_per_block)
            scores = dict(zip(chosen.blocks[0, -1].tolist(), chosen.scores[0, -1].tolist(), strict=True))
            own = max(scores[block] for block in blocks)
            best = max(score for block, score in scores.items() if block >= 0 and block not in blocks)
            ranked = sorted((score for block, score in scores.items() if block >= 0), reverse=True)
            if own >= ranked[63]:
                assert found.margin == pytest.approx(own - best, abs=1e-4)
            else:
                assert found.margin is not None
                assert found.margin >= own - best
            weights = dict(zip(chosen.blocks[0, -1].tolist(), chosen.weights[0, -1].tolist(), strict=True))
            assert found.weight == pytest.approx(sum(weights[block] for block in blocks), abs=1e-5)
    assert len(answers) == 4


def test_what_is_reused_changes_nothing() -> None:
    model, filler = small_drt(), noise()
    plan = TaskPlan(task="passkey", lengths=[700], samples=6, depths=[0.1, 0.9], reuse=True)
    reused = rows_of(model, plan, filler)
    # The same samples, one reading each.
    shared = draw(plan, 700, TOKENIZER, filler, model.config.tokens_per_block)
    for row, samples in zip(reused, shared, strict=True):
        for outcome, sample in zip(row.outcomes, samples, strict=True):
            with DRTReader(model, memory_for(model), "hay", tokenizer=TOKENIZER) as reader:
                reader.read([torch.from_numpy(chunk) for chunk in sample.haystack(filler)])
                reply = ask(model, reader.cache(), sample)
            assert outcome.reply.tokens == reply.tokens
            assert [each.margin for each in outcome.reply.found] == pytest.approx(
                [each.margin for each in reply.found], abs=1e-4
            )
    assert len({tuple(outcome.reply.tokens) for row in reused for outcome in row.outcomes}) > 3
    read = sum(outcome.tokens_read for row in reused for outcome in row.outcomes)
    assert read < 0.7 * 12 * 700


def rows_of(model: DRTForCausalLM, plan: TaskPlan, filler: Filler, **options: Any) -> list[CellResult]:
    with memory_for(model) as memory:
        return list(evaluate(model, TOKENIZER, plan, filler, memory, **options))


def test_rows_come_by_length_and_depth() -> None:
    model = small_drt()
    heard: list[int] = []
    plan = TaskPlan(task="two-hop", lengths=[300, 400], samples=2, depths=[0.0, 0.5, 1.0])
    rows = rows_of(model, plan, noise(350), advance=heard.append)
    assert [(row.length, row.depth) for row in rows] == [(n, d) for n in (300, 400) for d in (0.0, 0.5, 1.0)]
    assert sum(heard) == 2 * 3 * (300 + 400)
    first, last = rows[0].to_dict(), rows[-1].to_dict()
    assert {"length", "depth", "samples", "accuracy", "margin", "margin_min", "weight", "margin_2"} <= first.keys()
    assert (first["length"], first["depth"], first["samples"], first["accuracy"]) == (300, 0.0, 2, 0.0)
    assert first["tokens_per_second"] > 0
    assert (first["repeats"], last["repeats"]) == (0, 1)
    assert first["peak_bytes"] > 1 << 20


def test_the_same_seed_gives_the_same_rows() -> None:
    model = small_drt()
    plan = TaskPlan(task="passkey", lengths=[300], samples=3)
    replies = [[each.reply for each in rows_of(model, again, noise())[0].outcomes] for again in (plan, plan)]
    assert replies[0] == replies[1]
    other = rows_of(model, replace(plan, seed=1), noise())[0]
    assert [each.reply for each in other.outcomes] != replies[0]


def test_a_memory_on_disk_is_left_as_it_was(tmp_path: Path) -> None:
    model = small_drt()
    url = str(tmp_path / "some.mem")
    with memory_for(model, url) as memory:
        for name in ("mine", "eval/passkey/300"):  # the second: of a run that was interrupted
            with DRTReader(model, memory, name, tokenizer=TOKENIZER) as reader:
                reader.read(list(range(100)))
        plan = TaskPlan(task="passkey", lengths=[300], samples=2)
        on_disk = list(evaluate(model, TOKENIZER, plan, noise(), memory))
        assert [document.name for document in memory.documents()] == ["mine"]
        assert memory.document("mine").tokens().tolist() == list(range(100))
        assert memory.verify() == []
    in_memory = rows_of(model, plan, noise())
    assert [each.reply for each in on_disk[0].outcomes] == [each.reply for each in in_memory[0].outcomes]


def test_a_memory_of_another_model_is_refused(tmp_path: Path) -> None:
    memory_for(small_drt(), str(tmp_path / "a.mem")).close()
    for other in (small_drt(1), small_drt(block_size=16)):
        with pytest.raises(ForeignMemory, match="does not fit this model"):
            memory_for(other, str(tmp_path / "a.mem"))


def test_an_interruption_leaves_nothing_behind() -> None:
    model = small_drt()

    def stop(tokens: int) -> None:
        raise KeyboardInterrupt

    with memory_for(model) as memory:
        plan = TaskPlan(task="passkey", lengths=[300], samples=2)
        with pytest.raises(KeyboardInterrupt):
            list(evaluate(model, TOKENIZER, plan, noise(), memory, stop))
        assert memory.documents() == []


def outcome(tokens: list[int], margin: float | None = None) -> Outcome:
    return Outcome(0.5, [1, 2, 3], Reply(tokens, (NeedleScore(margin, 0.5),)), 100, 0.5, 1.0)


def test_only_whole_answers_count() -> None:
    row = CellResult(100, None, (outcome([1, 2, 3], 2.0), outcome([1, 2, 4], 1.0), outcome([2, 2, 3], None)), 0)
    found = row.to_dict()
    assert found["accuracy"] == pytest.approx(1 / 3, abs=1e-4)
    assert (found["margin"], found["margin_min"], found["weight"]) == (1.5, 1.0, 0.5)
    assert (found["tokens_per_second"], found["seconds"]) == (200, 3.0)
    assert [missed["answer"] for missed in found["missed"]] == ["[1, 2, 4]", "[2, 2, 3]"]
    assert found["missed"][0] == {"depth": 0.5, "expected": "[1, 2, 3]", "answer": "[1, 2, 4]", "margins": [1.0]}


def test_random_retrieval_has_no_margins() -> None:
    rows = rows_of(small_drt(retrieval="random"), TaskPlan(task="passkey", lengths=[300], samples=2), noise())
    assert rows[0].to_dict()["margin"] is None


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"task": "hay"}, "no task"),
        ({"samples": 0}, "samples"),
        ({"lengths": []}, "lengths"),
        ({"lengths": [0]}, "lengths"),
        ({"depths": []}, "depths"),
        ({"depths": [1.1]}, "depths"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(wrong: dict[str, Any], says: str) -> None:
    settings: dict[str, Any] = {"task": "passkey", "lengths": [100], **wrong}
    with pytest.raises(InvalidArgument, match=says):
        TaskPlan(**settings)


def test_a_length_that_is_too_short_is_refused_before_anything_is_read() -> None:
    model = small_drt()
    heard: list[int] = []
    with pytest.raises(InvalidArgument, match="too short for its needles"):
        rows_of(model, TaskPlan(task="passkey", lengths=[300, 20], samples=2), noise(), advance=heard.append)
    assert heard == []
