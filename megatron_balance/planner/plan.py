"""Plans one global batch: which rank runs which sample, in which micro-batch.

    1. A bin is a micro-batch of a rank. `span` ranks that wait for one another form a group; a row is one bin of each.
    2. A row lasts as long as its highest bin; the step as long as the slowest group.
    3. Sort samples by cost; take the fewest rows that the cap allows (`row_counts`).
    4. Fill the rows that a giant makes high anyway; deal them to groups, longest first (`high_rows`).
    5. Spread the remaining time over the other rows like water: each bin has a target (`targets`).
    6. Costliest first: the least loaded group, there the bin furthest below its target that has room (`pour`).
    7. Lower the targets of groups above the mean and pour again, three times at most (`leveled`). Where groups end
       later than high rows assume, let those rows hold more (`packed`).
    8. Try the next number of rows (`plan`).
    9. A small batch: the best move or swap that relieves the slowest group, again and again (`polish.py`).
    10. Order the slots (`in_slots`).

Ranks with pipeline stages have a file of their own, `pipeline_plan.py`. Objectives are numbers of `Batch.waiting`:
`step` has span 1, `microbatch` the ranks that meet. The work of experts is shared by a row; images make a row wait for
its highest bin twice, after the vision encoder and after the language model.

All numbers are integers and ties go to the lower index, so that every rank computes the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np

from megatron_balance.planner.batch import Batch, Plan, sums
from megatron_balance.planner.inputs import NEVER, Ints
from megatron_balance.planner.polish import even_parts, polish
from megatron_balance.planner.times import organ_pipe_order

GOOD_ENOUGH = 1024
"""A plan within one part in this many of the bound ends the search for rows."""

CORRECTIONS = 3
"""Times that targets are corrected."""

LIMITS = 4
"""Further limits of high rows that are tried."""

POLISHED = 1024
"""Samples of a batch up to which pairs are compared; larger ones gain less than 0.01 %."""

SCANNED = 256
"""Samples that are tested together for room in any bin."""


@dataclass(frozen=True)
class Packing:
    """Samples in bins, `(group * rows + row) * span + column`, the time of the step, and the mean work of a group."""

    bin_of: Ints
    rows: int
    time: int
    mean_work: int
    limit: int


def plan(batch: Batch, *, rows: int | None = None) -> Plan:
    """Plans a batch, in `rows` micro-batches of every rank, or in the number that is best."""
    order = np.lexsort((-batch.shared, -batch.weights, -batch.costs.sum(axis=0)))
    batch = with_headroom(batch.take(order))
    best: Packing | None = None
    lost = reached = 0
    for count in row_counts(batch) if rows is None else (rows,):
        if count <= reached:
            continue
        if best is not None:
            bound = batch.least_time(count)
            if lost == 1 or best.time <= bound + bound // GOOD_ENOUGH:
                break
        lost += 1
        found = packed(batch, count)
        reached = max(reached, found.rows)
        found = polished(batch, found)
        if best is None or found.time < best.time:
            best, lost = found, 0
    assert best is not None, "one number of rows is always tried"
    best = fuller(batch, best)
    microbatch_of = np.empty_like(order)
    microbatch_of[order] = in_slots(batch, best.bin_of, best.rows)
    return Plan(microbatch_of, np.ones((batch.num_ranks, best.rows), dtype=np.int64))


def polished(batch: Batch, found: Packing) -> Packing:
    """The packing after the local search, if that is faster: it knows sums of rows and no makespan.

    Of a larger batch only one far above the bound, where sums of ranks alone count: there the cap is tight.
    """
    bound = batch.least_time(found.rows)
    is_off = batch.span == 1 and batch.num_samples <= 4 * POLISHED and found.time > bound + bound // GOOD_ENOUGH
    if len(batch.costs) > 1:
        bin_of = even_parts(batch, found.bin_of, found.rows)
    elif batch.num_samples <= POLISHED or is_off:
        bin_of = in_rows(batch, polish(batch, found.bin_of, found.rows, goal=batch.least_work), found.rows)
    else:
        return found
    time = int(batch.row_times(bin_of, found.rows).sum(axis=1).max())
    return replace(found, bin_of=bin_of, time=time) if time < found.time else found


def with_headroom(batch: Batch) -> Batch:
    """Costs so small that sums times ranks or stages stay in int64; huge ones lose their last bits."""
    total = int(batch.costs.sum()) + int(batch.shared.sum()) + batch.launch * (batch.num_samples + batch.num_ranks)
    shift = max(0, (2 * total * max(batch.span, batch.waiting.pipeline.num_stages)).bit_length() - 62)
    if not shift:
        return batch
    return replace(batch, costs=batch.costs >> shift, shared=batch.shared >> shift, launch=batch.launch >> shift)


def row_counts(batch: Batch) -> range:
    """Numbers of rows to try, rising: more slots than samples would only add dummies."""
    least, step = batch.least_rows, batch.multiple
    most = batch.num_samples // (batch.num_ranks * step) * step
    return range(least, max(most, least) + 1, step)


def packed(batch: Batch, rows: int) -> Packing:
    """A packing in this many rows, or in the least number above that the samples fit in."""
    work = batch.least_work
    while True:
        # Fuller high rows may leave room where others leave none. Nearly full bins of a rank waste less room one after
        # another than side by side.
        for slope, limit in ((0, work), (0, work + work // 8) if batch.span > 1 else (2 * rows, work)):
            found = leveled(batch, rows, slope=slope, limit=limit)
            if found is not None:
                return found
        rows += batch.multiple * max(1, rows // (32 * batch.multiple))


def fuller(batch: Batch, best: Packing) -> Packing:
    """The best packing with other limits of high rows.

    Beside a giant samples are free but for the shared work that they cost its group. The best limit of a group's high
    rows is the time at which groups end on average: with a lower one they hold too little, with a higher one too much.
    It is searched for by halving.
    """
    if not 1 < batch.num_groups < batch.num_ranks:
        return best
    low, high = best.limit, best.time - best.rows * batch.launch
    for _ in range(LIMITS):
        if high - low <= low >> 8:
            break
        limit = (low + high) // 2
        found = leveled(batch, best.rows, slope=0, limit=limit)
        if found is not None:
            found = polished(batch, found)
            if found.time < best.time:
                best = found
        if found is None or found.mean_work > limit:
            low = limit
        else:
            high = limit
    return best


def leveled(batch: Batch, rows: int, *, slope: int, limit: int) -> Packing | None:
    """The best of a packing and its corrections, with high rows up to `limit`; None where a sample finds no room."""
    high, bases, used = high_rows(batch, rows, limit=limit)
    rest = np.flatnonzero(high < 0)
    own, shared = int(batch.own[rest].sum()), int(batch.shared[rest].sum())
    lower, best = np.zeros(batch.num_groups, dtype=np.int64), None
    for _ in range(1 + CORRECTIONS if batch.span > 1 else 1):
        bins, slack = targets(batch, rows, slope=slope, bases=bases + lower, used=used, own=own, shared=shared)
        found = pour_samples(batch, rest, slack)
        if (found < 0).any():
            break
        bin_of = high.copy()
        bin_of[rest] = bins[found]
        bin_of = in_rows(batch, no_empty(bin_of, batch.num_ranks * rows), rows)
        row_times = batch.row_times(bin_of, rows)
        times = row_times.sum(axis=1)
        mean = int(times.sum()) // times.size
        if best is None or int(times.max()) < best.time:
            mean_work = int(row_times.sum()) // batch.num_groups - rows * batch.launch
            best = Packing(bin_of, rows, time=int(times.max()), mean_work=mean_work, limit=limit)
        if int(times.max()) == mean or mean >= best.time:
            break
        lower += times - mean
    return best


def high_rows(batch: Batch, rows: int, *, limit: int) -> tuple[Ints, Ints, Ints]:
    """Fills rows that a giant makes higher than the mean of what is left: what stands beside it is free up to its cost.

    Returns the bin of each sample, -1 for those in no high row, and of each group
    its high rows' time and number.
    """
    costs, weights, span, groups = batch.own, batch.weights.clip(1, batch.cap), batch.span, batch.num_groups
    bin_of, free = np.full(costs.size, -1, dtype=np.int64), np.arange(costs.size)
    times: list[int] = []
    while span > 1 and free.size and len(times) < rows * groups - 1:
        left = rows * groups - len(times)
        tops = costs[free[::span]][: left - 1]
        mean = int(costs[free].sum()) // (span * left)
        count = int(((tops > mean) & (tops >= tops[0] - tops[0] // 4)).sum())
        if not count:
            break
        tops = tops[:count]
        room = np.full(count * span, batch.cap, dtype=np.int64)
        found = beside(costs[free], weights[free], slack=tops.repeat(span), room=room)
        # They still cost their group shared work: beyond the limit the cheapest go back.
        if groups > 1 or batch.waiting.is_makespan:
            held = np.flatnonzero(found >= 0)
            held = held[np.argsort(found[held] // span, kind="stable")]
            row, shared = found[held] // span, batch.shared[free[held]]
            totals, first = np.cumsum(shared), row.searchsorted(np.arange(count))
            over = -(-(totals - (totals[first] - shared[first])[row]) // span) > (limit - tops)[row]
            over[first] = False
            found[held[over]] = -1
        ids = free[found >= 0]
        bin_of[ids] = len(times) * span + found[found >= 0]
        shared = sums(batch.shared[ids], bin_of[ids] // span - len(times), count)
        times += (tops + shared // span).tolist()
        free = free[found < 0]
    bases, used = np.zeros((2, groups), dtype=np.int64)
    place = np.zeros(len(times) + 1, dtype=np.int64)
    open_groups = [(0, group) for group in range(groups)]
    for row in np.argsort(-np.array(times, dtype=np.int64), kind="stable").tolist():
        base, group = heappop(open_groups)
        place[row] = group * rows + used[group]
        bases[group] = base + times[row]
        used[group] += 1
        if used[group] < rows:
            heappush(open_groups, (int(bases[group]), group))
    return np.where(bin_of < 0, -1, place[bin_of // span] * span + bin_of % span), bases, used


def beside(costs: Ints, weights: Ints, *, slack: Ints, room: Ints) -> Ints:
    """Each bin takes the costliest item that fits, again and again, all bins at once; -1 for items that are left.

    Costs fall. `slack` and `room`, `[num_bins]`, are what a bin takes at most; both are overwritten.
    """
    bin_of = np.full(costs.size, -1, dtype=np.int64)
    free, bins = np.arange(costs.size), np.arange(slack.size)
    # From the first item that neither costs nor, with all behind it, weighs too much.
    heaviest = np.maximum.accumulate(weights[::-1])[::-1]
    while free.size and bins.size:
        first = np.maximum((-costs[free]).searchsorted(-slack[bins]), (-heaviest[free]).searchsorted(-room[bins]))
        order, steps = first.argsort(kind="stable"), np.arange(bins.size)
        taken = np.maximum.accumulate(first[order] - steps) + steps  # no two bins take the same item
        taken = taken[taken < free.size]
        bins, items = bins[order[: taken.size]], free[taken]
        bin_of[items] = bins
        slack[bins] -= costs[items]
        room[bins] -= weights[items]
        free = np.delete(free, taken)
    return bin_of


def targets(
    batch: Batch, rows: int, *, slope: int, bases: Ints, used: Ints, own: int, shared: int
) -> tuple[Ints, Ints]:
    """The bins without a high row, and the cost that each is to reach, `[groups, bins]` to choose from.

    Ranks that do not meet choose the rank first, so that targets matter inside a rank alone. The costliest is
    `1 + slope` times the cheapest. Ranks that meet are chosen by their bins.
    """
    if batch.span == 1:
        last = 2 * rows - 1
        profile = 2 * rows + slope * (last - 2 * np.arange(rows))
        slack = np.tile(-(-own // (batch.num_ranks * int(profile.sum()))) * profile, (batch.num_ranks, 1))
        return np.arange(slack.size), slack
    rising = np.sort(bases[used < rows])
    volume = -(-(own + shared) // batch.span)
    level = int((-(-(np.cumsum(rising) + volume) // np.arange(1, rising.size + 1))).min(initial=NEVER))
    # Of a row's time, what is no shared work is the height of its bins.
    gaps: list[int] = (level - bases).clip(0).tolist()
    heights = np.array([gap * own // max(own + shared, 1) for gap in gaps]) // np.maximum(rows - used, 1)
    row, group = np.nonzero(np.arange(rows)[:, None] >= used)
    bins = ((group * rows + row)[:, None] * batch.span + np.arange(batch.span)).reshape(-1)
    return bins, heights[group].repeat(batch.span)[:, None]


def pour_samples(batch: Batch, ids: Ints, slack: Ints) -> Ints:
    """`pour` for samples of a batch, up to one that finds no room: over-long ones first, which close their bins."""
    room = np.full(slack.shape, batch.cap, dtype=np.int64)
    loads = -slack.max(axis=1) if slack.shape[1] == 1 else np.zeros(len(slack), dtype=np.int64)
    found = np.empty(ids.size, dtype=np.int64)
    over = batch.weights[ids] > batch.cap
    for at in (np.flatnonzero(over), np.flatnonzero(~over)) if over.any() else (np.arange(ids.size),):
        own = batch.own[ids[at]]
        # Where bins are chosen first, a bin is as loaded as it is near its target.
        added = own + batch.shared[ids[at]] if batch.span == 1 or slack.shape[1] > 1 else own
        weights = batch.weights[ids[at]].clip(max=batch.cap)
        found[at] = pour(own, weights, slack=slack, room=room, loads=loads, added=added, stops=True)
        if over.any():
            room.reshape(-1)[found[over & (found >= 0)]] = -1
    return found


def pour(
    costs: Ints,
    weights: Ints,
    *,
    slack: Ints,
    room: Ints,
    loads: Ints,
    added: Ints,
    within: bool = False,
    stops: bool = False,
) -> Ints:
    """Gives each item to the least loaded group with room, there to the bin with most slack that has room.

    As many items at once as a loop would place before it came back to a group. An item takes its cost, which falls, of
    a bin's slack and its weight of the room, both `[num_groups, num_bins]`, and adds to the load of its group: all
    three are overwritten. With `within` no bin takes more than its slack; groups then have one bin, and `loads` is its
    negative slack. `stops`: at the first item that finds no room. Returns `group * num_bins + bin`, -1 without room.
    """
    bins = slack.shape[1]
    flat_slack, flat_room, most = slack.reshape(-1), room.reshape(-1), room.max(axis=1)
    found, start = np.full(costs.size, -1, dtype=np.int64), 0
    while start < costs.size:
        able = np.flatnonzero(most >= weights[start])
        if within:
            able = able[flat_slack[able] >= costs[start]]
        if not able.size:
            if stops:
                break
            ahead = slice(start, start + SCANNED)
            fits = most >= weights[ahead, None]
            if within:
                fits &= flat_slack >= costs[ahead, None]
            start += int(fits.any(axis=1).argmax()) if fits.any() else len(fits)
            continue
        chosen = able[np.argsort(loads[able], kind="stable")][: costs.size - start]
        need = weights[start : start + chosen.size]
        after = loads[chosen] + added[start : start + chosen.size]
        ends = loads[chosen[1:]] >= np.minimum.accumulate(after)[:-1]
        ends |= most[chosen[1:]] < need[1:]
        if within:
            ends |= flat_slack[chosen[1:]] < costs[start + 1 : start + chosen.size]
        count = int(ends.argmax()) + 1 if ends.any() else chosen.size
        chosen, need, items = chosen[:count], need[:count], slice(start, start + count)
        bin_of = chosen
        if bins > 1:
            bin_of = chosen * bins + np.where(room[chosen] >= need[:, None], slack[chosen], -NEVER).argmax(axis=1)
        flat_slack[bin_of] -= costs[items]
        flat_room[bin_of] -= need
        most[chosen] = room[chosen].max(axis=1) if bins > 1 else flat_room[bin_of]
        loads[chosen] = after[:count]
        found[items] = bin_of
        start += count
    return found


def no_empty(bin_of: Ints, num_bins: int) -> Ints:
    """The cheapest samples that have company move to bins that would be empty: a dummy costs its launch for nothing."""
    empty = np.flatnonzero(np.bincount(bin_of, minlength=num_bins) == 0)
    if not empty.size:
        return bin_of
    costliest = np.zeros(num_bins, dtype=np.int64)
    costliest[bin_of[::-1]] = np.arange(bin_of.size)[::-1]  # samples are sorted: the first of each bin, which stays
    spare = np.flatnonzero(costliest[bin_of] != np.arange(bin_of.size))[::-1][: empty.size]
    bin_of = bin_of.copy()
    bin_of[spare] = empty[: spare.size]
    return bin_of


def in_rows(batch: Batch, bin_of: Ints, rows: int) -> Ints:
    """Bins of each group sorted by cost and cut into rows again, so that like stand with like.

    Where several expert-parallel groups meet, the bins of a row stand by cost, or each group gets some of all costs:
    whichever makes the row lower, since it waits for the group with most work.
    """
    if batch.span == 1:
        return bin_of
    heights = sums(batch.costs.sum(axis=0), bin_of, batch.num_ranks * rows).reshape(batch.num_groups, -1)
    rank = np.argsort(np.argsort(-heights, axis=1, kind="stable"), axis=1, kind="stable")
    first = bin_of // heights.shape[1] * heights.shape[1]
    by_cost = rank.reshape(-1)[bin_of] + first
    if not 1 < batch.expert_span < batch.span:
        return by_cost
    num_experts = batch.span // batch.expert_span
    row, column = np.divmod(by_cost - first, batch.span)
    down, across = np.divmod(column, num_experts)
    across = np.where(down % 2 == 0, across, num_experts - 1 - across)
    dealt = row * batch.span + across * batch.expert_span + down + first
    lower = batch.row_times(dealt, rows) < batch.row_times(by_cost, rows)
    return np.where(lower.reshape(-1)[by_cost // batch.span], dealt, by_cost)


def in_slots(batch: Batch, bin_of: Ints, rows: int) -> Ints:
    """Rows by falling time, in a pipeline as a mountain; the bins of a row from the one end and the other in turns."""
    times = batch.row_times(bin_of, rows)
    order = organ_pipe_order(times) if batch.waiting.is_makespan else np.argsort(-times, axis=1, kind="stable")
    row, column = np.divmod(bin_of, batch.span)
    slot = np.argsort(order, axis=1).reshape(-1)[row]
    rank = row // rows * batch.span + np.where(slot % 2 == 0, column, batch.span - 1 - column)
    return rank * rows + slot
