from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memstore.errors import DamagedError, InvalidArgument, NotFound, UnsupportedModel
from memstore.eval.filler import load_filler
from memstore.readers.kinds import encode
from memstore.tools import models
from memstore.tools.models import load_model, resolve_dtype, resolve_model
from memstore.train.corpora import END_OF_TEXT, encoded, train_tokenizer


def test_a_model_directory_loads_ready_to_read(model_folder: Path) -> None:
    model, tokenizer = load_model(str(model_folder), "float32")
    assert model.dtype == torch.float32
    assert not model.training
    assert tokenizer.decode(encode(tokenizer, "Call me Ishmael.")) == "Call me Ishmael."


def test_garbage_is_looked_for_after_loading_but_not_among_what_libraries_made(model_folder: Path) -> None:
    load_model(str(model_folder), "float32")
    assert gc.isenabled()
    assert gc.get_freeze_count() > 100_000


def test_names_of_control_tokens_in_a_text_are_text(tmp_path: Path) -> None:
    tokenizer, text = train_tokenizer(["one two"], 300), f"one {END_OF_TEXT} two"
    found = [encode(tokenizer, text), *(ids.tolist() for ids in encoded([text], tokenizer))]
    (tmp_path / "text.txt").write_text(text)
    found.append(load_filler(tokenizer, [tmp_path / "text.txt"], at_most=100).tokens.tolist())
    assert tokenizer.eos_token_id in tokenizer(text)["input_ids"], "or this test would say nothing"
    for ids in found:
        assert tokenizer.eos_token_id not in ids
        assert tokenizer.decode(ids) == text


def test_loading_is_quiet(model_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loaded = load_model(str(model_folder), "bfloat16")
    encode(loaded.tokenizer, "word " * 10_000)
    assert loaded.model.dtype == torch.bfloat16
    assert capfd.readouterr() == ("", "")


def test_auto_is_bfloat16_only_where_the_hardware_computes_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "computes_bfloat16", lambda: False)
    assert resolve_dtype("auto") == torch.float32
    assert resolve_dtype("auto", device="cuda") == torch.bfloat16
    monkeypatch.setattr(models, "computes_bfloat16", lambda: True)
    assert resolve_dtype("auto") == torch.bfloat16


def test_auto_is_float32_where_pytorch_may_not_use_wider_vectors() -> None:
    code = "from memstore.tools.models import resolve_dtype; print(resolve_dtype('auto'))"
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "torch.float32\n"


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="auto, float32"):
        resolve_dtype("int4")


@pytest.mark.parametrize("name", ["./nope", "/no/such/folder", "a/b/c", "~/no-such-folder-here"])
def test_a_missing_directory_is_not_found(name: str) -> None:
    with pytest.raises(NotFound, match="no model directory"):
        resolve_model(name)


def test_a_missing_gguf_file_is_not_looked_for_on_the_hub() -> None:
    with pytest.raises(NotFound, match=r"no model file nofile\.gguf"):
        resolve_model("nofile.gguf")


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"needs a config.json"):
        resolve_model(str(tmp_path))


def test_a_hub_id_is_left_to_the_hub() -> None:
    assert resolve_model("owner/name") == "owner/name"


def test_a_model_that_cannot_be_found_on_the_hub_is_said_in_one_line() -> None:
    with pytest.raises(NotFound, match="the model 'owner/name' could not be loaded") as caught:
        load_model("owner/name")
    assert "\n" not in str(caught.value)


def test_damaged_weights_are_named(model_folder: Path, tmp_path: Path) -> None:
    weights = shutil.copytree(model_folder, tmp_path / "model") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(DamagedError, match=r"the weights of the model '.*model' are damaged: .*download it again"):
        load_model(str(weights.parent))


def test_a_model_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    with pytest.raises(UnsupportedModel, match="unheard-of"):
        load_model(str(tmp_path))
