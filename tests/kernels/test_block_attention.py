"""Block attention equals attention, in every form, and partial results merge to the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from memstore.errors import InvalidArgument
from memstore.kernels import block_attention, merge_attention
from memstore.kernels.block_attention import attend, fused
from tests.pairs import pairs
from tests.pretended import pretended

SIZES = [(1, 1, 1, 1), (2, 4, 2, 63), (1, 9, 3, 111), (3, 2, 2, 1)]  # B, H, G, N


def inputs(
    b: int, h: int, g: int, n: int, t: int = 5, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(b * 1000 + n)
    q = torch.randn(b, h, t, 16, generator=gen, dtype=dtype)
    k, v = (torch.randn(b, g, n, 16, generator=gen, dtype=dtype) for _ in range(2))
    return q, k, v


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention as one would write it down, with repeated heads."""
    r = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(r, 1).transpose(-1, -2) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    out: Tensor = scores.softmax(-1) @ v.repeat_interleave(r, 1)
    return out


def assert_as_exact_as_plain(got: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> None:
    """The error against float64 is at most that of attention as written down, plus a rounding."""
    exact = dense(q.double(), k.double(), v.double(), mask)
    rounding = 4 * torch.finfo(q.dtype).eps * exact.abs().max()
    allowed = (dense(q, k, v, mask).double() - exact).abs().max() + rounding
    assert (got.double() - exact).abs().max() <= allowed


@pytest.mark.parametrize("size", SIZES)
def test_it_is_attention(size: tuple[int, int, int, int]) -> None:
    q, k, v = inputs(*size)
    out, lse = block_attention(q, k, v)
    torch.testing.assert_close(out, dense(q, k, v))
    assert lse.shape == q.shape[:3]


@pytest.mark.parametrize("size", SIZES)
def test_gradients_are_those_of_attention(size: tuple[int, int, int, int]) -> None:
    tensors = [x.requires_grad_() for x in inputs(*size)]
    got = torch.autograd.grad(block_attention(*tensors)[0].square().sum(), tensors)
    want = torch.autograd.grad(dense(*tensors).square().sum(), tensors)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("cuts", [(40,), (1, 2), (10, 60, 100)])
def test_merged_parts_equal_the_whole(cuts: tuple[int, ...]) -> None:
    q, k, v = inputs(2, 6, 2, 111)
    parts = [
        block_attention(q, k_part, v_part)
        for k_part, v_part in zip(k.tensor_split(cuts, 2), v.tensor_split(cuts, 2), strict=True)
    ]
    out, lse = merge_attention([o for o, _ in parts], [s for _, s in parts])
    whole, whole_lse = block_attention(q, k, v)
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, whole_lse)


def test_a_part_without_visible_keys_changes_nothing() -> None:
    q, k, v = inputs(1, 4, 2, 8)
    nothing = block_attention(q, k, v, mask=torch.zeros(5, 8, dtype=torch.bool))
    assert not nothing[0].any()
    assert nothing[1].eq(float("-inf")).all()
    whole = block_attention(q, k, v)
    torch.testing.assert_close(merge_attention([nothing[0], whole[0]], [nothing[1], whole[1]]), whole)


def test_blocks_are_their_tokens_in_order() -> None:
    q, k, v = inputs(2, 4, 2, 24)
    blocks = block_attention(q, k.unflatten(2, (4, 6)), v.unflatten(2, (4, 6)))
    torch.testing.assert_close(blocks, block_attention(q, k, v))


def test_masks_boolean_and_additive_agree() -> None:
    q, k, v = inputs(2, 4, 2, 24)
    mask = torch.ones(5, 24, dtype=torch.bool).tril(19)
    additive = torch.zeros(5, 24, dtype=q.dtype).masked_fill(~mask, float("-inf"))
    torch.testing.assert_close(block_attention(q, k, v, mask=mask)[0], dense(q, k, v, mask))
    torch.testing.assert_close(block_attention(q, k, v, mask=additive)[0], dense(q, k, v, mask))


def test_a_sink_is_a_key_with_value_zero() -> None:
    q, k, v = inputs(1, 4, 2, 24)
    sinks = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=q.dtype)
    scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) * 0.25
    column = sinks.view(1, 4, 1, 1).expand(1, 4, 5, 1)
    weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    torch.testing.assert_close(block_attention(q, k, v, sinks=sinks)[0], weights @ v.repeat_interleave(2, 1))


def test_softcap_bounds_the_scores() -> None:
    q, k, v = inputs(1, 2, 2, 24)
    scores = 3.0 * torch.tanh(q @ k.transpose(-1, -2) * 0.25 / 3.0)
    torch.testing.assert_close(block_attention(q, k, v, softcap=3.0)[0], scores.softmax(-1) @ v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 5])
def test_the_fast_form_is_as_exact_as_plain_low_precision(dtype: torch.dtype, tokens: int) -> None:
    q, k, v = (x.to(dtype) for x in inputs(2, 6, 2, 111, t=tokens))
    mask = torch.zeros(tokens, 111, dtype=dtype).masked_fill(~torch.ones(tokens, 111).bool().tril(105), float("-inf"))
    assert_as_exact_as_plain(attend(q, k, v, mask=mask[None, None]), q, k, v, mask == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 2, 6])
def test_a_narrow_mask_is_for_the_last_keys(dtype: torch.dtype, heads: int) -> None:
    q, k, v = (x.to(dtype) for x in inputs(2, 6, 2, 30))
    seen = torch.rand(2, heads, 5, 12, generator=torch.Generator().manual_seed(heads)) < 0.5
    narrow = torch.where(seen, 0.0, float("-inf")).to(dtype)
    wide = torch.nn.functional.pad(narrow, (18, 0))
    torch.testing.assert_close(attend(q, k, v, mask=narrow), attend(q, k, v, mask=wide))
    repeated = wide.expand(-1, 6, -1, -1) if heads == 1 else wide.repeat_interleave(6 // heads, 1)
    assert_as_exact_as_plain(attend(q, k, v, mask=narrow), q, k, v, repeated == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("option", ["plain", "softcap", "sinks"])
def test_few_scores_are_held_at_once(
    option: str, masked: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (x.to(dtype) for x in inputs(2, 6, 2, 30))
    mask = torch.zeros(1, 1, 5, 12, dtype=q.dtype).masked_fill(~torch.ones(5, 12).bool().tril(7), float("-inf"))
    forms: dict[str, dict[str, Any]] = {"plain": {}, "softcap": {"softcap": 3.0}, "sinks": {"sinks": q[0, :, 0, 0]}}
    options = {"mask": mask if masked else None} | forms[option]
    whole, sizes, by_rows = attend(q, k, v, **options), list[tuple[int, int]](), fused.by_rows

    def counted(part: Callable[..., Tensor], *given: Any) -> Tensor:
        def attended(q: Tensor, k: Tensor, *others: Any) -> Tensor:
            sizes.append((q.shape[2], k.shape[2]))
            return part(q, k, *others)

        return by_rows(attended, *given)

    monkeypatch.setattr(fused, "by_rows", counted)
    for largest, rows, ends in ((2 * 6 * 30 * 2, [2, 2, 1], [27, 29, 30]), (1, [1] * 5, [26, 27, 28, 29, 30])):
        sizes.clear()
        monkeypatch.setattr(fused, "LARGEST", largest)
        torch.testing.assert_close(attend(q, k, v, **options), whole)
        assert sizes == list(zip(rows, ends if masked else [30] * 5, strict=False))


def test_a_query_that_sees_nothing_disturbs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.to(torch.bfloat16) for x in inputs(1, 6, 2, 30))
    mask = torch.zeros(1, 1, 5, 12, dtype=q.dtype)
    mask[:, :, 0] = torch.finfo(q.dtype).min
    whole = attend(q, k, v, mask=mask)
    monkeypatch.setattr(fused, "LARGEST", 1)
    torch.testing.assert_close(attend(q, k, v, mask=mask), whole)


MASKS = ["none", "boolean", "additive", "of each row", "of each head"]


def mask_of(kind: str, q: Tensor, keys: int) -> Tensor | None:
    batch, heads, tokens, _ = q.shape
    shape = {"of each row": (batch, 1, tokens, keys), "of each head": (batch, heads, tokens, keys)}
    seen = torch.rand(shape.get(kind, (tokens, keys)), generator=torch.Generator().manual_seed(0)) < 0.6
    seen[..., 0, :] = False  # a query that sees nothing
    if kind == "none":
        return None
    return seen if kind == "boolean" else torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, float("-inf"))


@pairs(
    size=[(2, 6, 2, 63), (1, 9, 3, 111), (3, 2, 2, 32)],
    kind=MASKS,
    dtype=[torch.float64, torch.float32, torch.bfloat16, torch.float16],
    sinks=[False, True],
    device=["cpu", "cuda"],
)
def test_flash_attention_gives_the_log_sum_exp_of_the_reference(
    size: tuple[int, int, int, int], kind: str, dtype: torch.dtype, sinks: bool, device: str
) -> None:
    """The device is a pretended one, whose attention takes what that of a GPU takes."""
    if device == "cuda":
        pytest.importorskip("triton", reason="Triton, an optional extra, is not installed")
        dtype = torch.float32 if dtype == torch.float64 else dtype
    q, k, v = (x.to(dtype) for x in inputs(*size))
    logits = torch.linspace(-1, 2, q.shape[1]).to(dtype) if sinks else None
    mask = mask_of(kind, q, k.shape[2])
    exact = block_attention(
        q.double(), k.double(), v.double(), mask=mask, sinks=None if logits is None else logits.double(),
        backend="reference",
    )  # fmt: skip
    given = {"mask": mask, "sinks": logits}
    if device == "cpu":
        found = block_attention(q, k, v, **given, backend="torch")  # type: ignore[arg-type]
    else:
        with pretended():
            there = {name: None if x is None else x.to("cuda") for name, x in given.items()}
            asked: Any = {**there, "backend": "torch"}
            found_there = block_attention(*(x.to("cuda") for x in (q, k, v)), **asked)
            found = (found_there[0].cpu(), found_there[1].cpu())
    limit = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 2e-2}[dtype]
    assert found[0].dtype == dtype
    assert found[1].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (found[0].double() - exact[0]).abs().max() <= limit
    torch.testing.assert_close(found[1].double(), exact[1], atol=limit, rtol=limit)


def test_heads_share_keys_where_pytorch_gives_each_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch 2.6 does on a CPU."""
    q, k, v = inputs(2, 6, 2, 63)
    monkeypatch.setattr(fused, "SHARES_KEYS", False)
    found = block_attention(q, k, v, backend="torch")
    torch.testing.assert_close(found, block_attention(q, k, v, backend="reference"))


def test_flash_attention_says_what_it_cannot() -> None:
    q, k, v = inputs(1, 4, 2, 8)
    for options, said in (
        ({"softcap": 1.0}, "does not support a softcap"),
        ({"mask": torch.zeros(5, 8)}, "a boolean mask or one of torch.float64"),
    ):
        with pytest.raises(InvalidArgument, match=f"'torch' .*{said}"):
            block_attention(q, k, v, backend="torch", **options)
    with pytest.raises(InvalidArgument, match="cannot differentiate"):
        block_attention(q.requires_grad_(), k, v, backend="torch")
    learned = torch.zeros(5, 8, dtype=q.dtype, requires_grad=True)
    with pytest.raises(InvalidArgument, match="cannot differentiate"):
        block_attention(q.detach(), k, v, mask=learned, backend="torch")
    assert block_attention(q.detach(), k, v, mask=learned)[1].requires_grad, "'auto' takes what has a gradient"


def test_wrong_shapes_and_back_ends_are_named() -> None:
    q, k, v = inputs(1, 4, 2, 8)
    with pytest.raises(InvalidArgument, match=r"q \(1, 3, 5, 16\), k \(1, 2, 8, 16\)"):
        block_attention(q[:, :3], k, v)
    with pytest.raises(InvalidArgument, match="backend must be 'auto', 'reference' or 'torch'"):
        block_attention(q, k, v, backend="triton")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"expected q \[B, H, T, D\]"):
        attend(q[0], k, v)
    with pytest.raises(InvalidArgument, match=r"boolean or floating point, got torch\.int64"):
        block_attention(q, k, v, mask=torch.zeros(5, 8, dtype=torch.int64))
    with pytest.raises(InvalidArgument, match=r"the mask covers 9 keys, but there are 8"):
        attend(q, k, v, mask=torch.zeros(1, 1, 5, 9))
    with pytest.raises(InvalidArgument, match="one log-sum-exp for each output"):
        merge_attention([q], [])
