"""The benchmark of one's own command: what it runs, what it says where there is no GPU, and the picture of losses."""

import argparse
from xml.etree import ElementTree

import pytest
import training_run

from benchmarks import cluster
from benchmarks.overlay import overlay

FLAGS = (
    f"{training_run.MODEL_FLAGS} {training_run.TRAINING_FLAGS} --num-layers 1 --hidden-size 32 --num-attention-heads 2 "
    "--num-query-groups 2 --ffn-hidden-size 64 --seq-length 256 --max-position-embeddings 256 --global-batch-size 8"
)
BALANCE = "--balance-data --use-dynamic-batch-size --max-tokens-per-gpu 256"


def test_stock_runs_have_no_balance_flag_and_no_run_writes_a_checkpoint():
    words = "--lr 1e-3 --save here --sft"
    assert cluster.flags_of_runs(words.split()) == {
        "stock": ["--lr", "1e-3", "--sft"],
        "balanced": ["--lr", "1e-3", "--sft", "--balance"],
    }
    of_both = cluster.flags_of_runs(f"--lr 1e-3 {BALANCE} --balance-record there".split())
    assert of_both == {"stock": ["--lr", "1e-3"], "balanced": ["--lr", "1e-3", *BALANCE.split()]}


def test_losses_are_drawn_as_a_picture_that_says_how_far_apart_they_are():
    picture = ElementTree.fromstring(overlay([4.0, 3.0, 2.0], [4.0, 3.003, 2.0]))  # noqa: S314 - made here
    assert picture[0].text == "Losses of 3 steps, stock and balanced; they differ by at most 1.0e-03"
    lines = [line.attrib["points"].split() for line in picture if line.tag.endswith("polyline")]
    assert [len(line) for line in lines] == [3, 3, 3]
    assert lines[0][::2] == lines[1][::2]
    assert lines[0][1] != lines[1][1]


def test_a_folder_with_a_run_in_it_is_not_overwritten(tmp_path):
    (tmp_path / "record").mkdir()
    parser = argparse.ArgumentParser()
    cluster.add_options(parser)
    with pytest.raises(SystemExit, match="it has the record of another run"):
        cluster.measure(parser.parse_args(["--out", str(tmp_path), "--", "script.py"]))


@pytest.mark.slow
def test_a_command_runs_stock_and_balanced_and_both_are_compared(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    cluster.add_options(parser)
    script, out = training_run.KIT / "pretrain_sft.py", tmp_path / "out"
    options = f"--device cpu --ranks 2 --steps 5 --turns 1 --out {out} --picture {tmp_path / 'losses.svg'}"
    measured = cluster.measure(
        parser.parse_args([*options.split(), "--", str(script), *FLAGS.split(), *BALANCE.split()])
    )
    assert not measured.problems
    figures = measured.figures
    assert figures["num_steps"] == 5
    assert figures["stock"]["seconds"] / figures["balanced"]["seconds"] == pytest.approx(figures["ratio"])
    assert figures["balanced"]["tokens_per_second"] / figures["stock"]["tokens_per_second"] == pytest.approx(
        figures["ratio"]
    )
    assert {"ranks" in step for step in measured.raw["balanced"][0][0]} == {True}
    assert {"ranks" in step for step in measured.raw["stock"][0][0]} == {False}
    said, page = capsys.readouterr().out, (out / "index.html").read_text()
    for text in ("MFU absent: no GPU", "peak memory, GiB absent: no GPU", f"{figures['ratio']:.3f}×", "tokens/s"):
        assert text in said
    assert (tmp_path / "losses.svg").read_text() in page
    assert (out / "report.html").stat().st_size > 10_000
