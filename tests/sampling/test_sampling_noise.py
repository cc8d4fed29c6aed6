"""The noise is Gumbel, independent over seeds, positions and ids, and a function of them alone."""

import math

import pytest
import torch

from jetspec.sampling import child_seed
from jetspec.sampling.noise import _log, _mix, _mix_int, _signed, gumbel_of, uniform
from tests.helpers.goodness_of_fit import chi_square_p

IDS = torch.arange(50_000)
PINNED = ["0x1.54afefac63f0dp+1", "0x1.186de4194354cp+0", "-0x1.e144b03f65bd7p-1"]


def test_hash_is_splitmix64():
    """First outputs of the published generator with seed 0."""
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    states = [(n + 1) * 0x9E3779B97F4A7C15 % 2**64 for n in range(3)]
    assert [_mix_int(state) for state in states] == expected
    assert _mix(torch.tensor([_signed(state) for state in states])).tolist() == [_signed(x) for x in expected]


def test_subset_has_the_same_bits():
    """Fault 9: which tokens survive a filter must not move the noise of any."""
    full = gumbel_of(uniform(7, 123, IDS))
    for ids in (IDS[5:6], IDS[17:40], IDS.flip(0), IDS[::7], torch.tensor([3, 3, 49_999])):
        assert torch.equal(gumbel_of(uniform(7, 123, ids)), full[ids])


def test_noise_is_pinned():
    """Seeded text must not change between versions or machines."""
    assert [x.hex() for x in gumbel_of(uniform(42, 10, torch.tensor([0, 1, 49_151]))).tolist()] == PINNED


def test_noise_is_gumbel_of_the_uniform_numbers():
    u = uniform(1, 2, IDS)
    torch.testing.assert_close(gumbel_of(uniform(1, 2, IDS)), -(-u.log()).log(), rtol=1e-13, atol=1e-13)


def test_extreme_uniform_numbers_give_finite_noise():
    u = torch.tensor([2.0**-53, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    expected = [-math.log(-math.log(x)) for x in u.tolist()]
    torch.testing.assert_close(gumbel_of(u), torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=1e-14)


def test_portable_logarithm():
    generator = torch.Generator().manual_seed(0)
    x = torch.exp(torch.rand(10_000, generator=generator, dtype=torch.float64) * 80 - 40)
    torch.testing.assert_close(_log(x), x.log(), rtol=1e-14, atol=1e-16)
    near_one = 1 + (torch.rand(1000, generator=generator, dtype=torch.float64) - 0.5) * 1e-6
    torch.testing.assert_close(_log(near_one), near_one.log(), rtol=1e-14, atol=0)


def axes():
    """Uniform numbers that differ in one coordinate only, each [20000]."""
    one = torch.tensor([5])
    yield "ids", uniform(3, 9, IDS[:20_000])
    yield "positions", torch.cat([uniform(3, p, one) for p in range(20_000)])
    yield "seeds", torch.cat([uniform(s, 9, one) for s in range(20_000)])
    yield "child seeds", torch.cat([uniform(child_seed(3, i), 9, one) for i in range(20_000)])
    yield "negative seeds", torch.cat([uniform(-s, 9, one) for s in range(1, 20_001)])


@pytest.mark.parametrize(("name", "u"), list(axes()), ids=lambda v: v if isinstance(v, str) else "")
def test_uniform_and_independent_along_each_axis(name, u):
    assert u.min() > 0
    assert u.max() < 1
    assert len(u.unique()) == len(u)
    cells = torch.full((100,), 0.01)
    assert chi_square_p(torch.bincount((u * 100).long(), minlength=100), cells) > 1e-4
    for lag in (1, 2, 7):  # neighbours: pairs fill the unit square evenly
        pairs = (u[:-lag] * 10).long() * 10 + (u[lag:] * 10).long()
        assert chi_square_p(torch.bincount(pairs, minlength=100), cells) > 1e-4


def test_seeds_and_positions_share_no_noise():
    draws = torch.cat([uniform(s, p, IDS[:1000]) for s in range(5) for p in range(5)])
    assert len(draws.unique()) == len(draws)


def test_large_seeds_and_positions():
    u = torch.stack([uniform(s, p, IDS[:100]) for s in (0, 2**63, 2**64 - 1, -(2**63) + 1) for p in (0, 2**31, 2**40)])
    assert len(u.unique()) == u.numel()


def test_child_seeds():
    assert child_seed(42, 0) == 42
    seeds = [child_seed(s, i) for s in (0, 1, 42, -1) for i in range(1, 1000)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= s < 2**63 for s in seeds)
