"""K/V storage: what is written comes back, moves may overlap, sizes are right."""

from __future__ import annotations

import pytest
import torch

from jetspec.attention import KVCache
from jetspec.errors import JetSpecError


def filled_cache() -> KVCache:
    cache = KVCache([(2, 3), (1, 5)], num_blocks=4, block_size=4, dtype=torch.float32, device="cpu")
    for pool in cache.keys + cache.values:
        pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(len(pool))))
    return cache


def test_written_rows_come_back_from_their_slots_alone():
    cache = filled_cache()
    before = cache.keys[1].clone(), cache.values[0].clone(), cache.values[1].clone()
    slots, k, v = torch.tensor([9, 2, 15]), torch.randn(3, 1, 5), torch.randn(3, 1, 5)
    cache.write(1, slots, k, v)
    read_k, read_v = cache.read(1, slots)
    assert torch.equal(read_k, k)
    assert torch.equal(read_v, v)
    others = [slot for slot in range(16) if slot not in (9, 2, 15)]
    assert torch.equal(cache.keys[1][others], before[0][others])
    assert torch.equal(cache.values[1][others], before[2][others])
    assert torch.equal(cache.values[0], before[1])


def test_a_run_of_slots_is_read_without_a_copy():
    cache = filled_cache()
    k, v = cache.read(0, slice(5, 9))
    expected_k, expected_v = cache.read(0, torch.arange(5, 9))
    assert torch.equal(k, expected_k)
    assert torch.equal(v, expected_v)
    assert k.data_ptr() == cache.keys[0][5].data_ptr()


@pytest.mark.parametrize(("src", "dst"), [([3, 5, 8], [1, 2, 3]), ([1, 2, 3], [2, 3, 4]), ([4, 7], [7, 4]), ([], [])])
def test_moves_may_overlap(src, dst):
    cache = filled_cache()
    before = [pool.clone() for pool in cache.keys + cache.values]
    cache.move(torch.tensor(src, dtype=torch.int64), torch.tensor(dst, dtype=torch.int64))
    for pool, old in zip(cache.keys + cache.values, before):
        expected = old.clone()
        expected[dst] = old[src]
        assert torch.equal(pool, expected)


def test_sizes():
    cache = filled_cache()
    assert (cache.num_slots, cache.num_layers) == (16, 2)
    assert [pool.shape for pool in cache.keys] == [pool.shape for pool in cache.values] == [(16, 2, 3), (16, 1, 5)]


@pytest.mark.parametrize(("blocks", "size"), [(0, 4), (4, 0)])
def test_an_empty_cache_is_refused(blocks, size):
    with pytest.raises(JetSpecError, match="num_blocks"):
        KVCache([(1, 1)], blocks, size, torch.float32, "cpu")
