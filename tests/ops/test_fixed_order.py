"""What batch invariance stands on: sums of a fixed tree, and functions that treat a vector's tail like its body."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from kvarto.ops.reference.exponential import FLOOR, exp_nonpositive_
from kvarto.ops.reference.sums import tree_sum_
from kvarto.ops.reference.tiled_product import TILE_ROWS, block_rows

FUNCTIONS = (torch.exp, torch.tanh, torch.erf, torch.cos, torch.sin, torch.log, torch.log1p)


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("length", [1, 2, 15, 17, 63, 64, 2049, 16_384, 16_387, 40_003])
def test_an_element_has_the_same_bits_wherever_it_lies(
    function: Callable[..., torch.Tensor], length: int, threads: int
) -> None:
    values = torch.rand(60, generator=torch.Generator().manual_seed(length)) * 3 + 1e-3
    want = function(values[:, None].expand(60, 64).contiguous())[:, 0]
    for value, expected in zip(values, want, strict=True):
        got = function(torch.full((length,), value))
        assert torch.equal(got.view(torch.int32), expected.expand(length).view(torch.int32))


def test_tree_sum_is_exact_where_all_partial_sums_are() -> None:
    rng = np.random.default_rng(0)
    for width in (1, 2, 3, 5, 31, 64, 100, 2049):
        terms = torch.from_numpy(rng.integers(-100, 100, (7, width)).astype(np.float32))
        want = terms.sum(-1, keepdim=True)
        assert torch.equal(tree_sum_(terms.clone()), want)


def test_tree_sum_does_not_depend_on_rows_strides_or_threads(threads: int) -> None:
    terms = torch.randn(50, 1000, generator=torch.Generator().manual_seed(1))
    want = torch.stack([tree_sum_(row.clone()) for row in terms])
    assert torch.equal(tree_sum_(terms.clone()), want)
    assert torch.equal(tree_sum_(terms.t().contiguous().t()), want)
    assert not torch.equal(terms.flip(-1).cumsum(-1)[:, -1:], want), "the order of these sums does not matter"


def test_exponential_is_exact_at_its_ends_and_accurate_between() -> None:
    ends = torch.tensor([0.0, -0.0, FLOOR, -88.0, -103.0, -1e38, float("-inf"), float("nan")])
    got = exp_nonpositive_(ends)
    assert got[:2].tolist() == [1.0, 1.0]
    assert got[2:7].tolist() == [0.0] * 5
    assert got[7].isnan()
    x = torch.linspace(-60, 0, 10_001)
    np.testing.assert_allclose(exp_nonpositive_(x.clone()).numpy(), np.exp(x.double().numpy()), rtol=2e-7)


@pytest.mark.parametrize("shape", [(576, 960), (1536, 576), (100, 7), (33, 1000), (2048, 512)])
def test_a_tiled_product_gives_a_row_the_same_bits_at_any_place(shape: tuple[int, int], threads: int) -> None:
    """The habit of the matrix library that `TiledProduct` stands on."""
    in_features, out_features = shape
    out_features = min(out_features, block_rows(*shape))
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(TILE_ROWS, in_features, generator=generator)
    weight = torch.randn(out_features, in_features, generator=generator)
    tile, out = torch.zeros_like(rows), torch.empty(TILE_ROWS, out_features)
    want = torch.mm(tile.copy_(rows), weight.t(), out=out).clone()
    for place in range(TILE_ROWS):
        tile.fill_(float("nan"))[place] = rows[0]
        assert torch.equal(torch.mm(tile, weight.t(), out=out)[place], want[0])
        chosen = torch.randperm(TILE_ROWS, generator=generator)
        assert torch.equal(torch.mm(tile.copy_(rows[chosen]), weight.t(), out=out), want[chosen])


@pytest.mark.parametrize("shape", [(24, 8, 64), (24, 16, 80), (2, 32, 256)], ids=str)
def test_batched_products_and_sums_give_a_row_the_same_bits_at_any_place(
    shape: tuple[int, int, int], threads: int
) -> None:
    """The same habit, for the calls of attention: rows and products of a chunk may change places."""
    num_products, num_rows, head_dim = shape
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(num_products, n, head_dim, generator=generator) for n in (num_rows, 64, 64))
    before = torch.randn(num_products, num_rows, head_dim, generator=generator)
    scores, total, out = torch.empty(num_products, num_rows, 64), torch.empty(num_products, num_rows, 1), before.clone()

    def run(products: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        torch.bmm(query[products][:, rows].contiguous(), key[products].transpose(1, 2), out=scores)
        torch.sum(scores, dim=-1, keepdim=True, out=total)
        out.copy_(before[products][:, rows]).baddbmm_(scores, value[products])
        return scores.clone(), total.clone(), out.clone()

    want = run(torch.arange(num_products), torch.arange(num_rows))
    for _ in range(5):
        products, rows = (torch.randperm(n, generator=generator) for n in (num_products, num_rows))
        for got, expected in zip(run(products, rows), want, strict=True):
            assert torch.equal(got, expected[products][:, rows])
