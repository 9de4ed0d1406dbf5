"""Train the router of a stock model on questions whose evidence is known; the model does not change.

The router that a memory fits to its text (``memstore.attention.Router``) knows which directions all tokens share. This
one is the same object, mean and directions, moved so that a question finds its paragraph among many. The loss is the
cross entropy of the evidence's score against the scores of other blocks. Scores are computed as in later use: a late
interaction over standardised products (Khattab & Zaharia 2020). Codes are signs; their gradient is the gradient of the
numbers under the signs (Bengio et al. 2013). The questions of a step are about neighbouring paragraphs. So the other
blocks are the hardest ones, of the same subject; some are drawn at random.

The router also learns how much a token of a question counts. All tokens begin with 1, but most words of a question do
not say where its answer stands. Routers that start from the same one and see the questions in different orders can be
averaged (Wortsman et al. 2022). This reduces the effect of any one order.

Hidden states are computed once, segment by segment, up to the layer that routes.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import memstore
from memstore.attention import Router, late_interaction
from memstore.attention.routing import FLOOR, inherited, save_router, standardised
from memstore.errors import InvalidArgument
from memstore.kernels import best_products
from memstore.readers.kinds import encode
from memstore.readers.stock.reader import StockReader, embedding_rows
from memstore.train.questions import Half, Pool, Question, QuestionSet, recall

SEGMENT = 512
"""Tokens whose states are computed together, without a view of earlier tokens."""
SPAN = 32
"""Query tokens that choose together, as in ``Retrieval.span``."""
BATCH = 24
"""Most questions of a step."""
WINDOW = 160
"""Consecutive blocks of a step; its questions are about them."""
RANDOM = 80
"""Blocks of a step that are drawn from all blocks."""
RATE = 3e-3
"""Learning rate for directions whose numbers have a mean square of 1. A higher one loses paraphrases (notes)."""
WEIGHT_RATE = 3.0
"""Factor on that rate for how much a token counts."""
LEAK = 0.1
"""Share of the gradient that remains below the floor of a score. Without it, a token that finds nothing stays so."""
TESTED = 300
"""Questions of a set that are used to compare routers."""


class AskedPool:
    """A set of questions as hidden states, each computed once."""

    def __init__(self, asked: QuestionSet, reader: StockReader, advance: Callable[[int], None]) -> None:
        self.set, self.pool = asked, Pool.of(asked.paragraphs, reader.tokenizer)
        self.size, self._reader = reader.block_size, reader
        (self.layer,) = reader.selection.index_layers
        self._queries: dict[str, Tensor] = {}
        whole = self.pool.tokens[: len(self.pool.tokens) // self.size * self.size]
        states = []
        for segment in whole.split(SEGMENT):
            # Half types in place of float32: a code loses less by this than by its signs.
            states.append(reader.hooks.hidden_states(segment, [self.layer])[self.layer].cpu().bfloat16())
            advance(len(segment))
        if not states:
            raise InvalidArgument(f"{asked.name} has fewer tokens than a block: use more paragraphs")
        self.blocks = torch.cat(states).unflatten(0, (-1, self.size))
        """``[N, S, hidden]`` bfloat16."""

    def query(self, text: str) -> Tensor:
        """Return the states ``[t, hidden]`` (float32) that choose for a question."""
        if text not in self._queries:
            tokens = torch.tensor(encode(self._reader.tokenizer, text))
            self._queries[text] = self._reader.hooks.query_states(tokens, self.layer)[-SPAN:].float().cpu()
        return self._queries[text]

    def evidence(self, question: Question) -> list[range]:
        """Return the full blocks of each paragraph that an answer needs."""
        last = len(self.blocks) - 1
        found = [self.pool.blocks(paragraph, self.size) for paragraph in question.evidence]
        return [range(min(each.start, last), min(each.stop, last + 1)) for each in found]


def ranking(router: Router, asked: AskedPool) -> Callable[[str, int], list[int]]:
    """Return a ranking of states by a router, as in an attached memory, but without words; see ``recall``."""
    signs = torch.cat([(router.encode(part) >= 0).to(torch.int8) * 2 - 1 for part in asked.blocks.split(SEGMENT)])
    consecutive = torch.arange(len(signs)) > 0

    def rank(question: str, depth: int) -> list[int]:
        codes = router.ask(asked.query(question))
        whole = (codes / codes.abs().amax(-1, keepdim=True) * 127).round().to(torch.int8)
        scores = late_interaction(best_products(signs, whole).T, codes.norm(dim=-1))
        found: list[int] = inherited(scores, consecutive).topk(min(depth, len(scores))).indices.tolist()
        return found

    return rank


def train_router(
    model: Any,
    tokenizer: Any,
    asked: QuestionSet,
    out: str | Path,
    *,
    tested: Sequence[QuestionSet] = (),
    steps: int = 600,
    learning_rate: float = RATE,
    seed: int = 0,
    runs: int = 1,
    half: Half = "chosen",
    advance: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Train a router on one half of the questions ``asked``, write it to the file ``out``, and report its quality.

    The reported numbers are measured on the other half.

    Args:
        model: a stock model, as ``memstore.attach`` takes it.
        tokenizer: the model's tokenizer.
        asked: the questions to train on.
        out: a file for ``memstore.attach(router=)``.
        tested: other sets. Their held-out half compares the trained router with the one that is fitted to the text.
        steps: steps of each training.
        learning_rate: the highest one.
        seed: of the order of questions in the first training; later ones count up from it.
        runs: trainings whose routers are averaged.
        half: the half of the questions that trains.
        advance: called with the number of tokens that have been read.

    Returns:
        ``rows``: evidence found among 8 blocks, for each set and both routers, by states alone.

    Raises:
        InvalidArgument: no stock model, too few questions, or no run.
    """
    if runs < 1:
        raise InvalidArgument(f"runs must be at least 1, got {runs}")
    chosen = asked.of(half)
    with memstore.attach(model, "ram:", tokenizer=tokenizer) as reader:
        if not isinstance(reader, StockReader):
            raise InvalidArgument("a router is only for stock models: this model learned to retrieve by itself")
        sets = [AskedPool(each, reader, advance) for each in (asked, *tested)]
        embedding = embedding_rows(model)  # if this fails, it fails before training
        fitted = reader.fitted(sets[0].pool.tokens)[sets[0].layer]
        trainings = [_trained(sets[0], chosen, fitted, steps, learning_rate, seed + run) for run in range(runs)]
        arrays = [router.to_arrays() for _, router in trainings]
        trained = Router(**{name: torch.stack([each[name] for each in arrays]).mean(0) for name in arrays[0]})
        save_router(out, trained, sets[0].layer, reader.architecture.shape, embedding)
        rows = [row for each in sets for row in _compared(each, trained, reader)]
    return {
        "out": str(out),
        "layer": sets[0].layer,
        "questions": len(chosen),
        "loss": [round(fmean(each), 4) for each in zip(*(losses for losses, _ in trainings), strict=True)],
        "bytes": Path(out).stat().st_size,
        "rows": rows,
    }


def _compared(asked: AskedPool, trained: Router, reader: StockReader) -> list[dict[str, Any]]:
    questions = asked.set.of("held-out", TESTED)
    routers = {"fitted to the text": reader.fitted(asked.pool.tokens)[asked.layer], "trained": trained}
    return [
        {"set": asked.set.name, "ranker": name, **row}
        for name, router in routers.items()
        for row in recall(ranking(router, asked), questions, asked.pool, block_size=asked.size)
    ]


def _trained(
    asked: AskedPool, questions: Sequence[Question], router: Router, steps: int, learning_rate: float, seed: int
) -> tuple[list[float], Router]:
    chance = random.Random(seed)
    size = router.basis.square().mean().sqrt()  # with this, one learning rate suits every model
    spread, wide = router.mean.square().mean().sqrt(), math.sqrt(len(router.mean))
    mean, basis = nn.Parameter(router.mean.clone()), nn.Parameter(router.basis / size)
    weight, scale = nn.Parameter(torch.zeros_like(router.mean)), nn.Parameter(torch.tensor(-1.0))
    optimizer = torch.optim.Adam(
        [
            {"params": [basis, scale], "lr": learning_rate},
            {"params": [mean], "lr": learning_rate * float(spread)},
            {"params": [weight], "lr": WEIGHT_RATE * learning_rate},
        ]
    )

    def rate_at(step: int) -> float:
        return min(1.0, (step + 1) / 20) * (0.5 + 0.5 * math.cos(math.pi * step / steps))

    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_at)
    about = defaultdict[int, list[Question]](list)
    for question in questions:
        about[asked.evidence(question)[0].start].append(question)
    losses = list[float]()
    for _ in range(steps):
        start = asked.evidence(chance.choice(questions))[0].start - chance.randrange(WINDOW)
        window = range(max(0, start), min(len(asked.blocks), start + WINDOW))
        near = [question for block in window for question in about[block]]
        batch = chance.sample(near, min(BATCH, len(near)))
        others = {*window, *chance.sample(range(len(asked.blocks)), min(RANDOM, len(asked.blocks)))}
        loss = _loss(asked, batch, others, Router(mean, basis, weight * wide), scale)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
        losses.append(loss.item())
    shown = losses[:: max(1, len(losses) // 10)]
    return shown, Router(mean.detach(), basis.detach() * size, weight.detach() * wide)


def _loss(asked: AskedPool, batch: Sequence[Question], others: set[int], router: Router, scale: Tensor) -> Tensor:
    evidence = [asked.evidence(question) for question in batch]
    numbers = torch.tensor(sorted(others | {block for each in evidence for blocks in each for block in blocks}))
    queries = [asked.query(question.text) for question in batch]
    codes = router.ask(torch.cat(queries))  # [t, dim]
    keys = router.encode(asked.blocks[numbers]).flatten(0, 1)  # [n * S, dim]
    signs = keys + (keys.sign() - keys).detach()
    best = (codes @ signs.T).unflatten(1, (len(numbers), -1)).amax(-1)  # [t, n]
    z = standardised(best)
    z = torch.where(z > FLOOR, z, FLOOR + LEAK * (z - FLOOR)) * codes.norm(dim=-1, keepdim=True)
    losses = []
    for scores, needed in zip(z.split([len(query) for query in queries]), evidence, strict=True):
        each = scores.sum(0) * scale.exp()
        right = [torch.isin(numbers, torch.tensor(list(blocks))) for blocks in needed]
        wrong = each[~torch.stack(right).any(0)]
        for of_one in right:
            found = each[of_one].logsumexp(0)
            losses.append((torch.cat((found[None], wrong)).logsumexp(0) - found) / len(right))
    return torch.stack(losses).sum() / len(batch)
