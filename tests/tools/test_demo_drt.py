"""The demo of a DRT, whole, on few tokens, with weights that have learned nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from memstore.errors import InvalidArgument
from memstore.tools import demo_drt
from memstore.tools.models import is_drt
from tests.eval.drts import save_drt
from tests.tools.conftest import Cli

TOKENS = 3_000


def test_every_volume_is_read_and_asked_in_a_new_process(
    tmp_path: Path, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_drt(tmp_path / "model")
    assert is_drt(str(model))
    result = demo_drt.run(model, threads=1, tokens=TOKENS, keep=tmp_path / "m")
    assert result["tokens_read"] == TOKENS
    assert result["reopened_in_new_process"] is True
    assert result["passkeys_asked"] == len(result["answers"]) == demo_drt.VOLUMES
    assert all(answer["expected"] in answer["text"] for answer in result["answers"])
    shown = capsys.readouterr().out
    assert "passkeys found" in shown
    assert all(answer["document"] in shown for answer in result["answers"])
    assert cli("verify", tmp_path / "m").code == 0


def test_a_folder_that_exists_is_not_written_into(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="exists already"):
        demo_drt.run(save_drt(tmp_path / "model"), keep=tmp_path)
