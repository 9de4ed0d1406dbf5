from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from memstore.errors import ForeignMemory, InvalidArgument
from memstore.memory import MemorySpec
from memstore.memory.spec import decode_landmarks, encode_landmarks
from tests.memory.helpers import S, make_fingerprint, make_spec


def test_a_spec_survives_json_with_the_order_of_its_fields() -> None:
    spec = make_spec(capacity=7, key_dtype="bit")
    again = MemorySpec.from_dict(json.loads(json.dumps(spec.to_dict(), sort_keys=True)))
    assert again == spec
    assert list(again.fields) == ["v", "k"]
    assert hash(again) == hash(spec)


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": 0},
        {"layers": True},
        {"fields": {}},
        {"fields": {"k": (2, 0)}},
        {"fields": {"landmarks": (2, 2)}},
        {"fields": {"not a word": (2, 2)}},
        {"index_layers": (3,)},
        {"index_layers": (1, 0)},
        {"dtype": "float64"},
        {"key_dtype": "int8"},
        {"key_dtype": "bit", "key_dim": 12},
        {"capacity": 0},
        {"codec": "zip"},
    ],
)
def test_what_cannot_work_is_refused_at_once(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(changes))):
        make_spec(**changes)


def test_a_spec_of_a_newer_version_is_refused() -> None:
    values = make_spec().to_dict()
    with pytest.raises(ForeignMemory, match=r"newer memstore wrote this memory: its spec has shards; upgrade"):
        MemorySpec.from_dict(values | {"shards": 3})
    with pytest.raises(ForeignMemory, match="its fingerprint has seed"):
        MemorySpec.from_dict(values | {"fingerprint": values["fingerprint"] | {"seed": 3}})
    del values["codec"]
    with pytest.raises(ForeignMemory, match="another version of memstore wrote this memory: its spec lacks codec"):
        MemorySpec.from_dict(values)


def test_what_fingerprint_and_spec_both_hold_is_named_once() -> None:
    sizes: dict[str, Any] = {"block_size": 2 * S, "fields": {"k": (2, 2 * S, 3)}}
    here = make_spec(**sizes, fingerprint=make_fingerprint(block_size=2 * S))
    told = f"block_size: {2 * S} here, {S} in the memory"
    assert here.differences(make_spec(fields={"k": (2, S, 3)})).count(told) == 1


def test_differences_are_named_word_by_word_the_fingerprint_first() -> None:
    here = make_spec(layers=4, fingerprint=make_fingerprint(weights="91bc"))
    assert here.differences(make_spec()) == [
        "weights: 91bc here, 3fa2 in the memory",
        "layers: 4 here, 3 in the memory",
    ]
    assert make_spec().differences(make_spec()) == []


def test_an_unknown_tokenizer_agrees_with_every_other() -> None:
    unknown = make_fingerprint(tokenizer=None)
    assert unknown.differences(make_fingerprint()) == make_fingerprint().differences(unknown) == []
    assert make_fingerprint(tokenizer="x").differences(make_fingerprint()) == ["tokenizer: x here, 77aa in the memory"]


def test_bit_codes_keep_signs_in_little_endian_order() -> None:
    values = torch.tensor([[[[-1.0, 2.0, -0.5, 0.0, 3.0, -9.0, -9.0, -9.0]]]])
    code = encode_landmarks(values, "bit")
    assert code.tolist() == [[[[0b00011010]]]]
    assert decode_landmarks(code, "bit").flatten().tolist() == [-1, 1, -1, 1, 1, -1, -1, -1]


@pytest.mark.parametrize("key_dtype", ["float32", "bfloat16"])
def test_other_landmarks_are_kept_as_they_are(key_dtype: str) -> None:
    values = torch.arange(-8.0, 8).reshape(1, 2, 1, 8)
    assert torch.equal(decode_landmarks(encode_landmarks(values, key_dtype), key_dtype), values)
