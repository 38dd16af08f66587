"""Solves the linear assignment problem: parts to places, so that the sum of benefits is highest.

    subsets    parts one by one over all sets of places (M. Held and R. M. Karp, 1962): exact, up to 8 parts,
               and many problems at once, since each step is one array operation
    shortest   shortest augmenting paths (H. W. Kuhn 1955; R. Jonker and A. Volgenant 1987): exact
    greedy     the largest benefit of all that is left, again and again: at least half of the best

Benefits are integers from 0 to below `MAX_BENEFIT`. Ties go to the lower index.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner.sorting import stable_order

MAX_BENEFIT = 2**52
"""Prices of a shortest path through hundreds of parts then stay in int64."""

MAX_SUBSET_PARTS = 8
"""Parts up to which all sets of places are looked at: 2**8 of them."""

MAX_EXACT_WORK = 64 * 64
"""`num_problems * num_parts**2` up to which paths are worth their time: greedy keeps within 2 % of them."""


def assign(benefits: NDArray[np.int64]) -> NDArray[np.int64]:
    """Gives every part a place of its own, in many problems at once.

    Args:
        benefits: `[num_problems, num_parts, num_parts]` benefit of a part at a place.

    Returns:
        `[num_problems, num_parts]` int64 place of each part.
    """
    num_problems, num_parts, _ = benefits.shape
    if num_parts <= MAX_SUBSET_PARTS:
        return assign_by_subsets(benefits)
    if num_problems * num_parts**2 <= MAX_EXACT_WORK:
        return np.stack([assign_by_shortest_paths(one) for one in benefits])
    problem, part, place = np.nonzero(benefits)
    taken = assign_greedily(
        problem * num_parts + part,
        places=problem * num_parts + place,
        benefits=benefits[problem, part, place],
        num_parts=num_parts,
        num_problems=num_problems,
    )
    return taken.reshape(num_problems, num_parts) % num_parts


def assign_by_subsets(benefits: NDArray[np.int64]) -> NDArray[np.int64]:
    """`assign` for at most `MAX_SUBSET_PARTS` parts, exact."""
    num_problems, num_parts, _ = benefits.shape
    best = np.zeros((num_problems, 1), dtype=np.int64)
    choices: list[NDArray[np.int64]] = []
    levels = _subset_levels(num_parts)
    for part, (members, rest) in enumerate(levels):
        # [num_problems, num_sets, set size]: the part takes one place, the parts before it the others.
        totals = best[:, rest] + benefits[:, part][:, members]
        choices.append(totals.argmax(axis=2))
        best = totals.max(axis=2)
    places = np.empty((num_problems, num_parts), dtype=np.int64)
    problems = np.arange(num_problems, dtype=np.int64)
    subset = np.zeros(num_problems, dtype=np.int64)
    for part in range(num_parts - 1, -1, -1):
        members, rest = levels[part]
        choice = choices[part][problems, subset]
        places[:, part] = members[subset, choice]
        subset = rest[subset, choice]
    return places


@lru_cache(maxsize=MAX_SUBSET_PARTS)
def _subset_levels(num_parts: int) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """For every size: the members of each set of places, and the number of the set without that member."""
    levels: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    before: dict[tuple[int, ...], int] = {(): 0}
    for count in range(1, num_parts + 1):
        sets = list(combinations(range(num_parts), count))
        rest = [[before[one[:skip] + one[skip + 1 :]] for skip in range(count)] for one in sets]
        levels.append((np.array(sets, dtype=np.int64), np.array(rest, dtype=np.int64)))
        before = {one: index for index, one in enumerate(sets)}
    return levels


def assign_by_shortest_paths(benefits: NDArray[np.int64]) -> NDArray[np.int64]:
    """`assign` for one problem, exact. `benefits`: `[num_parts, num_parts]`; returns `[num_parts]`."""
    num_parts = benefits.shape[0]
    costs = int(benefits.max()) - benefits
    # Feasible prices: cost >= price of the part + price of the place, with equality where they are matched.
    part_price = costs.min(axis=1)
    reduced = costs - part_price[:, None]
    place_price = reduced.min(axis=0)
    part_at = np.full(num_parts, -1, dtype=np.int64)
    waiting: list[int] = []
    for part, tight in enumerate(reduced == place_price):
        free = np.flatnonzero(tight & (part_at < 0))
        if free.size:
            part_at[free[0]] = part
        else:
            waiting.append(part)
    for part in waiting:
        _augment(part, costs=costs, part_price=part_price, place_price=place_price, part_at=part_at)
    places = np.empty(num_parts, dtype=np.int64)
    places[part_at] = np.arange(num_parts)
    return places


def _augment(
    start: int,
    *,
    costs: NDArray[np.int64],
    part_price: NDArray[np.int64],
    place_price: NDArray[np.int64],
    part_at: NDArray[np.int64],
) -> None:
    """Finds a place for one more part along the cheapest chain of moves; prices and `part_at` in place."""
    never = np.iinfo(np.int64).max
    distance = costs[start] - part_price[start] - place_price
    came_from = np.full(distance.size, -1, dtype=np.int64)
    # Places that were reached for good no longer compete.
    open_distance = distance.copy()
    reached: list[int] = []
    while True:
        place = int(open_distance.argmin())
        length = int(open_distance[place])
        open_distance[place] = never
        holder = int(part_at[place])
        if holder < 0:
            break
        reached.append(place)
        through = costs[holder] - place_price + (length - int(part_price[holder]))
        shorter = (through < distance) & (open_distance != never)
        distance[shorter] = open_distance[shorter] = through[shorter]
        came_from[shorter] = place
    part_price[start] += length
    if reached:
        raised = length - distance[reached]
        part_price[part_at[reached]] += raised
        place_price[reached] -= raised
    while came_from[place] >= 0:
        part_at[place] = part_at[came_from[place]]
        place = int(came_from[place])
    part_at[place] = start


def assign_greedily(
    parts: NDArray[np.int64],
    *,
    places: NDArray[np.int64],
    benefits: NDArray[np.int64],
    num_parts: int,
    num_problems: int,
) -> NDArray[np.int64]:
    """Largest benefit first, many problems at once, from the benefits that are not 0 alone.

    In each round every benefit that is the largest left of its part and of its place is taken. That is what
    taking them one by one leads to, in a few passes over arrays.

    Args:
        parts: `[num_entries]` part of each benefit, numbered through all problems, ascending.
        places: `[num_entries]` place of each benefit, numbered from 0; ascending for a part.
        benefits: `[num_entries]`.
        num_parts: parts of a problem, and places.
        num_problems: problems.

    Returns:
        `[num_problems * num_parts]` int64 place of each part. Parts and places that no benefit joins meet in
        their order.
    """
    total = num_problems * num_parts
    place_of = np.full(total, -1, dtype=np.int64)
    taken = np.zeros(total, dtype=np.bool_)
    order = stable_order(-benefits)
    parts, places = parts[order], places[order]
    while parts.size:
        ranks = np.arange(parts.size)
        first_of_part, first_of_place = np.zeros((2, total), dtype=np.int64)
        # Assigned backwards, so that the first entry stays.
        first_of_part[parts[::-1]] = ranks[::-1]
        first_of_place[places[::-1]] = ranks[::-1]
        chosen = (first_of_part[parts] == ranks) & (first_of_place[places] == ranks)
        place_of[parts[chosen]] = places[chosen]
        taken[places[chosen]] = True
        left = (place_of[parts] < 0) & ~taken[places]
        parts, places = parts[left], places[left]
    # Both ascend, and every problem has as many of the ones as of the others.
    place_of[place_of < 0] = np.flatnonzero(~taken)
    return place_of
