"""What a question by a new process costs beside the imports and the weights that any answer needs.

    python -m benchmarks.cold --model qwen.gguf --runs 5

Processor seconds, in turn, on one thread, with the files warm: ``memstore ask`` of one token by a new process, the same
by a resident process (caller and child), and a script that imports torch and transformers and loads the same converted
weights and tokenizer, in the same precision. *The model's own work* is what ``ask`` takes in a process that has asked
the same before. Also the anonymous memory of new processes at their end: mapped weights are not in it. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

import memstore
from memstore.resources import hardware
from memstore.tools.models import load_model, resolve_dtype, resolve_model
from memstore.tools.resident import VARIABLE

ASKED = ["Who built it?"]
TEXT = "The lighthouse was built in 1847 by the engineer Thomas Stevenson. "
BARE = """
import sys
import torch, transformers
torch.set_num_threads(1)
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=getattr(torch, sys.argv[2]))
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
"""
MEASURED = """
import atexit, re, resource, sys

def tell():
    used = resource.getrusage(resource.RUSAGE_SELF)
    with open("/proc/self/status") as status:
        anonymous = re.search(r"RssAnon:\\s+(\\d+)", status.read())
    print(used.ru_utime + used.ru_stime, int(anonymous[1]) // 1024, file=open(TOLD, "w"))

atexit.register(tell)
"""


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    dtype = str(resolve_dtype(options.dtype)).removeprefix("torch.")
    weights = resolve_model(options.model, dtype)
    os.environ.update({"OMP_NUM_THREADS": "1", VARIABLE: "off"})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text(TEXT * 20)
        memory = str(folder / "text.mem")
        given = ["--model", options.model, "--dtype", dtype]
        cli = [sys.executable, "-m", "memstore"]
        subprocess.run([*cli, "read", folder / "text.txt", memory, *given], check=True, capture_output=True)
        ask = [*ASKED, "--max-tokens", "1"]
        run = "import runpy; runpy.run_module('memstore', run_name='__main__')"
        bare, alone = list[tuple[float, int]](), list[tuple[float, int]]()
        with resident([*cli, "ask", memory, *ask], folder) as served:
            again = [served() for _ in range(options.runs)]
        for _ in range(options.runs):
            bare.append(seconds(folder, BARE, [weights, dtype]))
            alone.append(seconds(folder, run, ["ask", memory, *ask]))
        own = warm(options.model, dtype, memory)
    facts: dict[str, dict[str, float]] = {
        way: {
            "cpu_seconds": round(median(cpu for cpu, _ in of), 2),
            "anonymous_mib": round(median(mib for _, mib in of)),
        }
        for way, of in (("import and load", bare), ("memstore ask", alone))
    }
    facts["resident"] = {"cpu_seconds": round(median(again), 2)}
    facts["the model's own work"] = {"cpu_seconds": round(own, 2)}
    ratio = facts["memstore ask"]["cpu_seconds"] / facts["import and load"]["cpu_seconds"]
    print(json.dumps({"model": options.model, "dtype": dtype, **facts, "ratio": round(ratio, 2), **hardware()}))


@contextmanager
def resident(command: list[str], folder: Path) -> Iterator[Callable[[], float]]:
    """Start a resident process, and yield a function that runs ``command`` in it and returns the processor seconds."""
    env = {**os.environ, VARIABLE: "", "XDG_RUNTIME_DIR": str(folder)}
    options: dict[str, Any] = {"env": env, "cwd": folder, "check": True, "capture_output": True}
    subprocess.run(command, **options)
    while not (paths := [each for each in (folder / "memstore").glob("*") if each.is_socket()]):
        time.sleep(0.1)
    number = int(paths[0].with_suffix(".lock").read_text())

    def served() -> float:
        before = ended(number) + ended(os.getpid())
        subprocess.run(command, **options)
        return ended(number) + ended(os.getpid()) - before

    served()  # its modules are imported from then on
    try:
        yield served
    finally:
        os.kill(number, signal.SIGTERM)


def ended(number: int) -> float:
    """Processor seconds of a process, and of its children that have ended."""
    fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    ticks: int = os.sysconf("SC_CLK_TCK")
    return sum(map(int, fields[11:15])) / ticks


def warm(model: str, dtype: str, memory: str) -> float:
    """Processor seconds of one token where model and memory are open and were asked before."""
    torch.set_num_threads(1)
    loaded = load_model(model, dtype)
    with memstore.attach(loaded.model, memory, tokenizer=loaded.tokenizer) as reader:
        reader.ask(*ASKED, max_tokens=1)
        begun = time.process_time()
        reader.ask(*ASKED, max_tokens=1)
        return time.process_time() - begun


def seconds(folder: Path, code: str, arguments: list[str]) -> tuple[float, int]:
    """Processor seconds and MiB of anonymous memory at the end of a new process that runs ``code``."""
    told = folder / "told"
    command = [sys.executable, "-c", MEASURED.replace("TOLD", repr(str(told))) + code, *arguments]
    subprocess.run(command, check=True, capture_output=True, env=dict(os.environ))
    cpu, mib = told.read_text().split()
    return float(cpu), int(mib)


if __name__ == "__main__":
    main()
