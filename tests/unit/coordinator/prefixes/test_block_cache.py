"""A prefix cache's bookkeeping."""

import random

from p2pserve.coordinator.prefixes.block_cache import BlockCache, CachedPrefix


def test_what_nobody_uses_is_overwritten_from_the_end_of_the_oldest_prompt() -> None:
    cache = BlockCache()
    first, second = cache.insert([1, 2, 3], 0), cache.insert([1, 7, 8], 0)
    assert (first, second) == ([1, 2, 3], [7, 8])
    assert cache.leave(first) == 3
    cache.leave(second)
    assert cache.find([1, 2, 3]) == CachedPrefix(3, 3)
    cache.shrink(3)
    assert cache.find([1, 2, 3]).blocks == 1
    assert cache.find([1, 7, 8]).blocks == 3
    assert cache.take_changes() == ([1, 7, 8], [])  # what came and went meanwhile is no news


def test_what_is_used_stays() -> None:
    cache = BlockCache()
    mine = cache.insert([1, 2], 0)
    cache.use([1])
    cache.leave(mine)
    cache.shrink(0)
    assert cache.find([1, 2]) == CachedPrefix(1, 0)
    assert (cache.used, cache.unused) == (1, 0)


def test_changes_lead_to_what_is_cached() -> None:
    rng = random.Random(3)
    cache, known, users = BlockCache(stride=2), set[int](), list[list[int]]()
    for _ in range(500):
        prompt = [1000 * depth + rng.randrange(3) for depth in range(1, rng.randrange(2, 6))]
        held = cache.find(prompt).blocks
        cache.use(prompt[:held])
        users.append([*prompt[:held], *cache.insert(prompt, held)])
        if len(users) > 3:
            cache.leave(users.pop(rng.randrange(len(users))))
        cache.shrink(4)
        held_now, lost = cache.take_changes()
        known = (known - set(lost)) | set(held_now)
        cached = {name for name in range(1000, 7000) if cache.find([name]).blocks}
        assert known == {name for name in cached if name // 1000 % 2 == 0}
        assert cache.unused <= 4
