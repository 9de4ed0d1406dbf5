"""What the tests of models that ask a memory together with other ranks run in each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import memstore
from memstore import Retrieval
from memstore.errors import InvalidArgument, UnsupportedModel
from memstore.models.memorizing import add_knn_memory
from tests.models import drt, hils, landmark
from tests.models.stock import small_llama
from tests.models.test_memorizing_reader import small
from tests.readers.ranks import join

RETRIEVALS = {
    "landmark, one list": Retrieval(top_k=3, share="layer"),
    "landmark, each group": Retrieval(top_k=2, every=1, share="group", share_tokens=False, positions="clamped"),
}
CASES = [
    *(f"drt, {kind}" for kind in ("rope", "alibi, two groups", "chunked", "tied, float16 states", "external")),
    "landmark, each head and token",
    *RETRIEVALS,
    "hils, qwen",
    "memorizing, gate",
    "memorizing, joint",
    "stock with a kNN layer",
]
"""A case of each mechanism."""


def model(case: str) -> Any:
    """The model of a case; vocabularies are of 50 tokens at least."""
    kind, _, which = case.partition(", ")
    if kind == "drt":
        return drt.make(which)
    if kind == "landmark":
        return landmark.make(segment_blocks=2, retrieval_top_k=3, local_layers=[1], num_hidden_layers=4)
    if kind == "hils":
        return hils.make(which)
    if kind == "memorizing":
        return small(joint=which == "joint")
    stock = small_llama(vocabulary=60, layers=4)
    layer = add_knn_memory(stock, layer=2, top_k=5)
    stock.config.knn_memory["window"] = 16
    with torch.no_grad():
        layer.gate.fill_(0.6)
    return stock


def tokens(length: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 50, (rows, length), generator=torch.Generator().manual_seed(seed))


def read(folder: Path, case: str, length: int) -> None:
    """Make the memory of a case: before the document that is asked there is another one."""
    options: dict[str, Any] = {} if case.startswith(("drt", "landmark", "hils")) else {"block_size": 8}
    with memstore.attach(model(case), folder, retrieval=RETRIEVALS.get(case), **options) as reader:
        reader.read(tokens(30, seed=1)[0], "other")
        reader.read(tokens(length)[0], "asked")


def answer(folder: str, case: str, group: Any = None) -> dict[str, Any]:
    """Logits of a batch of two prompts, one padded, and what is generated after one of them."""
    asking = model(case)
    prompts = tokens(23, rows=2, seed=9)
    mask = torch.ones_like(prompts)
    mask[1, :3] = 0
    options: dict[str, Any] = {"retrieval": RETRIEVALS.get(case), "mode": "r", "document": "asked"}
    with memstore.attach(asking, folder, process_group=group, **options) as reader, torch.no_grad():
        logits = asking(input_ids=prompts, attention_mask=mask).logits
        generated = asking.generate(prompts[:1], max_new_tokens=10, do_sample=False, pad_token_id=0)
        held = 0 if reader.share is None else reader.share.landmarks
    return {"logits": logits, "generated": generated, "landmarks": held}


def work(rank: int, size: int, folder: str, cases: list[str]) -> None:
    """Be a rank: answer in every case, and write the answers down."""
    join(rank, size, folder)
    for case in cases:
        torch.save(answer(f"{folder}/{case}/m", case, dist.group.WORLD), f"{folder}/{case}/{size}-{rank}.pt")
    dist.destroy_process_group()


def work_refused(rank: int, size: int, folder: str, case: str) -> None:
    """Write down what a rank is told that wants all blocks in one place."""
    join(rank, size, folder)
    options: dict[str, Any] = {"document": "asked", "mode": "r", "process_group": dist.group.WORLD}
    with memstore.attach(model(case), f"{folder}/m", **options) as reader:
        asking: tuple[Any, ...] = (reader.search, reader.ask, reader.audit)
        for number, ask in enumerate(asking):
            try:
                ask("words")
            except InvalidArgument as error:
                Path(f"{folder}/{number}.txt").write_text(str(error))
    divided = model("landmark, one list")
    name = next(name for name, part in divided.named_modules() if isinstance(part, torch.nn.Linear))
    parallelize_module(divided, init_device_mesh("cpu", (size,)), {name: ColwiseParallel()})
    try:
        memstore.attach(divided, f"{folder}/m", **options)
    except UnsupportedModel as error:
        Path(f"{folder}/divided.txt").write_text(str(error))
    dist.destroy_process_group()
