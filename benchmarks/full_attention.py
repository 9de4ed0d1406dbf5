"""Does a model tell look-alikes apart when all of its layers see the whole text, without a memory?

    python benchmarks/full_attention.py --model qwen2.5-0.5b-instruct.gguf --questions 32

The text and then the question stand in the user's turn, in the frame that ``ask`` has. The states of what all prompts
begin with are computed once.
"""

from __future__ import annotations

import argparse
import copy
import json
from os.path import commonprefix
from statistics import fmean
from typing import Any, cast

import torch
from transformers import DynamicCache

from memstore.eval.questions import lookalikes
from memstore.eval.questions.answers import MOST, exact, f1, has
from memstore.eval.questions.sets import HALVES, SEPARATOR
from memstore.readers.asking import INSTRUCTION, Template, framed
from memstore.resources import hardware
from memstore.tools.models import load_model


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--questions", type=int)
    parser.add_argument("--half", choices=HALVES, default="held-out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load_model(options.model)
    model, tokenizer = cast("Any", loaded.model), loaded.tokenizer
    asked = lookalikes.load()
    questions = asked.of(options.half, options.questions)
    frame = Template.of(tokenizer, INSTRUCTION) or Template.plain(INSTRUCTION)
    words = [SEPARATOR.join((*asked.paragraphs, question.text)) for question in questions]
    prompts = [framed(tokenizer, frame, each, frame.opening).tokens for each in words]
    same = len(commonprefix(prompts))  # noqa: RUF071 - of token ids
    given = {"do_sample": False, "max_new_tokens": MOST, "eos_token_id": frame.ends(tokenizer)}
    said = []
    with torch.inference_mode():
        cache = DynamicCache(config=model.config)
        for part in torch.tensor([prompts[0][:same]]).split(512, dim=1):
            model(input_ids=part, past_key_values=cache, logits_to_keep=1)
        for prompt in prompts:
            ids = torch.tensor([prompt])
            made = model.generate(
                ids, attention_mask=torch.ones_like(ids), past_key_values=copy.deepcopy(cache), **given
            )
            said.append(str(tokenizer.decode(made[0, len(prompt) :], skip_special_tokens=True)).strip())
    measures = {"em": exact, "f1": f1, "has": has}
    means = {
        name: round(fmean(measure(each, question.answers) for each, question in zip(said, questions, strict=True)), 4)
        for name, measure in measures.items()
    }
    row = {"set": asked.name, "with": "full attention", "answered": len(said), **means}
    print(json.dumps({"model": options.model, "half": options.half, "tokens": same, "rows": [row], **hardware()}))


if __name__ == "__main__":
    main()
