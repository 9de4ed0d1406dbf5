"""Train a tiny DRT with a loop of your own: it is a model like any other, and its loss trains its retriever.

python examples/train_drt.py 200        # steps; a minute on two cores
"""

from __future__ import annotations

import sys
from pydoc_data.topics import topics

import torch

import memstore
from memstore.models.drt import DRTConfig, DRTForCausalLM
from memstore.tools.models import load_model

LENGTH, ROWS = 512, 4


def main(steps: int = 200, memory: str = "drt.mem") -> list[float]:
    """Train, read a text with the model, go on after it; the losses."""
    _, tokenizer = load_model("drt")  # a small one for English
    tokens = torch.tensor(tokenizer("\n".join(topics.values()), add_special_tokens=False).input_ids)
    torch.manual_seed(0)
    model = DRTForCausalLM(DRTConfig(vocab_size=len(tokenizer), block_size=16))  # the other sizes are small already
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        starts = torch.randint(len(tokens) - LENGTH, (ROWS,))
        rows = torch.stack([tokens[start : start + LENGTH] for start in starts])
        loss = model(rows, labels=rows).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
        if step % 20 == 0:
            print(f"step {step}: loss {losses[-1]:.2f}")
    model.eval()
    with memstore.attach(model, memory, document="topics", tokenizer=tokenizer) as reader:
        print(f"{reader.read(tokens[:20_000].tolist()).new_tokens:,} tokens read")
        prompt = tokenizer("The import statement", add_special_tokens=False, return_tensors="pt").input_ids
        print(tokenizer.decode(model.generate(prompt, max_new_tokens=20, do_sample=False)[0]))
    return losses


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
