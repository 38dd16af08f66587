"""`megatron-balance doctor`: a line a check, remedies, the exit code, and nothing left behind."""

import json
import re
import resource
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from forked import call, run_forked

from megatron_balance import hooking
from megatron_balance.cli import main
from megatron_balance.mcore import doctor as checks
from megatron_balance.mcore import hooks
from megatron_balance.runtime.process import SPARE_FILES

BALANCED = "--use-dynamic-batch-size --max-tokens-per-gpu 4096 --balance-data --calculate-per-token-loss"
MODEL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128"

OVERLAP = next(index for index, hook in enumerate(hooks.HOOKS) if hook.needed == "overlap_moe_expert_parallel_comm")

BATCH = ("--micro-batch-size", "1", "--global-batch-size", "8")


def doctor(capsys, flags="", *options):
    """The exit status and the lines."""
    status = main(["doctor", *options, *(["--", *flags.split()] if flags else [])])
    return status, [line.strip() for line in capsys.readouterr().out.splitlines()]


def problems(lines):
    return [line.removeprefix("problem").strip() for line in lines if line.startswith("problem  ")]


def test_a_healthy_environment(capsys):
    from megatron.training import training

    before = training.get_forward_backward_func, training.evaluate
    status, lines = doctor(capsys)
    assert status == 0
    assert problems(lines) == []
    assert lines[-1] == "no problem"
    rows = hooking.hooks_of_release(hooks.HOOKS, hooks.supported_version())
    assert f"{len(rows)} hooks apply" in lines
    assert main(["doctor", "--json"]) == 0
    messages = [finding["message"] for finding in json.loads(capsys.readouterr().out) if finding["kind"] == "ok"]
    for hook in rows:
        assert any(message.startswith(f"{hook.target}:") for message in messages)
    assert any(line.startswith("ok       torch ") for line in lines)
    assert any(line.startswith("ok       megatron-core 0.19") for line in lines)
    assert (training.get_forward_backward_func, training.evaluate) == before


@pytest.mark.parametrize(("index", "level"), [(1, "problem"), (OVERLAP, "note")])
def test_a_hook_that_does_not_apply(capsys, monkeypatch, index, level):
    """It ends runs that need it; one that pipelines alone need is a note."""
    moved = replace(hooks.HOOKS[index], target="megatron.core.pipeline_parallel.schedules:gone", bound_in=())
    monkeypatch.setattr(hooks, "HOOKS", (*hooks.HOOKS[:index], moved, *hooks.HOOKS[index + 1 :]))
    status, lines = doctor(capsys)
    assert status == (level == "problem")
    [message] = [line for line in lines if "cannot hook megatron.core.pipeline_parallel.schedules:gone" in line]
    assert message.startswith(f"{level} ")
    assert "Use a supported version" in message


def test_what_the_environment_lacks_is_noted(capsys, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("MEGATRON_BALANCE", "0")
    monkeypatch.setattr("megatron_balance.hooking._announced_off", {"Megatron"})
    monkeypatch.setattr("megatron.core.package_info.__version__", "0.18.3")
    notes = [line for line in doctor(capsys)[1] if line.startswith("note ")]
    for words in ("TORCH_DISABLE_SHARE_RDZV", "MEGATRON_BALANCE is 0", "pip has megatron-core 0.19"):
        assert any(words in note for note in notes), notes
    page = (Path(__file__).parents[2] / "docs" / "megatron.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in page for name in checks.VARIABLES)


def test_a_gpu_without_transformer_engine(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    findings = list(checks.check_packages())
    assert any(finding.ok and finding.message == "a GPU" for finding in findings)
    [problem] = [finding.message for finding in findings if not finding.ok]
    assert problem.startswith("transformer_engine.pytorch of transformer-engine does not load: ")
    assert "pip install 'transformer-engine[pytorch]'" in problem


def test_open_files_are_compared_with_what_the_flags_need(capsys, monkeypatch):
    """For the ranks of WORLD_SIZE, by the function that a run calls; the limit of this process stays."""
    before, limits = resource.getrlimit(resource.RLIMIT_NOFILE), (80, 8192)
    flags = f"{MODEL} {BALANCED} --tensor-model-parallel-size 2"
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", None)
    monkeypatch.setenv("WORLD_SIZE", "2048")  # 2 * 1024 sockets to data-parallel ranks, 1 in the replica
    status, lines = doctor(capsys, flags)
    assert not status
    [num_files] = [
        int(findings[1])
        for line in lines
        if (findings := re.search(r"open files: a rank of 2048 .WORLD_SIZE. needs up to (\d+)", line))
    ]
    assert 2049 + SPARE_FILES < num_files < 3000
    limits = (80, 2000)
    _, lines = doctor(capsys, flags)
    [problem] = problems(lines)
    assert problem.startswith("this process may open 2000 files, and the sockets of this run need 2")
    assert "ulimit -n" in problem
    monkeypatch.undo()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        # R38
        (
            "--balance-by-flops --calculate-per-token-loss",
            ["--balance-cost is flops: nothing is packed by it; add --use-dynamic-batch-size"],
        ),
        (
            "--use-dynamic-batch-size --max-tokens-per-gpu 0",
            ["--max-tokens-per-gpu is 0", "--calculate-per-token-loss is"],
        ),
        (f"{BALANCED} --cuda-graph-impl local", ["--cuda-graph-impl is local: CUDA graphs replay"]),
        (f"{BALANCED} --balance-by-flop", ["--balance-by-flop is not a known flag"]),
        (f"{BALANCED} --balance-algorithm fastest", ["Megatron's parser refuses: argument --balance-algorithm"]),
        # Fault: sizes that are none were rounded down in silence.
        (
            f"{BALANCED} --balance-dynamic-cp 3",
            ["parser refuses: argument --balance-dynamic-cp: '3' is not a power of two"],
        ),
        (f"{BALANCED} --micro-batch-size", ["Megatron's parser refuses: argument --micro-batch-size: expected"]),
        (f"{BALANCED} --balance-by-flops", []),
        (f"{BALANCED} --balance-by-flops --use-megatron-fsdp", []),
        (f"{BALANCED} --balance-by-flops --pipeline-model-parallel-size 2 --vocab-size 9999", []),
        ("--lr 1e-3", []),
    ],
)
def test_flags(capsys, flags, expected):
    status, lines = doctor(capsys, f"pretrain_gpt.py {MODEL} --my-script-s-own 3 {flags}")
    findings = problems(lines)
    assert status == bool(expected)
    assert len(findings) == len(expected)
    for problem, words in zip(findings, expected, strict=True):
        assert words in problem
    advice = [line for line in lines if "pipeline stage 2 of 2 computes" in line]
    assert [line.split(":")[0].split()[0] for line in advice] == ["note"] * ("pipeline" in flags)
    assert sum("logits take up to" in line for line in lines) == ("--vocab-size" in flags)
    assert sum("gathers weights in every micro-batch at 450 GB/s" in line for line in lines) == ("fsdp" in flags)
    if "parser refuses" not in "".join(expected):
        assert "ok       --my-script-s-own is left to your script: Megatron does not know it" in lines


def test_problems_come_first_and_issue_forms_get_json(capsys):
    _, lines = doctor(capsys, f"{MODEL} --balance-data")
    assert lines[0].startswith("problem  --calculate-per-token-loss is not set")
    assert lines[-1] == "problems: 1, at the top"
    assert main(["doctor", "--json", "--", *MODEL.split(), "--balance-data"]) == 1
    findings = json.loads(capsys.readouterr().out)
    assert {finding["section"] for finding in findings} >= {"packages", "hooks into Megatron", "your flags"}
    assert [finding["message"] for finding in findings if finding["kind"] == "problem"] == problems(lines)


def test_flags_are_read_while_hooks_are_in_place():
    installed = hooks.install()
    try:
        caution, finding = checks.check_flags(["--balance-data"])
        assert caution.ok
        assert caution.message.startswith("--attention-dropout is 0.1 and --hidden-dropout is 0.1: random numbers")
        assert not finding.ok
        assert finding.message.startswith("--calculate-per-token-loss is not set")
    finally:
        installed.undo()


def doctor_here(folder):
    """On two forks of this process, which has imported Megatron."""

    def run_doctor():
        import torch

        from megatron_balance.mcore import install

        install().undo()  # of the server that this process was forked from
        torch.cuda.is_available = lambda: False  # cpu_shim.py says that there is one
        sys.exit(main(sys.argv))

    arguments = ["doctor", "--", *BALANCED.split(), *MODEL.split(), *BATCH]
    run_forked(run_doctor, folder=Path(folder), num_ranks=2, timeout_seconds=200, arguments=arguments)


def test_ranks_of_torchrun_meet(tmp_path):
    call("test_doctor:doctor_here", str(tmp_path))
    text, second = ((tmp_path / f"rank{rank}.log").read_text() for rank in range(2))
    assert second == ""
    assert "ok       all ranks have the same versions and flags" in text
    assert re.search(r"all ranks meet over gloo in [\d.]+ s; training needs TCP", text)
