"""What a question by a new process costs beside the imports and the weights that any answer needs.

    python benchmarks/cold.py --model qwen.gguf --runs 5

Processor seconds of new processes, in turn, on one thread, with the files warm: ``memstore ask`` of one token, and a
script that imports torch and transformers and loads the same converted weights and tokenizer, in the same precision.
Also the most anonymous memory of each: mapped weights are not in it. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from memstore.resources import hardware
from memstore.tools.models import resolve_dtype, resolve_model

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
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text(TEXT * 20)
        memory = str(folder / "text.mem")
        given = ["--model", options.model, "--dtype", dtype]
        cli = [sys.executable, "-m", "memstore"]
        subprocess.run([*cli, "read", folder / "text.txt", memory, *given], check=True, capture_output=True)
        ask = "import runpy; runpy.run_module('memstore', run_name='__main__')"
        ways = {
            "import and load": (BARE, [weights, dtype]),
            "memstore ask": (ask, ["ask", memory, "Who built it?", "--max-tokens", "1"]),
        }
        rows = dict[str, list[tuple[float, int]]]()
        for _ in range(options.runs):
            for way, what in ways.items():
                rows.setdefault(way, []).append(seconds(folder, *what))
    facts = {
        way: {
            "cpu_seconds": round(median(cpu for cpu, _ in of), 2),
            "anonymous_mib": round(median(mib for _, mib in of)),
        }
        for way, of in rows.items()
    }
    ratio = facts["memstore ask"]["cpu_seconds"] / facts["import and load"]["cpu_seconds"]
    print(json.dumps({"model": options.model, "dtype": dtype, **facts, "ratio": round(ratio, 2), **hardware()}))


def seconds(folder: Path, code: str, arguments: list[str]) -> tuple[float, int]:
    """Processor seconds and MiB of anonymous memory at the end of a new process that runs ``code``."""
    told = folder / "told"
    command = [sys.executable, "-c", MEASURED.replace("TOLD", repr(str(told))) + code, *arguments]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    cpu, mib = told.read_text().split()
    return float(cpu), int(mib)


if __name__ == "__main__":
    main()
