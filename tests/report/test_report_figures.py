"""The numbers of the report: what stock would be, what time costs are, what is compared with what."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from report_runs import SECONDS_PER_COST, large_record, measured, planned_step, run_info, run_record, unmeasured

from megatron_balance import BalanceError, Limits, Topology
from megatron_balance.cost.calibration import UNITS_PER_SECOND
from megatron_balance.cost.model import CostModel
from megatron_balance.record.judging import imbalance, samples_of_slots, step_metrics, stock_step
from megatron_balance.record.run_record import RunRecord
from megatron_balance.report.fit import cost_fit
from megatron_balance.report.length_bins import length_bins
from megatron_balance.report.run_figures import run_figures
from megatron_balance.report.summary import NONE, amount, summarize
from megatron_balance.report.timeline_data import MAX_STEPS, timeline_data

TOPOLOGIES = [Topology(4), Topology(4, ep_size=2), Topology(4, fully_sharded=True), Topology(4, pp_size=2)]


def test_stock_deals_samples_out_as_they_were_loaded() -> None:
    step = run_record(num_samples=10).steps[0]
    stock = stock_step(step, info=run_info())
    expected = [[0], [4], [8], [1], [5], [9], [2], [6], [], [3], [7], []]
    assert samples_of_slots(stock) == expected
    # Nobody noted who loaded what: the same.
    unknown = replace(step, home_ranks=np.zeros(10, dtype=np.int64))
    assert samples_of_slots(stock_step(unknown, info=run_info())) == expected
    of_two = stock_step(step, info=run_info(limits=Limits(micro_batch_size=2)))
    assert samples_of_slots(of_two) == [[0, 4], [8], [1, 5], [9], [2, 6], [], [3, 7], []]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_predicted_times_and_imbalances_are_the_planner_s(topology: Topology) -> None:
    record = run_record(run_info(topology), num_steps=3)
    figures = run_figures(unmeasured(record))
    for policy in (figures.stock, figures.planned):
        for index, (step, metrics) in enumerate(zip(policy.steps, policy.metrics, strict=True)):
            assert policy.times[index] == pytest.approx(metrics.predicted_cost, rel=1e-6)
            own = metrics.microbatch_imbalance if metrics.objective == "microbatch" else metrics.step_imbalance
            assert policy.imbalance[index] == pytest.approx(own)
            assert metrics == step_metrics(step, info=record.info)
    assert figures.speed_up > 1.1
    assert figures.scale.unit == "FLOP"


def test_costs_become_seconds_by_what_was_measured() -> None:
    figures = run_figures(run_record(noise=0.02))
    assert (figures.scale.unit, figures.scale.fitted) == ("s", True)
    assert figures.scale.per_cost == pytest.approx(SECONDS_PER_COST, rel=0.02)
    step = figures.record.steps[0]
    np.testing.assert_allclose(figures.scale.times(step), step.seconds, rtol=0.05)
    assert figures.measured_imbalance[0] == pytest.approx(imbalance(step.seconds, info=figures.info))


def test_seconds_stay_as_they_were_predicted() -> None:
    info = run_info(cost_name="seconds", cost_model=CostModel(linear=10**12, quadratic=10**8, per_microbatch=10**15))
    step = planned_step(info, iteration=1, num_samples=40, seed=0)
    slower = measured(step, noise=0.0, seconds_per_cost=1.25 / UNITS_PER_SECOND)
    figures = run_figures(RunRecord(info, (slower,)))
    assert not figures.scale.fitted
    fit = cost_fit(figures)
    assert fit is not None
    assert fit.median_error == pytest.approx(0.2)


def test_what_calibration_learned_is_in_seconds_too() -> None:
    record = run_record(noise=0.0)
    scale = round(SECONDS_PER_COST * UNITS_PER_SECOND)
    learned = CostModel(linear=2000 * scale, quadratic=scale)
    later = run_info(cost_model=learned)
    steps = tuple(
        measured(planned_step(later, iteration=index, num_samples=48, seed=index), noise=0.0, seconds_per_cost=1e-18)
        for index in (7, 8)
    )
    figures = run_figures(RunRecord(record.info, record.steps + steps))
    for step in figures.record.steps:
        np.testing.assert_allclose(figures.scale.times(step), step.seconds, rtol=1e-6)
    # Stock is judged as the plan of its step is.
    assert (figures.stock.times >= figures.planned.times).all()
    fit = cost_fit(figures)
    assert fit is not None
    assert fit.median_error < 1e-6


def test_fit_counts_every_micro_batch_and_draws_some() -> None:
    figures = run_figures(large_record(num_steps=60))
    fit = cost_fit(figures)
    assert fit is not None
    assert fit.num_microbatches == sum(step.cost_grid.size for step in figures.record.steps)
    assert fit.predicted.size < fit.num_microbatches
    errors = np.concatenate(
        [np.abs(figures.scale.times(step) / step.seconds - 1).ravel() for step in figures.record.steps]
    )
    assert fit.median_error == pytest.approx(np.median(errors))
    assert f"{fit.median_error:.1%}" in fit.summary


def test_bins_hold_every_sequence_and_all_of_the_cost() -> None:
    bins = length_bins(run_figures(run_record()))
    assert bins.counts.sum() == pytest.approx(1)
    assert bins.costs.sum() == pytest.approx(1)
    assert bins.costs[-1] > bins.counts[-1]
    assert len(bins.labels) == len(set(bins.labels)) == bins.counts.size


def test_a_step_that_was_not_measured_is_a_gap() -> None:
    record = run_record()
    steps = list(record.steps)
    seconds = steps[2].seconds.copy()
    seconds[1] = np.nan
    steps[2] = replace(steps[2], seconds=seconds)
    figures = run_figures(RunRecord(record.info, tuple(steps)))
    assert np.isnan(figures.measured_imbalance).tolist() == [index == 2 for index in range(6)]
    assert figures.shown_imbalance[2] == figures.planned.imbalance[2]
    summary = summarize(figures, fit=cost_fit(figures))
    assert summary.columns[-1] == "measured"
    assert all("nan" not in cell for row in summary.rows for cell in row)


def test_the_plan_made_beforehand_is_judged_as_the_run() -> None:
    record = run_record()
    other = unmeasured(RunRecord(run_info(cost_model=CostModel.tokens(), cost_name="tokens"), record.steps[:4]))
    figures = run_figures(record, beforehand=other)
    assert figures.beforehand is not None
    np.testing.assert_allclose(figures.beforehand.times, figures.planned.times[:4])
    keys = [[panel["key"] for panel in step["panels"]] for step in timeline_data(figures).steps]
    assert keys[0] == ["stock", "beforehand", "planned", "measured"]
    assert keys[5] == ["stock", "planned", "measured"]


def test_timelines_hold_every_sample_of_the_steps_that_matter() -> None:
    record = large_record(num_steps=300)
    figures = run_figures(record)
    data = timeline_data(figures)
    assert len(data.steps) <= MAX_STEPS
    shown = {step["iteration"]: step for step in data.steps}
    assert {1, 300, int(figures.measured_imbalance.argmax()) + 1} <= set(shown)
    assert "median" in data.steps[data.first_shown]["label"]
    for step in data.steps:
        lengths = record.steps[step["iteration"] - 1].lengths.tolist()
        assert step["batches"] == [lengths]
        for panel in step["panels"]:
            assert sorted(panel["ids"]) == list(range(len(lengths)))
            assert len(panel["counts"]) == len(panel["starts"]) == len(step["ranks"]) * panel["slots"]
            assert max(panel["ends"]) <= panel["total"] + 1


def test_of_many_ranks_the_busiest_are_drawn() -> None:
    figures = run_figures(run_record(run_info(Topology(256)), num_steps=1, num_samples=512))
    step = timeline_data(figures).steps[0]
    assert len(step["ranks"]) <= 64
    assert int(figures.record.steps[0].seconds.sum(axis=1).argmax()) in step["ranks"]
    assert int(figures.stock.steps[0].cost_grid.sum(axis=1).argmax()) in step["ranks"]


def test_steps_without_samples_are_left_out() -> None:
    record = run_record(num_steps=3)
    empty = planned_step(record.info, iteration=2, num_samples=0, seed=0)
    steps = (record.steps[0], empty, record.steps[2])
    figures = run_figures(RunRecord(record.info, steps), beforehand=unmeasured(record))
    assert figures.iterations.tolist() == [1, 3]
    assert figures.beforehand is not None
    np.testing.assert_allclose(figures.beforehand.times, figures.planned.times)
    with pytest.raises(BalanceError, match="no step with samples"):
        run_figures(RunRecord(record.info, (empty,)))


def test_amounts_read_as_people_say_them() -> None:
    values = [
        (0.0123, "s", "12.3 ms"),
        (75.0, "s", "75 s"),
        (4.56e15, "FLOP", "4.56 PFLOP"),
        (8192, "tokens", "8,192 tokens"),
    ]
    assert [amount(value, unit=unit) for value, unit, _ in values] == [text for *_, text in values]
    assert amount(float("nan"), unit="s") == NONE
