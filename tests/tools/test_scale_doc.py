"""The programs in docs/scale.md run, here as one rank of one."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")

PROGRAM = """
import sys
import torch
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM, AutoTokenizer

import memstore
from tests.models import drt

folder, memory = sys.argv[1:]
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
with memstore.attach(model, memory, tokenizer=tokenizer) as reader:
    reader.read("The harbour froze in the winter of 1947. " * 8)
prompt = tokenizer("The harbour", return_tensors="pt", add_special_tokens=False)
plan = {"model.layers.*.self_attn.q_proj": ColwiseParallel()}
ids, free = torch.randint(1, 50, (2, 30)), torch.ones(2, 30, dtype=torch.bool)
BLOCKS = sys.stdin.read().split("\\0")
for number, block in enumerate(BLOCKS):
    if number == 2:
        model = drt.make("rope").train()
    exec(block.replace("zarr+s3://bucket/notes", memory).replace('"cuda", (2, 2)', '"cpu", (1, 1)'))
print(answer.shape[1] > prompt["input_ids"].shape[1], len(BLOCKS))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_the_programs_of_several_processes_run(model_folder: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 3
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    call = [sys.executable, "-c", PROGRAM, str(model_folder), str(tmp_path / "m")]
    done = subprocess.run(
        call, input="\0".join(blocks), capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["True", "3"]
