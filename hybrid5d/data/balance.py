"""Balanced partitions: Karmarkar-Karp, and micro-batches by token budget over dp ranks.

Everything here is arithmetic on lengths that all ranks know, so all ranks compute the same answer without a message.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

Partition = list[list[int]]


def karmarkar_karp(weights: Sequence[int], num_parts: int, *, equal_count: bool = False) -> Partition:
    """Splits items into `num_parts` parts with nearly equal sums by the largest differencing method.

    With `equal_count` every part gets equally many items (their number must be divisible). Items of a part are in
    ascending order, parts in that of their first items (empty parts last). Deterministic.
    """
    count = len(weights)
    assert num_parts >= 1 and (not equal_count or count % num_parts == 0)
    order = sorted(range(count), key=lambda i: (weights[i], i))
    group = num_parts if equal_count else 1
    # A state is a tentative partition: [(sum, items)] with sums descending. The heap gives the widest spread first.
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for tie, start in enumerate(range(0, count, group)):
        state = [(weights[i], [i]) for i in reversed(order[start : start + group])]
        state += [(0, [])] * (num_parts - len(state))
        heap.append((state[-1][0] - state[0][0], tie, state))
    heapq.heapify(heap)
    tie = len(heap)
    while len(heap) > 1:
        a, b = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        # the largest part of one meets the smallest of the other
        merged = [(x[0] + y[0], x[1] + y[1]) for x, y in zip(a, reversed(b))]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], tie, merged))
        tie += 1
    parts = [sorted(items) for _, items in heap[0][2]] if heap else [[] for _ in range(num_parts)]
    if equal_count:
        parts = _improve_by_swaps(weights, parts)
    return sorted(parts, key=lambda items: items[0] if items else count)


def _improve_by_swaps(weights: Sequence[int], parts: Partition) -> Partition:
    """Swaps items of the heaviest part for lighter ones of others while that narrows the gap between the two.

    Equal counts bind the differencing method: one long item can only be offset by many slightly shorter ones.
    """
    parts = [sorted(items, key=lambda i: (weights[i], i)) for items in parts]
    sums = [sum(weights[i] for i in items) for items in parts]
    improved = True
    while improved:
        improved = False
        heavy = max(range(len(parts)), key=lambda p: (sums[p], -p))
        for light in sorted(range(len(parts)), key=lambda p: (sums[p], p)):
            swap = _best_swap(weights, parts[heavy], parts[light], sums[heavy] - sums[light])
            if swap is None:
                continue
            given, taken = swap
            for part, out, into in ((heavy, given, taken), (light, taken, given)):
                parts[part].remove(out)
                insort(parts[part], into, key=lambda i: (weights[i], i))
                sums[part] += weights[into] - weights[out]
            improved = True
            break
    return [sorted(items) for items in parts]


def _best_swap(weights: Sequence[int], heavy: list[int], light: list[int], gap: int) -> tuple[int, int] | None:
    """The pair (item of heavy, item of light), both sorted by weight, whose exchange narrows the gap most."""
    best: tuple[int, int] | None = None
    smallest = gap
    light_weights = [weights[i] for i in light]
    for item in heavy:
        place = bisect_left(light_weights, weights[item] - gap / 2)
        for other in light[max(place - 1, 0) : place + 1]:
            left = abs(gap - 2 * (weights[item] - weights[other]))
            if left < smallest:
                smallest, best = left, (item, other)
    return best


def budget_micro_batches(lengths: Sequence[int], dp: int, budget: int) -> list[Partition]:
    """[dp rank][micro-batch] -> items, no micro-batch above `budget` tokens, equally many of them on every rank.

    Items go to dp ranks and then to micro-batches by Karmarkar-Karp. The number of micro-batches is the smallest, from
    the lower bound upwards, for which that split stays inside the budget on every rank. A micro-batch may be empty
    where a rank has fewer items than another has micro-batches.
    """
    assert not lengths or max(lengths) <= budget, "an item longer than the budget fits nowhere"
    by_rank = karmarkar_karp(lengths, dp)
    num = max(1, *(-(-sum(lengths[i] for i in items) // budget) for items in by_rank))
    while True:
        split = [_split(items, lengths, num) for items in by_rank]
        if all(sum(lengths[i] for i in part) <= budget for parts in split for part in parts):
            return split
        num += 1


def _split(items: Sequence[int], lengths: Sequence[int], num_parts: int) -> Partition:
    parts = karmarkar_karp([lengths[i] for i in items], num_parts)
    return [[items[i] for i in part] for part in parts]
