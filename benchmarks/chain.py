"""Draw which blocks a model attends to while it answers a chain of two links, hidden in prose.

    python benchmarks/prose.py prose
    python benchmarks/hils_table.py --models HiLS --seeds 0 --only-train --out table
    python benchmarks/chain.py "table/HiLS, seed 0" --held prose/held --out docs/pictures/chain.png

The texts were kept aside, and training has not seen the seed. Nothing is chosen: it is the first question.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

import memstore
from memstore.eval.filler import Filler
from memstore.eval.pictures import heat, save_picture
from memstore.eval.run import TaskPlan, block_tokens, draw
from memstore.readers.kinds import encode, load_folder
from memstore.train.corpora import Documents


def main() -> None:
    """Read the text, ask, print the links with their blocks, and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a folder with a trained model")
    parser.add_argument("--held", nargs="+", default=["prose/held"], help="texts that were kept aside")
    parser.add_argument("--tokens", type=int, default=4096, help="of the text before the question")
    parser.add_argument("--seed", type=int, default=7, help="of the text and its links")
    parser.add_argument("--out", type=Path, default=Path("chain.png"), help="the picture")
    options = parser.parse_args()
    model, tokenizer = load_folder(options.model)
    model.name_or_path = options.model.name  # for the caption
    filler = Filler(torch.tensor(encode(tokenizer, "\n\n".join(Documents(options.held)))).numpy(), "texts kept aside")
    plan = TaskPlan(task="two-hop", lengths=[options.tokens], samples=1, seed=options.seed)
    ((sample,),) = draw(plan, options.tokens, tokenizer, filler, block_tokens(model))
    text = torch.cat([torch.from_numpy(ids) for ids in sample.haystack(filler)])
    with tempfile.TemporaryDirectory() as folder:
        with memstore.attach(model, f"{folder}/text.mem", document="text", tokenizer=tokenizer) as reader:
            reader.read(text)
            found = reader.ask(tokenizer.decode(sample.prompt), max_tokens=len(sample.answer), trace=True)
        with memstore.open(f"{folder}/text.mem", mode="r") as memory:
            for place, ids in sample.needles:
                first, last = (at // memory.spec.block_size for at in (place, place + len(ids) - 1))
                print(f"{f'block {first}' if first == last else f'blocks {first}, {last}'}: {tokenizer.decode(ids)}")
            print(
                f"{tokenizer.decode(sample.prompt)[-40:]!r}: {found.text!r}, right: {tokenizer.decode(sample.answer)!r}"
            )
            assert found.trace is not None
            trace = memory.traces.get(found.trace)
            words = [tokenizer.decode([step.token]) for step in trace.steps()]
            save_picture(heat(trace, words=words), options.out)


if __name__ == "__main__":
    main()
