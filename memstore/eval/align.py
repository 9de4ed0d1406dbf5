"""Where a prompt must end so that the model can find what it asks for."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


def align(prompt: Sequence[int], tokens_per_block: int, filler: int) -> list[int]:
    """``prompt`` with as many ``filler`` tokens in front that its last token is the first of a block.

    A block retrieves for the *next* block. So the question has to stand in complete blocks, all but its last token, and
    the answer is written with what those blocks retrieved.
    """
    return [filler] * ((1 - len(prompt)) % tokens_per_block) + list(prompt)


def filler_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token to fill up with: a newline, or the last piece of one."""
    ids: list[int] = tokenizer("\n", add_special_tokens=False)["input_ids"]
    if ids:
        return ids[-1]
    return int(tokenizer.eos_token_id or 0)
