"""The demo, whole, on texts of 2,048 tokens instead of 32,768."""

from __future__ import annotations

import pytest

from memstore.tools import demo

# the real model; a tiny one keeps the same promises quickly
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KEYS = {
    "tokens_read",
    "passkeys_asked",
    "passkeys_found",
    "needles_asked",
    "needles_found",
    "read_tokens_per_s",
    "peak_anonymous_bytes",
    "peak_rss_bytes",
    "disk_bytes",
    "ppl_window",
    "ppl_memory",
    "reopened_in_new_process",
}


def test_the_demo_answers_from_a_memory_that_another_process_wrote() -> None:
    result = demo.run_stock(json=True, tokens=2_048, threads=1, scored=512)
    assert set(result) >= KEYS
    assert result["tokens_read"] == 2 * 2_048
    assert result["passkeys_asked"] == result["needles_asked"] == 5
    assert result["passkeys_found"] + result["needles_found"] >= 6
    assert result["reopened_in_new_process"] is True
    assert result["ppl_memory"] > 1
    assert result["ppl_window"] > 1
    assert result["disk_bytes"] > 2 * 2_048 * 20_000
    assert all(answer["blocks"] for answer in result["answers"])
    assert [answer["trace"] for answer in result["answers"]] == list(range(1, 11))
