"""The rules by which registrations share keys."""

import random

import pytest
from peerway.uccl import p2p
from peerway.uccl.cache import KeyCache
from uccl_support import Tensor


def keys(desc: p2p.XferDesc) -> tuple[list[int], list[int]]:
    assert len(desc.lkeys) == len(desc.rkeys) == 4 and not set(desc.lkeys) & set(desc.rkeys)
    return desc.lkeys, desc.rkeys


def test_the_same_memory_shares_keys_under_another_number(endpoint: p2p.Endpoint) -> None:
    tensor = Tensor(4096)
    first, second = endpoint.register_memory([tensor, tensor])
    assert keys(first) == keys(second) and first.mr_id != second.mr_id
    endpoint.deregister_memory([first])
    (third,) = endpoint.register_memory([tensor])
    assert keys(third) == keys(second) and third.mr_id not in (first.mr_id, second.mr_id)
    endpoint.deregister_memory([second, third])
    (fresh,) = endpoint.register_memory([tensor])
    assert keys(fresh) != keys(second), "the entry stays after its last user"


def test_a_part_shares_the_keys_of_the_whole_and_keeps_them(endpoint: p2p.Endpoint) -> None:
    tensor = Tensor(16384)
    part = tensor.part(256, 1280)
    base, sub = endpoint.register_memory([tensor, part])
    assert keys(base) == keys(sub)
    endpoint.deregister_memory([base])
    (again,) = endpoint.register_memory([part])
    assert keys(again) == keys(sub)
    (whole,) = endpoint.register_memory([tensor])
    assert keys(whole) == keys(sub), "the part does not keep the entry of the whole"


def test_overlap_alone_and_neighbours_share_nothing(endpoint: p2p.Endpoint) -> None:
    tensor = Tensor(16384)
    made = endpoint.register_memory([tensor.part(0, 1024), tensor.part(768, 1792), tensor.part(1792, 2048)])
    shown = [tuple(keys(desc)[0]) for desc in made]
    assert len(set(shown)) == 3


def test_the_smallest_that_contains_is_taken(endpoint: p2p.Endpoint) -> None:
    tensor = Tensor(16384)
    small, large = endpoint.register_memory([tensor.part(100, 300), tensor])
    assert keys(small) != keys(large)
    (inner,) = endpoint.register_memory([tensor.part(150, 200)])
    assert keys(inner) == keys(small)
    (outer,) = endpoint.register_memory([tensor.part(50, 200)])
    assert keys(outer) == keys(large)


def test_reg_and_regv_use_the_same_cache(endpoint: p2p.Endpoint) -> None:
    tensor = Tensor(4096)
    success, mr_id = endpoint.reg(tensor.data_ptr(), 4096)
    (desc,) = endpoint.register_memory([tensor.part(0, 4)])
    assert success and endpoint._registrations.get(mr_id).keys.lkeys == desc.lkeys


@pytest.mark.parametrize("seed", range(5))
def test_against_looking_at_all(seed: int) -> None:
    source, cache = random.Random(seed), KeyCache()
    live: list = []
    for _ in range(400):
        if live and source.random() < 0.4:
            cache.release(live.pop(source.randrange(len(live))))
            continue
        addr, size = source.randrange(64), source.choice([0, 1, 2, 3, 8, 17, 40])
        containing = [e for e in live if e.addr <= addr and addr + size <= e.addr + e.size]
        entry = cache.acquire(addr, size)
        if containing:
            assert entry in containing and entry.size == min(e.size for e in containing)
        else:
            assert (entry.addr, entry.size, entry.users) == (addr, size, 1)
        live.append(entry)
    for entry in live:
        cache.release(entry)
    assert len(cache) == 0 and not cache._classes
