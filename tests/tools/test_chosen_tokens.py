"""The tokens that a model's own index chose and missed: trace, audit, server and page, each as users reach it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

import memstore
from memstore.errors import InvalidArgument
from memstore.memory.traces import Traces
from memstore.tools.app import main
from memstore.tools.inspector.app import Inspector
from memstore.tools.inspector.traced import MOST_BLOCKS
from memstore.tools.models import load_recorded, remember
from tests.eval.drts import byte_tokenizer
from tests.models.indexed import tiny
from tests.tools.conftest import Cli
from tests.tools.inspector.conftest import chrome, client_of
from tests.tools.inspector.test_page import Seen, shown
from tests.tools.test_serve import ask, serving

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

    from memstore.readers.reader import Reader

TEXT = "".join(f"Line {i} of the log tells of nothing new.\n" for i in range(12))
QUESTION = "What is new in line 7? "
BLOCK, STEPS, AUDIT = 16, 4, 2
UNITS = {"deepseek_v32": 1, "minimax_m3_vl_text": 8, "deepseek_v4": 4}
"""Families, and how many tokens each chooses together."""
LAYER = {1: 2, 8: 2, 4: 3}
"""A layer that chooses, by unit."""

__all__ = ["chrome"]  # a fixture


@dataclass(frozen=True)
class Asked:
    """A memory with two traces: 1 of an answer, 2 of an audit."""

    path: Path
    unit: int


@pytest.fixture(scope="module", params=UNITS)
def asked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Asked:
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "log.txt").write_text(TEXT)
    tiny(request.param, vocab_size=256).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    remember(str(folder / "model"))
    path = folder / "log.mem"
    with redirect_stdout(StringIO()):
        for arguments in (
            ("read", folder / "log.txt", path, "--model", folder / "model", "--block-size", BLOCK),
            ("ask", path, QUESTION, "--max-tokens", STEPS, "--trace"),
            ("audit", path, QUESTION, "--max-tokens", STEPS, "--trace"),
        ):
            assert main([str(argument) for argument in arguments]) == 0
    return Asked(path, UNITS[request.param])


def summed(looks: list[dict[str, Any]], unit: int) -> dict[int, tuple[float, float | None]]:
    """Weight and best score of each unit of the document, by its first token, from the raw lists of a step."""
    weights: dict[int, float] = defaultdict(float)
    scores: dict[int, float] = {}
    heads = sum(len(look["weights"]) for look in looks)
    for look in looks:
        for head, shares in enumerate(look["weights"]):
            row = head * len(look["blocks"]) // len(look["weights"])
            columns = (look[name][row] for name in ("document", "blocks", "offsets", "scores"))
            for document, block, offset, score, share in zip(*columns, shares, strict=True):
                if document == 0:
                    first = (block * BLOCK + offset) // unit * unit
                    weights[first] += share / heads
                    if score is not None:
                        scores[first] = max(score, scores.get(first, score))
    return {first: (weight, scores.get(first)) for first, weight in weights.items()}


def test_a_trace_lists_the_tokens_with_most_attention(cli: Cli, asked: Asked) -> None:
    data = cli("trace", asked.path, 1, "--top", 3, "--json").json
    assert data["unit"] == asked.unit
    assert len(data["steps"]) == STEPS
    for step in data["steps"]:
        expected = summed(step["looks"], asked.unit)
        assert len(step["tokens"]) == 3
        best = sorted((weight for weight, _ in expected.values()), reverse=True)
        assert [token["weight"] for token in step["tokens"]] == pytest.approx(best[:3], abs=1e-6)
        for token in step["tokens"]:
            place = token["block"] * BLOCK + token["offset"]
            weight, score = expected[place // asked.unit * asked.unit]
            assert token["weight"] == pytest.approx(weight, abs=1e-6)
            assert token["score"] == (score if score is None else pytest.approx(score))
            before, _, rest = token["text"].removeprefix("…").partition("[")
            shown, _, after = rest.removesuffix("…").partition("]")
            assert shown == (TEXT[place].strip() or "␣")
            begin = place if TEXT[place].strip() else place + 1
            assert TEXT[:begin].replace("\n", " ").endswith(before)
            assert TEXT[place + 1 :].replace("\n", " ").startswith(after)
            assert len(before) >= min(BLOCK, place)
            assert len(after) >= min(BLOCK, len(TEXT) - place - 1)
    some = cli("trace", asked.path, 1, "--layer", LAYER[asked.unit], "--head", 1, "--step", 1, "--json").json["steps"][
        0
    ]
    (look,) = some["looks"]
    alone = {**look, "weights": [look["weights"][1]]}
    rows = len(look["blocks"])
    row = len(look["weights"]) and rows // len(look["weights"])
    for name in ("document", "blocks", "offsets", "scores"):
        alone[name] = [look[name][row]]
    best = sorted((weight for weight, _ in summed([alone], asked.unit).values()), reverse=True)
    assert [token["weight"] for token in some["tokens"]] == pytest.approx(best[:2], abs=1e-6)


def test_the_text_of_a_trace_has_the_tokens_in_brackets(cli: Cli, asked: Asked) -> None:
    done = cli("trace", asked.path, 1)
    assert done.code == 0, done.err
    head, *rows = done.out.partition("\n\n")[2].splitlines()
    assert head.split() == ["step", "token", "block", "weight", "score", "layer", "text"]
    data = cli("trace", asked.path, 1, "--json").json
    told = [token for step in data["steps"] for token in step["tokens"]]
    assert len(told) == 2 * STEPS == len(rows)
    for token, row in zip(told, rows, strict=True):
        assert token["text"].strip() in row
        assert f" {token['weight']:.4f} " in row
    assert "fetched from" in done.out, "rows of tokens are fetched anew for each of them"


def test_all_attention_is_accounted_for(asked: Asked) -> None:
    with memstore.open(asked.path, mode="r") as memory:
        first, *later = memory.traces.get(1).steps()
        for step in (first, *later):
            for look in step.looks:
                stored = (look.weights * (look.document >= 0).repeat(len(look.weights) // len(look.document), 0)).sum(1)
                assert look.elsewhere is not None
                rest = 0.1 if asked.unit == 4 else 2e-3
                """Heads of DeepSeek-V4 also have a sink that is no token."""
                assert stored + look.elsewhere.sum(1) == pytest.approx(1, abs=rest)
                assert not look.elsewhere[:, 0].any(), "the whole document is stored"
                assert asked.unit == 4 or not look.elsewhere[:, 1].any(), "only DeepSeek-V4 has a window beside it"
                assert step is not first or not look.elsewhere[:, 3].any(), "there was no answer yet"
                assert look.search_us > 0 or look.scores[0, 0] != look.scores[0, 0]
                assert look.gather_us > 0
        last = np.concatenate([look.elsewhere for look in later[-1].looks if look.elsewhere is not None])
        *_, to_question, to_answer = last.sum(0)
        assert to_question > 0
        assert to_answer > 0 or asked.unit == 1, "a token need not choose its neighbours, a block chooses itself"


def test_an_audit_names_the_tokens_that_attention_to_everything_wants(tmp_path: Path) -> None:
    """With one layer, nothing that was left out before changes the query: so the truth is that of a wider index."""
    ids = torch.tensor(byte_tokenizer()(TEXT).input_ids)
    question = ids[:9]
    narrow, wide = (tiny("deepseek_v32", vocab_size=256, num_hidden_layers=1, index_topk=top) for top in (16, 4096))
    found = []
    for model, name in ((narrow, "narrow"), (wide, "wide")):
        with memstore.attach(model, tmp_path / name, block_size=BLOCK) as reader:
            reader.read(ids)
            with reader.record() as recorder:
                audited = reader.audit(question, tokens=1)
            trace = reader.memory.traces.get(recorder.number)
            (look,) = trace.steps()[0].looks
            places = (look.blocks * BLOCK + look.offsets)[0]
            stored = look.document[0] == 0
            found.append((audited, trace, dict(zip(places[stored], look.weights[:, stored].T, strict=True))))
    (audited, trace, chosen), (everything, _, truth) = found
    missed = {place: float(shares.mean()) for place, shares in truth.items() if place not in chosen}
    best = sorted(missed, key=lambda place: -missed[place])[: len(audited.missed_tokens)]
    assert [each.block * BLOCK + each.offset for each in audited.missed_tokens] == best
    told = [each.weight for each in audited.missed_tokens]
    assert told == pytest.approx([missed[place] for place in best], abs=1e-3)
    assert trace.info["missed"] == [list(each) for each in audited.missed_tokens]
    assert trace.tokens() == audited.tokens
    assert not everything.missed_tokens


def test_the_command_shows_the_most_missed_token_of_each_step(cli: Cli, asked: Asked) -> None:
    done = cli("audit", asked.path, QUESTION, "--max-tokens", AUDIT)
    assert done.code == 0, done.err
    data = cli("audit", asked.path, QUESTION, "--max-tokens", AUDIT, "--json").json
    assert "trace" not in data
    assert {each["step"] for each in data["missed_tokens"]} == set(range(AUDIT))
    firsts = [next(each for each in data["missed_tokens"] if each["step"] == step) for step in range(AUDIT)]
    for first, row in zip(firsts, done.out.splitlines()[-AUDIT:], strict=True):
        assert first["text"].strip() in row
        place = first["block"] * BLOCK + first["offset"]
        assert f"[{TEXT[place].strip() or '␣'}]" in first["text"]
    with memstore.open(asked.path, mode="r") as memory:
        assert len(memory.traces.list()) == 2, "an audit records nothing unless it is asked to"


def test_a_server_tells_the_blocks_of_the_chosen_tokens(asked: Asked) -> None:
    with serving(asked.path, trace=True) as port:
        body = {"model": "log", "prompt": QUESTION, "max_tokens": STEPS}
        status, answer, _ = ask(port, "/v1/completions", body)
    assert status == 200, answer
    with memstore.open(asked.path) as memory:
        recorded = memory.traces.get(answer["trace"])
        used = {(name, block): weight for name, block, weight in recorded.used()}
        memory.traces.remove(recorded.number)
    assert answer["sources"]
    for source in answer["sources"]:
        assert source["text"] == TEXT[source["block"] * BLOCK :][:BLOCK]
        assert source["attention"] == pytest.approx(used["log", source["block"]], abs=1e-4)


@pytest.fixture
def client(asked: Asked) -> Iterator[TestClient]:
    with memstore.open(asked.path, mode="r") as memory:
        inspector = Inspector(memory)
        yield client_of(inspector)
        inspector.close()


def test_the_page_gets_each_chosen_token_of_the_blocks(client: TestClient, cli: Cli, asked: Asked) -> None:
    assert client.get("/api/traces/1").json()["unit"] == asked.unit
    for step in cli("trace", asked.path, 1, "--json").json["steps"]:
        answer = client.get(f"/api/traces/1/steps/{step['step']}").json()
        expected = summed(step["looks"], 1)
        tokens = {
            each["block"] * BLOCK + int(offset): token
            for each in answer["blocks"]
            for offset, token in each["tokens"].items()
        }
        assert tokens.keys() == expected.keys()
        for place, token in tokens.items():
            weight, score = expected[place]
            assert token["weight"] == pytest.approx(weight, abs=1e-6)
            assert token["score"] == (score if score is None else pytest.approx(score))
        for each in answer["blocks"]:
            assert "".join(each["pieces"]) == each["text"] == TEXT[each["block"] * BLOCK :][:BLOCK]
            shares = [token["weight"] for token in each["tokens"].values()]
            assert sum(shares) == pytest.approx(each["weight"], abs=1e-6)


def test_the_page_gets_what_an_audit_missed(client: TestClient, asked: Asked) -> None:
    def missed(path: str) -> dict[tuple[int, int], float]:
        blocks = client.get(f"/api/traces/2/{path}").json()["blocks"]
        found = [(each["block"], int(at), token) for each in blocks for at, token in each["tokens"].items()]
        return {(block, at): token["missed"] for block, at, token in found if "missed" in token}

    with memstore.open(asked.path, mode="r") as memory:
        told = memory.traces.get(2).info["missed"]
    whole: dict[tuple[int, int], float] = defaultdict(float)
    for step in range(STEPS):
        expected = {(block, at): share for number, _, block, at, share in told if number == step}
        assert missed(f"steps/{step}") == pytest.approx(expected)
        for place, share in expected.items():
            whole[place] += share / STEPS
    assert whole
    assert missed("used") == pytest.approx(whole)


def test_misses_of_entries_count_once(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memstore.readers.audit.WORST", 10**6)
    with attached(asked) as reader:
        audited = reader.audit(QUESTION, tokens=1)
    entry = 4 if asked.unit == 4 else 1
    places = [each.block * BLOCK + each.offset for each in audited.missed_tokens]
    assert len({place // entry for place in places}) == len(places) > 5
    assert all(place % entry == 0 for place in places)
    lost = [layer.memory * (1 - layer.captured) for layer in audited.layers if layer.memory is not None]
    assert sum(each.weight for each in audited.missed_tokens) == pytest.approx(
        float(torch.stack(lost).mean()), rel=1e-3
    )


def test_an_audit_does_not_change_a_trace_that_has_steps(asked: Asked) -> None:
    traces = Traces(None, "ram:")
    with attached(asked) as reader, reader.record(traces=traces) as recorder:
        told = reader.audit(QUESTION, tokens=2).tokens
        with pytest.raises(InvalidArgument, match="an audit needs a trace of its own"):
            reader.audit(QUESTION, tokens=2)
    assert traces.get(recorder.number).tokens() == told


@contextmanager
def attached(asked: Asked) -> Iterator[Reader]:
    with memstore.open(asked.path, mode="r") as memory:
        loaded = load_recorded(memory, None, None, device="cpu")
        with memstore.attach(loaded.model, memory, tokenizer=loaded.tokenizer) as reader:
            yield reader


def test_a_whole_trace_compares_no_scores(client: TestClient) -> None:
    for path, scored in (("used", False), ("steps/0", True)):
        for block in client.get(f"/api/traces/1/{path}").json()["blocks"]:
            for each in (block, *block["tokens"].values()):
                assert {"score" in each, "layer" in each} == {scored}
            assert ("tier" in block) == scored


def test_a_trace_with_nonsense_for_missed_tokens_is_shown_without_them(cli: Cli, asked: Asked) -> None:
    nonsense: list[Any] = [7, [0], [0, "log", "x", 1, 0.5], [0, "log", 1, 1, 2.0], [0, "log", 10**30, 1, 0.5]]
    nonsense += [[0, "log", 1, offset, 0.5] for offset in (-1, BLOCK, 10**30)]
    with memstore.open(asked.path) as memory:
        for unit in (-3, 10**30):
            with memory.traces.record(mechanism="index", unit=unit, missed=nonsense) as recorder:
                recorder.begin()
                recorder.look(memory.traces.get(1).steps()[0].looks[0])
            client = client_of(Inspector(memory))
            assert client.get(f"/api/traces/{recorder.number}").json()["unit"] == 1
            answer = client.get(f"/api/traces/{recorder.number}/steps/0")
            assert answer.status_code == 200
            blocks = answer.json()["blocks"]
            assert [each["text"] for each in blocks if each["weight"] is None] == [None]
            assert not any("missed" in token for each in blocks[:-1] for token in each["tokens"].values())
            assert cli("trace", asked.path, recorder.number).code == 0
            memory.traces.remove(recorder.number)


def test_misses_in_blocks_that_are_shown_are_never_left_out(asked: Asked) -> None:
    others = [[0, "log", 1000 + block, 0, 0.1] for block in range(2 * MOST_BLOCKS)]
    with memstore.open(asked.path) as memory:
        look = memory.traces.get(1).steps()[0].looks[0]
        block = int(look.blocks[look.document >= 0][0])
        with memory.traces.record(missed=[*others, [0, "log", block, 3, 0.25]]) as recorder:
            recorder.begin()
            recorder.look(look)
        found = client_of(Inspector(memory)).get(f"/api/traces/{recorder.number}/steps/0").json()["blocks"]
        memory.traces.remove(recorder.number)
    assert len(found) == 2 * MOST_BLOCKS
    (shown,) = (each for each in found if each["block"] == block)
    assert shown["tokens"]["3"]["missed"] == 0.25


@pytest.mark.slow
def test_chosen_and_missed_tokens_are_marked_in_the_text(asked: Asked, chrome: Chrome) -> None:
    with memstore.open(asked.path, mode="r") as memory, shown(chrome, memory) as seen:
        seen.click("#traces li:nth-child(1) button")  # the audit
        seen.wait_for("#used h3", "Chosen")
        seen.click("#answer .token:nth-child(2)")
        seen.wait_for("#used h2", "step 1")
        seen.until("document.querySelector('.row .picked')")
        used = client_of(Inspector(memory)).get("/api/traces/2/steps/1").json()["blocks"]
        for each in used:
            if seen.run("return document.querySelector(arguments[0])", f"#row-{each['block']}") is not None:
                _check_row(seen, each, asked.unit)
        assert seen.run("return document.querySelectorAll('.row .picked').length") > 1
        lines = seen.run(
            "return ['.picked', '.missed:not(.picked)'].map(each => getComputedStyle(document.querySelector(each)))"
            ".map(style => [style.borderBottomStyle, style.outlineStyle])"
        )
        assert lines == [["solid", "none"], ["none", "dashed"]], "they differ by more than colour"
        assert "chosen" in seen.text("#marks")
        assert "missed" in seen.text("#marks")
        # By the keyboard: the first token of the list.
        seen.run("document.querySelector('.picks button').focus()")
        words = seen.text(".picks button .picked")
        seen.press("\ue007")
        seen.until("document.querySelector('.row .pointed')")
        assert words.replace("⏎", "\n") in seen.text(".row .pointed")
        seen.click("#answer .close")
        seen.until("!document.querySelector('.row .picked')")
        assert seen.run("return document.querySelector('#marks').hidden")


def _check_row(seen: Seen, used: dict[str, Any], unit: int) -> None:
    """Check that a row has its text, and marks exactly the tokens that were chosen."""
    row = f"#row-{used['block']} .text"
    assert seen.text(row) == used["text"]
    marked = seen.run(
        "return [...document.querySelectorAll(arguments[0] + ' .picked')].map(each => [each.textContent, each.title])",
        row,
    )
    chosen = sorted(int(offset) for offset, token in used["tokens"].items() if "weight" in token)
    if unit == 4:  # of entries the first token is known
        chosen = [at for first in chosen for at in range(first, min(first + unit, BLOCK))]
    assert "".join(words for words, _ in marked) == "".join(used["pieces"][at] for at in chosen)
    assert len(marked) == len({(used["block"] * BLOCK + at) // unit for at in chosen})
    assert all("attention" in title for _, title in marked)
