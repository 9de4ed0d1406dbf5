from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from memstore.errors import InvalidArgument
from memstore.eval.needles import prose_text
from memstore.eval.pairs import align
from memstore.eval.tasks import Phrases
from memstore.models.drt import DRTConfig, DRTForCausalLM
from memstore.models.drt.training import DRT, RECIPES, Bank, grown
from memstore.train import Recipe, corpora, train_recipe
from memstore.train.corpora import train_tokenizer
from memstore.train.needles import NeedleRows
from memstore.train.options import Optimisation
from memstore.train.recipes import LOOKUPS, find_recipe
from memstore.train.trainer import rate
from memstore.train.training import starting
from tests.train.helpers import RUNTIME, same_weights, small, use_little_text

BLOCK = 31


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer([prose_text()[:60_000]], 512)


def rows_of(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> NeedleRows:
    texts = list(corpora.encoded([prose_text()[:60_000]], tokenizer))
    return NeedleRows(recipe, tokenizer, texts, BLOCK, 100, 0)


def test_a_text_that_is_shorter_than_a_row_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    recipe = next(iter(RECIPES.values()))
    texts = [*corpora.encoded([prose_text()[:60_000], "A line of text.\n"], tokenizer)]
    with pytest.raises(InvalidArgument, match=rf"rows of {recipe.name} have up to [\d,]+: train on more text"):
        NeedleRows(recipe, tokenizer, texts, BLOCK, 100, 0)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_batch_depends_on_seed_and_number_alone(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    rows, again = rows_of(RECIPES[name], tokenizer), rows_of(RECIPES[name], tokenizer)
    for _ in range(2):
        rows[3]
    assert all(torch.equal(rows[7][part], again[7][part]) for part in ("input_ids", "answer", "free"))
    assert not torch.equal(rows[7]["input_ids"], rows[8]["input_ids"])


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_what_is_asked_is_in_the_row_and_the_answer_begins_behind_the_first_token_of_a_block(
    name: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = rows_of(RECIPES[name], tokenizer)
    for number in (0, 50, 99):
        batch = rows[number]
        assert batch["input_ids"].numel() <= RECIPES[name].tokens
        for ids, answer in zip(batch["input_ids"].tolist(), batch["answer"].tolist(), strict=True):
            runs = list(answers(answer))
            assert runs[0].start % BLOCK == 1
            assert runs[-1].stop <= len(ids)
            assert len({run.start // BLOCK for run in runs}) == 1
            for run in runs:
                check(str(tokenizer.decode(ids[: run.start])), str(tokenizer.decode(ids[run.start : run.stop])))


def test_hard_rows_have_the_places_of_a_text_with_the_most_digits(tokenizer: PreTrainedTokenizerBase) -> None:
    recipe = replace(RECIPES["passkey-cpu"], near_misses=0.0, nonsense=0.0)

    def digits(places: int, number: int) -> float:
        text = " ".join("value 123456 789 next" if place % 2 else "words of a plain sentence" for place in range(5000))
        texts = list(corpora.encoded([prose_text()[:60_000] + text], tokenizer))
        batch = NeedleRows(replace(recipe, places=places), tokenizer, texts, BLOCK, 100, 0)[number]
        free = batch["input_ids"][batch["free"]]
        return float(torch.isin(free, torch.tensor(Phrases(tokenizer).digits)).float().mean())

    assert digits(8, 10) == digits(1, 10)  # not hard yet
    assert digits(8, 95) > digits(1, 95) + 0.05


@pytest.mark.parametrize("progress", [0, 45, 99])
def test_lookups_ask_for_each_of_several_names(progress: int, tokenizer: PreTrainedTokenizerBase) -> None:
    recipe = replace(RECIPES["passkey-cpu"], **LOOKUPS)
    batch = rows_of(recipe, tokenizer)[progress]
    asked = [list(answers(row)) for row in batch["answer"].tolist()]
    assert (max(map(len, asked)) > 1) == (progress > 0), "follow-ups ask for other names"
    for ids, runs in zip(batch["input_ids"].tolist(), asked, strict=True):
        for run in runs:
            check(str(tokenizer.decode(ids[: run.start])), str(tokenizer.decode(ids[run.start : run.stop])))


def answers(asked: list[bool]) -> Iterator[range]:
    """The runs of tokens that answer something."""
    edges = [at for at in range(len(asked) + 1) if (at < len(asked) and asked[at]) != (at > 0 and asked[at - 1])]
    yield from (range(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True))


def check(text: str, asked: str) -> None:
    """Raise unless ``asked`` is right after ``text``, whose needles are before its questions."""
    if text.endswith("The passkey is:"):
        assert f"|The passkey is:{asked}" in text
        return
    if " from" not in text[-14:]:
        name = text.removesuffix("is:").rpartition("|The value of ")[2]
        assert f"|One of the special magic numbers for {name} is {asked}" in text
        return
    kind, _, name = text.removesuffix("is:").rpartition(" from")
    if kind.endswith("|The step"):
        assert f"|DEF{name}->{asked}" in text
    else:
        assert kind.endswith("|The path")
        middle, end = asked.removesuffix("|").split(",")
        assert f"|DEF{name}->{middle}|" in text
        assert f"|DEF{middle}->{end}|" in text


def test_follow_ups_ask_for_more_and_can_be_left_out(tokenizer: PreTrainedTokenizerBase) -> None:
    recipe = replace(RECIPES["two-hop-cpu"], stages=((0.0, {"two-hop": 1.0}),))
    several = [len(list(answers(row))) for row in rows_of(recipe, tokenizer)[0]["answer"].tolist()]
    assert min(several) > 1
    measured = rows_of(recipe.asking_only("two-hop"), tokenizer)[0]["answer"].tolist()
    assert [len(list(answers(row))) for row in measured] == [1] * len(measured)


def test_each_of_several_answers_begins_behind_the_first_token_of_a_block(tokenizer: PreTrainedTokenizerBase) -> None:
    recipe = replace(RECIPES["two-hop-cpu"], stages=((0.0, {"two-hop": 0.5, "one-hop": 0.5}),), answers=4)
    batch = rows_of(recipe, tokenizer)[0]
    assert batch["input_ids"].numel() <= recipe.tokens
    for ids, asked in zip(batch["input_ids"], batch["answer"].tolist(), strict=True):
        found = list(answers(asked))
        assert [each.start % BLOCK for each in found] == [1] * 4
        for each in found:
            text = str(tokenizer.decode(ids[: each.start])).replace("The ", "|The ")  # only the first has a bar
            check(text, str(tokenizer.decode(ids[each.start : each.stop])))


def test_numbers_have_no_digit_twice_at_first_and_few_digits_later(tokenizer: PreTrainedTokenizerBase) -> None:
    recipe = replace(RECIPES["passkey-cpu"], distinct_until=0.5, few_from=0.5, few_digits=1.0, hard_from=1.1)
    rows = rows_of(recipe, tokenizer)

    def digits(number: int) -> list[str]:
        batch = rows[number]
        numbers = [ids[asked].tolist()[:-1] for ids, asked in zip(batch["input_ids"], batch["answer"], strict=True)]
        return [str(tokenizer.decode(number)) for number in numbers]

    assert all(len(set(number)) == len(number) for number in digits(0) + digits(49))
    assert all(len(set(number)) <= 5 for number in digits(50) + digits(99))


def test_blocks_with_needles_and_answers_are_not_shared(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = rows_of(replace(RECIPES["passkey-cpu"], near_misses=0.0, nonsense=0.0), tokenizer)
    batch = rows[0]
    needle = tokenizer("|The passkey is:")["input_ids"]
    for ids, free in zip(batch["input_ids"].tolist(), batch["free"].tolist(), strict=True):
        places = [at for at in range(len(ids)) if ids[at : at + len(needle)] == needle]
        assert places
        assert not any(free[places[0] : places[0] + len(needle)])
        assert not any(free[-BLOCK:])


def test_stages_change_the_tasks() -> None:
    recipe = replace(RECIPES["two-hop-cpu"], stages=((0.5, {"passkey": 1.0}), (1.0, {"two-hop": 1.0})))
    assert recipe.tasks_at(0.0) == recipe.tasks_at(0.5) == {"passkey": 1.0, "two-hop": 0.0}
    assert recipe.tasks_at(0.75) == {"passkey": 0.5, "two-hop": 0.5}
    assert recipe.task == "two-hop"


def test_rows_grow_with_the_ramp(tokenizer: PreTrainedTokenizerBase) -> None:
    recipe = replace(RECIPES["passkey-cpu"], ramp=0.5, blocks=(3, 9))
    rows = rows_of(recipe, tokenizer)
    assert rows[0]["input_ids"].shape[1] == 4 * BLOCK
    assert int(rows[0]["answer"].sum(1).max()) == recipe.digits["passkey"][0] + 1
    assert recipe.ramped((3, 9), 0.25) == (3, 6)
    assert recipe.ramped((3, 9), 0.8) == (3, 9)


def test_a_recipe_closes_with_longer_rows_and_all_else_is_of_what_is_before(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    recipe = replace(RECIPES["passkey-cpu"], ramp=1.0, blocks=(3, 9))
    rows, closing = (
        rows_of(each, tokenizer) for each in (recipe, replace(recipe, closing=0.5, closing_blocks=(20, 24)))
    )
    lengths = [closing[number]["input_ids"].shape[1] // BLOCK - 1 for number in range(100)]
    assert {20, 24} <= set(lengths[50:]) <= set(range(20, 25))
    assert max(lengths[:50]) == 9
    assert all(torch.equal(closing[0][part], rows[0][part]) for part in ("input_ids", "answer", "free"))
    assert [recipe.before_closing(part) for part in (0.0, 0.5, 1.0)] == [0.0, 0.5, 1.0]
    assert [replace(recipe, closing=0.5).before_closing(part) for part in (0.0, 0.25, 0.5, 1.0)] == [0.0, 0.5, 1.0, 1.0]


def test_the_bank_keeps_the_latest_blocks_that_are_free(tmp_path: Path) -> None:
    recipe = small(hard_from=0.4, bank_growth=0.1, bank=8, share_rows=False)
    torch.manual_seed(0)
    model = DRTForCausalLM(DRTConfig.preset("tiny")).train()
    bank = Bank(model, recipe)
    bank.opened = 1.0
    ids, free = torch.randint(512, (4, 4 * BLOCK)), torch.ones(4, 4 * BLOCK, dtype=torch.bool)
    free[:, BLOCK : 2 * BLOCK + 1] = False
    for _ in range(3):
        assert bank.shared(free, 0.3) is None
        model(ids, use_cache=False)
        bank.keep(free)
    assert bank.landmarks is not None
    assert len(bank.landmarks) == 8  # two free blocks in each of the four rows of the last step
    opened = bank.shared(free, 0.9)
    assert opened is not None
    assert opened.states is not None
    assert len(opened.states) == 8
    bank.found = 0.75
    bank.save(tmp_path / "bank.safetensors")
    again = Bank(DRTForCausalLM(DRTConfig.preset("tiny")), recipe)
    again.load(tmp_path / "bank.safetensors", torch.device("cpu"))
    assert again.landmarks is not None
    assert torch.equal(again.landmarks, bank.landmarks)
    assert (again.opened, again.found) == (1.0, 0.75)
    before = bank.landmarks
    model(ids[:1], use_cache=False)
    bank.keep(free[:1])
    assert torch.equal(bank.landmarks[2:], before[:6])


def test_the_bank_opens_as_long_as_needles_are_found_and_closes_when_they_are_not() -> None:
    bank = Bank(DRTForCausalLM(DRTConfig.preset("tiny")), small(hard_from=0.4, bank_growth=0.1, ready=0.9))
    bank.pace(0.0, 0.3, 100)
    assert (bank.opened, bank.found) == (0.0, 1.0)  # not yet its time
    for _ in range(5):
        bank.pace(1.0, 0.5, 100)
    assert bank.opened == pytest.approx(0.5)
    for _ in range(7):
        bank.pace(0.0, 0.5, 100)
    assert bank.found < 0.9
    assert bank.opened == pytest.approx(0.2)  # two more steps open it until the mean is below 0.9
    for _ in range(200):
        bank.pace(1.0, 0.5, 100)
    assert bank.opened == 1.0


def test_a_model_grows_by_copies_of_its_upper_layers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    small_one = DRTForCausalLM(DRTConfig.preset("tiny"))
    model = grown(small_one, DRTConfig.preset("tiny", upper_layers=[2, 2], retrieval_top_k=8))
    old, new = small_one.model, model.model
    for layer in range(2):
        for group in range(2):
            assert torch.equal(new.upper[group][layer].attention.qkv.weight, old.upper[0][layer].attention.qkv.weight)
        assert not torch.equal(new.upper[1][layer].attention.out.weight, old.upper[0][layer].attention.out.weight)
    assert torch.equal(new.retrievers[1].query.weight, old.retrievers[0].query.weight)
    small_one.save_pretrained(tmp_path)
    wanted = DRTConfig.preset("tiny", upper_layers=[4], window=32)
    config = starting(wanted, tmp_path, family=DRT, grow=True).config
    assert (config.upper_layers, config.window) == ([4], 32)
    with pytest.raises(InvalidArgument, match=r"models with lower_layers=3, but .* has 1"):
        starting(DRTConfig.preset("tiny", lower_layers=3), tmp_path, family=DRT, grow=True)


def test_the_control_of_two_hops_has_the_same_layers_in_one_group() -> None:
    recipe = RECIPES["two-hop-cpu"]
    control = recipe.with_groups(1)
    assert control.model["upper_layers"] == [sum(recipe.model["upper_layers"])]
    with pytest.raises(InvalidArgument, match="cannot be divided into 7 groups"):
        recipe.with_groups(7)


def test_an_unknown_recipe_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidArgument, match="there is no recipe 'magic'; choose one of passkey-cpu, two-hop-cpu"):
        find_recipe("magic", RECIPES)


@pytest.mark.slow
def test_a_killed_recipe_resumes_to_the_same_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise, the order of data and the bank of earlier blocks included."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    child = subprocess.run([sys.executable, "-m", "tests.train.child", str(killed)], capture_output=True, text=True)
    assert child.returncode == -9, child.stderr
    (killed / "checkpoints/checkpoint-11").mkdir()  # one that was cut short
    use_little_text(monkeypatch)
    report = train_recipe(small(), killed, runtime=RUNTIME)
    assert report["resumed_from_step"] == 10
    expected = train_recipe(small(), whole, runtime=RUNTIME)
    assert same_weights(killed, whole)
    assert {name: report[name] for name in ("accuracy", "loss", "tokens")} == {
        name: expected[name] for name in ("accuracy", "loss", "tokens")
    }
    assert expected["next_command"] == f"memstore eval passkey --model {whole}"


def test_two_hops_train_with_two_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_little_text(monkeypatch)
    recipe = small("two-hop-cpu", optimisation=replace(RECIPES["two-hop-cpu"].optimisation, steps=3))
    train_recipe(small(), tmp_path / "first", runtime=RUNTIME)
    report = train_recipe(recipe, tmp_path / "run", init=tmp_path / "first", runtime=RUNTIME)
    assert report["task"] == "two-hop"
    assert 0 <= report["accuracy"] <= 1
    model = DRTForCausalLM.from_pretrained(tmp_path / "run")
    assert len(model.model.retrievers) == 2
    with pytest.raises(InvalidArgument, match=r"this recipe trains models with upper_layers=.* Leave --init out"):
        train_recipe(small(), tmp_path / "other", init=tmp_path / "run", runtime=RUNTIME)


@pytest.mark.parametrize("length", [1, 2, 30, 31, 32, 33, 100])
def test_an_aligned_prompt_ends_with_the_first_token_of_a_block(length: int) -> None:
    aligned = align(range(length), BLOCK, filler=7)
    assert len(aligned) % BLOCK == 1
    assert aligned[-length:] == list(range(length))
    assert set(aligned[:-length]) <= {7}
    assert len(aligned) < length + BLOCK


def test_the_trainer_does_what_a_plain_loop_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    little = use_little_text(monkeypatch)
    optimisation = replace(RECIPES["passkey-cpu"].optimisation, steps=4)
    recipe = small(optimisation=optimisation, bank=0, share_rows=False, hard_gumbel=0.0, model={"gumbel": 0.0})
    train_recipe(recipe, tmp_path / "run", runtime=RUNTIME)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
    texts = list(corpora.encoded(little, tokenizer))
    torch.manual_seed(optimisation.seed)
    model = DRTForCausalLM(DRTConfig.preset("tiny", gumbel=0.0)).train()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 1e-3}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    rows = NeedleRows(recipe, tokenizer, texts, BLOCK, 4, optimisation.seed)
    for step in range(4):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * rate(step, 4, optimisation)
        batch = rows[step]
        logits = model(batch["input_ids"], use_cache=False).logits[:, :-1]
        losses = F.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten(), reduction="none")
        asked = batch["answer"][:, 1:].flatten()
        (losses[asked].mean() + 0.2 * losses[~asked].mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    trained = dict(DRTForCausalLM.from_pretrained(tmp_path / "run").named_parameters())
    for name, weight in model.named_parameters():
        torch.testing.assert_close(trained[name], weight, rtol=0, atol=1e-5)


@pytest.mark.parametrize("height", [0.5, 0.25])
def test_the_schedule_begins_anew_from_a_part_of_the_rate(height: float) -> None:
    optimisation = Optimisation(steps=1000, warmup=10, restart=0.6, restart_rate=height)
    rates = [rate(step, 1000, optimisation) for step in range(1001)]
    assert rates[9] == pytest.approx(1.0, abs=1e-3)
    assert rates[599] == pytest.approx(optimisation.final_rate, abs=1e-3)
    assert rates[600] < rates[599] < rates[609] == pytest.approx(height, abs=2e-3)
    assert rates[1000] == pytest.approx(height * optimisation.final_rate, abs=1e-3)
