"""What the tests of memories that several processes share run in each of them."""

from __future__ import annotations

import os
import shutil
import signal
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

from memstore import Retrieval
from memstore.errors import InvalidArgument, MemstoreError, UnsupportedModel
from memstore.readers import ranks as module
from memstore.readers.fingerprint import digest_of_weights
from tests.pretended import CUDA, on_device, pretended, real
from tests.readers.models import attach, tiny, tokens

SIZES: dict[str, Any] = {"window": 16, "sink": 16, "segment": 32}
CASES = {
    "model": Retrieval(top_k=3),
    "model, in order of time": Retrieval(top_k=3, order="time"),
    "group": Retrieval(top_k=3, share="group"),
    "none": Retrieval(top_k=2, share="none", pool="mean"),
    "all": Retrieval(top_k="all", positions="true"),
}
LENGTHS = {"model": (200, 75, 6, 330), "all": (333,)}
"""Tokens of the documents: ragged, one of them shorter than a block of 16."""


def lengths(case: str) -> tuple[int, ...]:
    return LENGTHS.get(case, LENGTHS["model"])


def read(folder: Path, case: str, sizes: tuple[int, ...]) -> None:
    """Make the memory of a case."""
    with attach(tiny("llama"), folder, retrieval=CASES[case], block_size=16, **SIZES) as reader:
        for number, length in enumerate(sizes):
            reader.read(tokens(length, seed=number), str(number))


def answer(memory: str, case: str, group: Any = None, model: Any = None, seed: int = 9) -> dict[str, Any]:
    """Logits of a batch of two prompts, one padded, and what is generated after one of them."""
    model = tiny("llama") if model is None else model
    prompts = tokens(22, seed=seed).view(2, 11).to(model.device)
    mask = torch.ones_like(prompts)
    mask[1, :3] = 0
    options = {} if group is None else {"process_group": group, "device": "cpu"}
    with attach(model, memory, retrieval=CASES[case], mode="r", **options, **SIZES) as reader, torch.no_grad():
        logits = model(input_ids=prompts, attention_mask=mask).logits
        generated = model.generate(prompts[:1], max_new_tokens=6, do_sample=False)
        held = 0 if reader.share is None else reader.share.landmarks
    return {"logits": logits, "generated": generated, "landmarks": held}


def work(rank: int, size: int, folder: str, case: str) -> None:
    """Be a rank: answer, and write the answer down."""
    join(rank, size, folder)
    torch.save(answer(f"{folder}/m", case, dist.group.WORLD), f"{folder}/{size}-{rank}.pt")
    dist.destroy_process_group()


def work_again(rank: int, size: int, folder: str, case: str) -> None:
    """Be a rank that attaches, and attaches again: what the first left open is what is open at the end."""
    join(rank, size, folder)
    answer(f"{folder}/m", case, dist.group.WORLD)
    first = len(list(Path("/dev/fd").iterdir()))
    for _ in range(3):
        answer(f"{folder}/m", case, dist.group.WORLD)
    assert len(list(Path("/dev/fd").iterdir())) == first
    dist.destroy_process_group()


def work_on_a_device(rank: int, size: int, folder: str, case: str) -> None:
    """Be a rank whose model is on a device, in a group that refuses what is not, as NCCL does."""
    join(rank, size, folder)
    tell: dict[str, Any] = {name: getattr(dist, name) for name in ("all_gather", "reduce_scatter_tensor")}

    def refusing(name: str, *tensors: Any, group: Any) -> None:
        every = [each for part in tensors for each in (part if isinstance(part, list) else [part])]
        assert all(each.device == CUDA for each in every), "No backend type associated with device type cpu"
        tell[name](
            *([real(each) for each in part] if isinstance(part, list) else real(part) for part in tensors), group
        )

    telling: dict[str, Any] = {name: partial(refusing, name) for name in tell}
    config = mock.patch.object(dist, "get_backend_config", return_value="cuda:nccl")
    with pretended(), config, mock.patch.multiple(dist, **telling):
        found = answer(f"{folder}/m", case, dist.group.WORLD, on_device(tiny("llama")))
        found = {name: real(each) if name != "landmarks" else each for name, each in found.items()}
    torch.save(found, f"{folder}/{size}-{rank}.pt")
    dist.destroy_process_group()


def join(rank: int, size: int, folder: str) -> None:
    """Join the others; blocks are dealt two by two, so that a small memory has some for each."""
    torch.set_num_threads(1)
    module.DEAL = 2
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/ranks-{size}", rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )


def divide(model: Any, mesh: Any) -> Any:
    """The model with its layers divided among the processes of a mesh of one dimension."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    into = [*(f"self_attn.{name}_proj" for name in "qkv"), "mlp.gate_proj", "mlp.up_proj"]
    plan: dict[str, Any] = dict.fromkeys(into, ColwiseParallel())
    plan |= dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), RowwiseParallel())
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    return model


def work_divided(rank: int, size: int, folder: str, case: str) -> None:
    """Be one of the processes of a mesh: of its columns each shares the memory, of its rows each has a whole model."""
    join(rank, size, folder)
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("memory", "model"))
    model = divide(tiny("llama"), mesh["model"])
    torch.save(answer(f"{folder}/m", case, mesh["memory"], model), f"{folder}/{size}-{rank}.pt")
    try:
        attach(model, f"{folder}/m")
    except InvalidArgument as error:
        Path(f"{folder}/{rank}.txt").write_text(str(error))
    dist.destroy_process_group()


def work_loaded_in_parts(rank: int, size: int, folder: str, case: str) -> None:
    """Be one of the processes among which transformers divides a model; each asks the memory for itself."""
    join(rank, size, folder)
    config = DistributedConfig(tp_size=size)
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", distributed_config=config)
    weight = model.model.layers[0].self_attn.q_proj.weight
    assert len(weight.to_local()) == len(weight) // size
    torch.save(answer(f"{folder}/m", case, model=model), f"{folder}/{size}-{rank}.pt")
    dist.destroy_process_group()


def work_fully_sharded(rank: int, size: int, folder: str) -> None:
    """Write down how a model is refused whose weights are brought together layer by layer."""
    join(rank, size, folder)
    model = tiny("llama")
    for layer in model.model.layers:
        fully_shard(layer)
    try:
        attach(fully_shard(model), f"{folder}/m", mode="r")
    except UnsupportedModel as error:
        Path(f"{folder}/{rank}.txt").write_text(str(error))
    dist.destroy_process_group()


def work_on_computers_of_their_own(rank: int, size: int, folder: str) -> None:
    """Be a process with a part of a model on a device; only the first still has what its cache has kept."""
    join(rank, size, folder)
    os.environ["MEMSTORE_CACHE"] = f"{folder}/cache-{rank}"
    model = divide(tiny("llama"), init_device_mesh("cpu", (size,)))
    with mock.patch.object(DTensor, "device", CUDA):
        first = digest_of_weights(model)
        if rank:
            shutil.rmtree(f"{folder}/cache-{rank}", ignore_errors=True)
        assert digest_of_weights(model) == first == digest_of_weights(tiny("llama"))
    dist.destroy_process_group()


def work_beside_others(rank: int, size: int, folder: str, case: str) -> None:
    """Be a rank of one of two groups, each of which has a prompt of its own."""
    join(rank, size, folder)
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("data", "memory"))
    torch.save(answer(f"{folder}/m", case, mesh["memory"], seed=mesh.get_local_rank("data")), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def work_until_one_dies(rank: int, size: int, folder: str, told: int) -> None:
    """Answer until the second rank dies after ``told`` exchanges (-1: before it joins). Write down the errors."""
    module.PATIENCE = timedelta(seconds=20 if told >= 0 else 5)
    join(rank, size, folder)
    Path(f"{folder}/joined-{rank}").touch()  # a barrier would fail itself where the second rank leaves it first
    while len([*Path(folder).glob("joined-*")]) < size:
        time.sleep(0.01)
    tell, left = dist.all_gather, iter(range(max(told, 0), -1, -1))

    def die(*arguments: Any, **options: Any) -> None:
        if not next(left):
            os.kill(os.getpid(), signal.SIGKILL)
        tell(*arguments, **options)

    if rank == 1:
        dist.all_gather = die
        if told < 0:
            dist.new_group = die
    model = tiny("llama")
    options = {"retrieval": CASES["model"], "mode": "r", "process_group": dist.group.WORLD, **SIZES}
    try:
        with attach(model, f"{folder}/m", **options), torch.no_grad():
            while True:
                model(tokens(11)[None])
    except MemstoreError as error:
        Path(f"{folder}/{rank}.txt").write_text(str(error))
    os._exit(0)  # a group that has lost one cannot be taken down in order


def work_on_different_memories(rank: int, size: int, folder: str) -> None:
    """Write down how a rank hears that the others see another memory."""
    join(rank, size, folder)
    model = tiny("llama")
    options = {"retrieval": CASES["model"], "mode": "r", "process_group": dist.group.WORLD, **SIZES}
    with attach(model, f"{folder}/{rank}", **options), torch.no_grad():
        try:
            model(tokens(11)[None])
        except MemstoreError as error:
            Path(f"{folder}/{rank}.txt").write_text(str(error))
    dist.destroy_process_group()
