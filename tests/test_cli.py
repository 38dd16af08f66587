"""The command line: the plan of a policy, help, and what every command says about wrong input."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tomllib
from recorded_runs import write_record

from megatron_balance import Limits, Topology, build_data_schedule
from megatron_balance.cli import main
from megatron_balance.record import read_record

BATCH = ["--data", "samples", "--global-batch-size", "64", "--dp-size", "4", "--max-tokens-per-gpu", "2048"]


@pytest.fixture
def lengths_file(tmp_path):
    file = tmp_path / "lengths.npy"
    np.save(file, np.random.default_rng(0).integers(16, 4000, size=200))
    return file


@pytest.mark.parametrize("policy", ["by-flops", "dynamic-cp"])
def test_json_is_a_valid_plan_of_the_lengths_in_file_order(policy, lengths_file, tmp_path):
    """The planner makes the same plans of what was written."""
    out = tmp_path / "plan.jsonl"
    model = ["--model", "Qwen3-8B", "--cp-size", "2"]
    assert main(["compare", str(lengths_file), *BATCH, *model, "--policy", policy, "--json", str(out)]) == 0
    record = read_record(out)
    info, lengths = record.info, np.load(lengths_file)
    assert info.topology == Topology(4, cp_size=2, dynamic_cp=policy == "dynamic-cp")
    assert info.limits == Limits(2048)
    assert info.cost_model.quadratic > 0
    assert (info.cost_model.cp_exchange > 0) == info.topology.dynamic_cp
    assert len(record.steps) == 3  # of 64 samples; 8 are left over
    for index, step in enumerate(record.steps):
        assert step.lengths.tolist() == lengths[index * 64 : (index + 1) * 64].tolist()
        schedule = build_data_schedule(
            step.lengths,
            cost_model=step.cost_model,
            topology=info.topology,
            limits=info.limits,
            objective=info.objective,
            home_ranks=step.home_ranks,
        ).check()
        assert np.array_equal(step.microbatch_of, schedule.microbatch_of)
        assert np.array_equal(step.cp_size_grid, schedule.cp_size_grid)
        assert np.array_equal(-(-step.costs // info.topology.gpus_per_rank), schedule.cost_grid)


def test_the_seed_decides_the_order(lengths_file, tmp_path):
    def lengths_of(*arguments):
        out = tmp_path / "plan.jsonl"
        assert main(["compare", str(lengths_file), *BATCH, *arguments, "--policy", "stock", "--json", str(out)]) == 0
        return [step.lengths.tolist() for step in read_record(out).steps]

    assert lengths_of("--shuffle", "1") == lengths_of("--shuffle", "1") != lengths_of("--shuffle", "2")
    assert lengths_of("--shuffle") == lengths_of("--shuffle", "0") != lengths_of()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """What command lines of the table name: a record, prompts with responses, the page that is written."""
    folder = tmp_path_factory.mktemp("refused")
    write_record(folder / "record", num_steps=1)
    row = {"input_ids": [1, 2, 3], "prompt": 2}
    (folder / "rollouts.jsonl").write_text(f"{json.dumps(row)}\n" * 64)
    return {"RECORD": folder / "record", "ROLLOUTS": folder / "rollouts.jsonl", "PAGE": folder / "page.html"}


REFUSED = tomllib.loads(Path(__file__).with_name("refused.toml").read_text())


@pytest.mark.parametrize(("command", "said"), REFUSED["refused"])
def test_an_error_is_one_line_and_status_2(command, said, files, capsys):
    words = shlex.split(command.replace("BATCH", REFUSED["batch"]))
    assert main([str(files.get(word, word)) for word in words]) == 2
    message = capsys.readouterr().err
    assert message.startswith("megatron-balance: ")
    assert message.count("\n") == 1
    assert said in message


def test_debug_shows_where_an_error_comes_from():
    with pytest.raises(ValueError, match="cannot be read"):
        main(["--debug", "compare", "missing.npy", *BATCH])


def test_runs_as_a_module_into_a_closed_pipe():
    command = [sys.executable, "-m", "megatron_balance", "compare", "synthetic:gsm8k_sft", *BATCH]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert "\x1b[" not in done.stdout
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()


COMPARE = ["compare", "synthetic:gsm8k_sft", *BATCH, "--model", "Qwen/Qwen3-8B"]
"""Its id on Hugging Face."""


def printed_by(code, *arguments, stdin="", **environment):
    code = f"import sys; {code}; from megatron_balance.cli import main; sys.exit(main({[*arguments]}))"
    command, variables = [sys.executable, "-c", code], {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, check=True, input=stdin, env=variables)
    return done.stdout, done.stderr


def untimed(text):
    """Without colour, and the milliseconds that end a row."""
    return re.sub(r" *[\d.]+$", "", re.sub(r"\x1b\[[\d;]*m", "", text), flags=re.MULTILINE)


def test_colour_is_the_same_text_and_needs_no_package():
    plain, _ = printed_by("0", *COMPARE)
    blocked = "sys.modules.update(dict.fromkeys(['rich', 'torch', 'jinja2', 'pyarrow']))"
    coloured, _ = printed_by(blocked, *COMPARE, FORCE_COLOR="1")
    assert "\x1b[1;32mbalance-data" in coloured
    assert untimed(coloured) == untimed(plain)


def test_lengths_from_standard_input_and_json_to_standard_output():
    batch = ["--data", "samples", "--global-batch-size", "4", "--dp-size", "2", "--max-tokens-per-gpu", "8"]
    out, text = printed_by("0", "compare", "-", *batch, "--json", "-", stdin="6\n1\n4\n1\n")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["kind"] for line in lines] == ["run", "step", "policy", "policy", "policy", "advice"]
    assert "At most 1.67x the speed of stock" in text
    assert not Path("-").exists()


def test_a_visitor_is_led_on(capsys):
    """Fault: the bare command was an error."""
    with pytest.raises(SystemExit, match="0"):
        main([])
    assert "start here:" in capsys.readouterr().out
    for module, words in (("launch", "--balance-by-flops"), ("adapters.slime", "--model MODEL")):
        command = [sys.executable, "-m", f"megatron_balance.{module}", "--help"]
        assert words in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_doctor_without_torch_says_what_to_install():
    """Fault: a traceback, where the package was installed without extras."""
    code = "import sys; sys.modules['torch'] = None; from megatron_balance.cli import main; sys.exit(main(['doctor']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert re.fullmatch(r"megatron-balance: torch does not load .*pip install '.\[megatron\]' .*\n", done.stderr)
    code = "import sys; sys.modules['torch'] = None; from megatron_balance.launch import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert re.fullmatch(r"megatron_balance: megatron_balance.mcore needs what it balances .*torch.*\n", done.stderr)
