"""The demo of a DRT, whole, on few tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

import memstore
from memstore.errors import InvalidArgument
from memstore.eval.evaluation import needle_blocks
from memstore.readers.kinds import PASSKEY, load_folder, shipped_model
from memstore.tools import demo
from tests.eval.drts import save_drt
from tests.tools.conftest import Cli


@pytest.mark.slow
def test_every_volume_is_read_and_asked_in_a_new_process_and_the_traces_name_the_blocks_of_the_passkeys(
    tmp_path: Path, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a demo.mem"
    result = demo.run_drt(shipped_model(PASSKEY), threads=1, tokens=10_000, keep=folder)
    assert (result["tokens_read"], result["reopened_in_new_process"]) == (10_000, True)
    assert result["passkeys_asked"] == result["passkeys_found"] == len(result["answers"]) == demo.VOLUMES
    assert all(answer["expected"] in answer["text"] for answer in result["answers"])
    shown = capsys.readouterr().out
    assert "passkeys found" in shown
    assert all(answer["document"] in shown for answer in result["answers"])
    assert cli("verify", folder).code == 0
    with memstore.open(folder, mode="r") as memory:
        assert [trace.number for trace in memory.traces.list()] == [each["trace"] for each in result["answers"]]
        _, tokenizer = load_folder(shipped_model(PASSKEY))
        for answer in result["answers"]:
            trace = memory.traces.get(answer["trace"])
            assert trace.info["question"] == "|What is the passkey? The passkey is:"
            assert trace.info["model"] == "passkey"
            assert tokenizer.decode([token for token in trace.tokens() if token is not None]) == answer["answer"] + "|"
            blocks = needle_blocks(range(*answer["needle"]), 31)
            weight = sum(part for name, block, part in trace.used() if name == answer["document"] and block in blocks)
            assert weight > 0.9
            assert trace.used()[0][1] in blocks
            for step in trace.steps():
                for look in step.looks:
                    assert abs(float(look.weights[0].sum()) - 1) < 1e-3
    for answer in result["answers"]:
        told = cli("trace", folder, answer["trace"], "--json").json
        assert told["answer"] == answer["answer"] + "|"
        blocks = needle_blocks(range(*answer["needle"]), 31)
        assert all(step["blocks"][0]["block"] in blocks for step in told["steps"])
        texts = {used["block"]: used["text"] for used in told["blocks"] if used["block"] in blocks}
        assert f"passkey is:{answer['expected']}|" in "".join(texts[block] for block in sorted(texts))
    told = cli("trace", folder)
    assert (told.code, result["answers"][-1]["expected"] in told.out) == (0, True)


def test_what_to_type_after_the_demo() -> None:
    assert [line.split("  ")[1] for line in demo.what_to_type(Path("a demo.mem"))[1:]] == [
        "memstore trace 'a demo.mem'",
        "memstore view 'a demo.mem'",
    ]


def test_a_demo_that_is_not_kept_says_how_to_keep_it() -> None:
    (line,) = demo.what_to_type(None)
    assert line.endswith(": memstore demo --keep demo.mem")


def test_a_folder_that_exists_is_not_written_into(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="exists already"):
        demo.run_drt(save_drt(tmp_path / "model"), keep=tmp_path)
