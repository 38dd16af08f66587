"""`megatron-balance report`: its page holds the figures of the record; wrong input is told in one line."""

import json
import re
from dataclasses import replace
from datetime import date

import numpy as np
import pytest
from recorded_runs import COST_MODEL, record_writers, run_info, step_of, write_record

from megatron_balance import CostModel, Forest, Limits, Topology
from megatron_balance.cli import main
from megatron_balance.record import RunRecord
from megatron_balance.report import run_figures

pytest.importorskip("jinja2")


def report(folder, *arguments):
    page = folder / "page.html"
    assert main(["report", *map(str, arguments), "--out", str(page)]) == 0
    return page.read_text(encoding="utf-8")


def data_of(page, name):
    """What the script of the page draws."""
    (text,) = re.findall(rf'<script type="application/json" id="{name}">(.*?)</script>', page)
    return json.loads(text)


def over_mean(of_ranks):
    return float(of_ranks.max() / of_ranks.mean())


def test_the_table_holds_what_was_planned_and_measured(tmp_path):
    """In stock every rank runs what it has loaded, twelve neighbours, one a micro-batch."""
    steps = write_record(tmp_path / "record")
    page = report(tmp_path, tmp_path / "record")
    stock, planned, measured = [], [], []
    for step in steps:
        costs = np.array([COST_MODEL(length) for length in step.lengths.tolist()], dtype=float)
        stock.append(costs.reshape(4, -1).sum(axis=1))
        planned.append(step.costs.sum(axis=1))
        measured.append(step.seconds.sum(axis=1))
    means = [np.mean([over_mean(ranks) for ranks in policy]) for policy in (stock, planned, measured)]
    assert row_of(page, "imbalance (slowest / mean), mean") == [f"{mean:.3f}" for mean in means]
    speed_up = sum(ranks.max() for ranks in stock) / sum(ranks.max() for ranks in planned)
    assert f"<h1>Balancing makes forward and backward of these 6 steps at most {speed_up:.2f} times as fast" in page
    assert re.findall(r'<dd class="value">(.*?)</dd>', page)[0] == f"{speed_up:.2f}×"


def row_of(page, name):
    row = re.search(rf'<th scope="row">{re.escape(name)}</th>(.*?)</tr>', page)
    assert row is not None
    return re.findall(r"<td>(.*?)</td>", row[1])


def test_a_page_says_of_what_it_is_and_what_to_do_next(tmp_path):
    plan, batch = tmp_path / "plan.jsonl", "--global-batch-size 32 --dp-size 4 --max-tokens-per-gpu 2048 --data samples"
    lengths = ["synthetic:gsm8k_sft:64", "--model", "Qwen3-8B"]
    assert main(["compare", *lengths, *batch.split(), "--json", str(plan)]) == 0
    page = report(tmp_path, plan)
    for words in ("model Qwen3-8B", "data synthetic:gsm8k_sft:64", f"date {date.today()}", "of 32 samples", "numpy"):
        assert words in page, words
    flags, command = re.findall(r'<code id="(?:flags|command)">(.*?)</code><button type="button" data-copies', page)
    assert command.endswith(f"-m megatron_balance.launch YOUR_SCRIPT … --calculate-per-token-loss {flags}")
    assert re.search(r"As planned the slowest rank works \d+\.\d% longer than the mean rank, in stock \d+\.\d%;", page)
    assert "train 20 steps with them and" in page
    for noise, words in ((0.0, "Plans and seconds agree."), (0.5, "<code>megatron-balance fit RECORD")):
        write_record(tmp_path / "record", num_steps=3, num_samples=200, noise=noise)
        assert words in report(tmp_path, tmp_path / "record")


def test_waiting_that_no_plan_removes_is_shown(tmp_path):
    """One sample of 900 among 4 ranks, of 1,200 in all: two thirds of a step of 900 is waiting."""
    info = run_info(cost_model=CostModel(linear=1))
    with record_writers(tmp_path / "record", info, num_ranks=1) as (writer,):
        writer.add_step(step_of(info, [900, 100, 100, 100]))
    page = report(tmp_path, tmp_path / "record")
    assert row_of(page, "waiting that no plan at these sizes removes") == ["66.7%", "66.7%"]
    assert "In the worst step GPUs wait 67% of the time in any plan" in page
    assert row_of(page, "above the lower bound, mean")[1] == "+0.00%"
    assert "Under stock" not in page


def test_what_is_shared_is_told_with_what_dearer_attention_would_cost(tmp_path):
    """One tree is whole, one cut over both ranks, one not shared; attention costs twice as much on one of them."""
    info = run_info(Topology(2), cost_model=CostModel(linear=10, quadratic=1), limits=Limits(100))
    lengths = [20, 20, 20, 20, 20, 30, 30]
    forest = Forest.from_prompts(lengths, prompt_tokens=[10] * 7, groups=[0, 0, 1, 1, 1, 2, 2])
    step = replace(step_of(info, lengths, forest=forest), microbatch_of=np.array([0, 0, 0, 0, 1, 0, 1]))
    with record_writers(tmp_path / "record", info, num_ranks=1) as (writer,):
        writer.add_step(step)
    page = report(tmp_path, tmp_path / "record")
    assert "140 of 160 tokens are computed (87.5%; each once: 75.0%); trees: 3, of which 1 are cut" in page
    assert "and 1 not shared" in page
    assert row_of(page, "tokens computed, mean")[1] == "140"
    figures = run_figures(RunRecord(info, (step,))).planned
    # Of rank 0: 90 tokens, and two trees of 100 + 2 * 300 pairs each, beside 900.
    assert figures.times.tolist() == [900 + 2 * 700 + 900]
    assert figures.times_if_dearer(2).tolist() == [900 + 2 * (2 * 700 + 900)]


def test_seconds_of_a_model_are_shared_by_its_stages(tmp_path):
    """1e18 units of cost are a second of the whole model, of which each of two stages takes half."""
    cost = {"cost_model": CostModel(linear=10**15), "cost_name": "seconds", "objective": "pipeline"}
    info = run_info(Topology(1, pp_size=2), **cost)
    figures = run_figures(RunRecord(info, (step_of(info, [1000]),)))
    (timeline,) = [figures.planned.timeline(0)]
    np.testing.assert_allclose(timeline.durations, 0.5)
    assert figures.planned.times[0] == pytest.approx(1.0)  # a micro-batch passes both stages


def test_stock_of_dynamic_sizes_is_of_the_ranks_at_one_size(tmp_path):
    """CP 2: what two ranks receive of one another counts as far as attention does not hide it: of the short sample."""
    cost_model = CostModel(linear=1000, quadratic=1, cp_exchange=1000)
    info = run_info(Topology(1, cp_size=2, dynamic_cp=True), cost_model=cost_model, limits=Limits(4096))
    step = step_of(info, [4000, 200], home_ranks=[0, 0])
    long, short = 1000 * 4000 + 4000**2, 1000 * 200 + 1000 * 200
    assert step.stock().costs.tolist() == [[long, short]]
    (one,) = run_figures(RunRecord(info, (step,))).policies["stock"].times.tolist()
    assert one == pytest.approx((long + short) / 2)


def test_a_slow_rank_is_named_by_its_seconds_over_what_its_plan_costs(tmp_path):
    """Rank 2 takes a fifth longer for every micro-batch, whatever it was given."""
    info = run_info(Topology(4))
    write_record(tmp_path / "record", info, num_steps=9)
    path = tmp_path / "record" / "seconds_rank00002.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    slow = [line | {"seconds": [1.2 * value for value in line["seconds"]]} for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in slow))
    page = report(tmp_path, tmp_path / "record")
    name, slowdown = row_of(page, "slowest rank for its work, of the median rank&#39;s time")[-1].split(": ")
    assert name == "rank 2"
    assert float(slowdown.rstrip("×")) == pytest.approx(1.2, abs=0.04)
    write_record(tmp_path / "experts", run_info(Topology(4, ep_size=2), objective="microbatch"))
    page = report(tmp_path, tmp_path / "experts")  # ranks wait for one another in every micro-batch
    assert "slowest rank for its work" not in page


def test_r16_mfu_is_flops_over_seconds_and_the_peak_given(tmp_path):
    topology, environment = Topology(4, tp_size=2), {"attention_rate": 0.5}
    steps = write_record(tmp_path / "record", run_info(topology, environment=environment), num_steps=3)
    assert main(["report", str(tmp_path / "record"), "--peak", "0.001", "--out", str(tmp_path / "page.html")]) == 0
    *_, measured = row_of((tmp_path / "page.html").read_text(), "MFU at 0.001 TFLOP/s")
    # A squared token counts 1: 0.5 FLOPs at half of the rate.
    write_record(tmp_path / "tokens", run_info(topology, cost_name="tokens"), num_steps=1)
    page = report(tmp_path, tmp_path / "tokens", "--peak", 1)
    assert '<th scope="row">MFU at 1 TFLOP/s</th><td>–</td><td>–</td><td>–</td></tr>' in page
    flops = sum(2000 * length + length**2 / 2 for step in steps for length in step.lengths.tolist())
    seconds = sum(step.seconds.sum(axis=1).max() for step in steps)
    assert float(measured.rstrip("%")) == pytest.approx(100 * flops / (seconds * 8 * 1e9), abs=0.06)


def test_the_page_is_whole_in_one_file_and_texts_of_the_run_stay_texts(tmp_path):
    harm = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'"
    environment = {"device": harm, "clock": harm, "versions": {harm: harm}}
    write_record(tmp_path / "record", run_info(policy=harm, cost_name=harm, environment=environment))
    page = report(tmp_path, tmp_path / "record")
    assert not re.findall(r'<(?:script|img|link|iframe)[^>]*(?:src|href)="(?!data:,)', page)
    assert "default-src 'none'" in page
    assert "on &lt;/script&gt;" in page
    assert "<script>alert" not in page
    assert "<img src=x" not in page
    charts = re.findall(r'<div id="(\w+)" class="chart"', page)
    assert charts == ["timeline", "imbalance"]


DYNAMIC = run_info(
    Topology(3, cp_size=2, dynamic_cp=True),
    limits=Limits(2048),
    cost_model=CostModel(linear=2000, quadratic=1, cp_exchange=20),
)


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize(
    "info",
    [
        run_info(),
        run_info(Topology(4, ep_size=2), objective="microbatch"),
        run_info(Topology(4, pp_size=2), objective="pipeline"),
        DYNAMIC,
    ],
    ids=["step", "microbatch", "pipeline", "dynamic sizes"],
)
def test_timelines_hold_every_micro_batch_with_its_samples(info, measured, tmp_path):
    steps = write_record(tmp_path / "record", info, num_steps=3, measured=measured)
    page = report(tmp_path, tmp_path / "record")
    assert ("measured</th>" in page) == ("The cost model is off by" in page) == measured
    if info is DYNAMIC:  # stock runs on the DP×CP ranks
        assert "data- and context-parallel ranks" in page
        assert float(re.findall(r"(\d\.\d\d)×", page)[0]) > 1.1
    timelines = data_of(page, "timelines")
    assert [step["iteration"] for step in timelines["steps"]] == [1, 2, 3]
    for step, shown in zip(steps, timelines["steps"], strict=True):
        assert [panel["key"] for panel in shown["panels"]] == ["stock", "planned", "measured"][: 3 if measured else 2]
        assert shown["lengths"] == step.lengths.tolist()
        panel = shown["panels"][-1]
        starts, ends = (np.array(panel[name]) for name in ("starts", "ends"))
        assert (starts[:, 1:] >= ends[:, :-1]).all(), "micro-batches of a rank follow one another"
        assert panel["sizes"] == (step.cp_size_grid.tolist() if info is DYNAMIC else [])
        assert panel["samples"] == [list(map(list, slots)) for slots in step.samples()]
        if measured:
            np.testing.assert_allclose((ends - starts) * shown["tick"], step.seconds, atol=1.5 * shown["tick"])


def test_a_step_that_was_not_measured_is_a_gap(tmp_path):
    write_record(tmp_path / "record", num_steps=9)
    seconds = tmp_path / "record" / "seconds_rank00001.jsonl"
    seconds.write_text("".join(seconds.read_text().splitlines(keepends=True)[:7]))
    page = report(tmp_path, tmp_path / "record")
    assert "nan" not in page[page.index("<table>") : page.index("</table>")]
    assert [len(step["panels"]) for step in data_of(page, "timelines")["steps"]] == [3] * 7 + [2] * 2
    stock, _, measured = data_of(page, "lines")
    assert None not in stock["y"]
    assert [value is None for value in measured["y"]] == [False] * 7 + [True] * 2
