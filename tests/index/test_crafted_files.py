"""Index files whose checksums are right and that no index wrote: refused before any loop believes their shapes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from memstore.errors import DamagedError
from memstore.index import VectorIndex, files, open_index
from memstore.index.cluster_index import ClusterIndex
from memstore.index.exact import ExactIndex
from tests.index.test_cluster_index import mismatched, trained

N = 600


def exact() -> VectorIndex:
    index = ExactIndex(2, 16, 1)
    index.add(torch.arange(N), torch.randn(N, 2, 1, 16))
    return index


def clusters() -> VectorIndex:
    keys, queries = mismatched(17_000, 8)
    return trained(keys, queries[:, :300])


def codes() -> VectorIndex:
    index = open_index("codes", key_heads=1, key_dim=16, keys_per_block=4)
    index.add(torch.arange(N), torch.ones(N, 1, 4, 16))
    return index


def cut(tensor: Tensor) -> Tensor:
    return tensor[..., :-1].contiguous()


def of_another_type(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float16 if tensor.is_floating_point() else torch.int32)


def deeper(tensor: Tensor) -> Tensor:
    return tensor[None]


def wild(tensor: Tensor) -> Tensor:
    """Numbers that are none, or that count beyond everything."""
    tensor = tensor.clone()
    tensor.view(-1)[0] = torch.inf if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min
    return tensor


@pytest.fixture(scope="module", params=[exact, clusters, codes])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[VectorIndex, Path]:
    index = request.param()
    path = tmp_path_factory.mktemp("saved") / "a.index"
    index.save(path)
    return index, path


@pytest.mark.parametrize("change", [cut, of_another_type, deeper, wild, None])
def test_tensors_that_no_index_wrote_are_refused(
    saved: tuple[VectorIndex, Path], change: Callable[[Tensor], Tensor] | None, tmp_path: Path
) -> None:
    index, path = saved
    tensors, facts = files.load(path, {}).tensors, files.load(path, {}).facts
    before = len(index)
    for name, tensor in tensors.items():
        if not tensor.numel() or (name, change) in [("code_values", wild), ("tail_keys", wild)]:
            continue
        rest = {other: each.clone() for other, each in tensors.items() if other != name}
        files.save(tmp_path / "b.index", facts, rest if change is None else {**rest, name: change(tensor)})
        with pytest.raises(DamagedError, match="Rebuild the index"):
            index.load(tmp_path / "b.index")
    assert len(index) == before


@pytest.mark.parametrize(
    "measured", [5, {"probes": -1}, {"probes": "x"}, {"recall": 2}, {"curve": 5}, {"unknown": 1}, {"curve": [[1] * 9]}]
)
def test_what_was_measured_of_clusters_is_checked(tmp_path: Path, measured: Any) -> None:
    index = clusters()
    assert isinstance(index, ClusterIndex)
    index.save(tmp_path / "a.index")
    content = files.load(tmp_path / "a.index", {})
    told = {**content.facts["measured"], **measured} if isinstance(measured, dict) else measured
    tensors = {name: tensor.clone() for name, tensor in content.tensors.items()}
    files.save(tmp_path / "a.index", {**content.facts, "measured": told}, tensors)
    with pytest.raises(DamagedError):
        index.load(tmp_path / "a.index")
