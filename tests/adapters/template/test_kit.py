"""The adapter kit: steps of a rollout batch, even parts, micro-batches packed alike on every rank."""

import ast
import importlib
import inspect
import subprocess
import sys
import types
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_balance import BalanceError, CostModel
from megatron_balance.adapters import kit
from megatron_balance.adapters.kit import Hook, Installation, agreed_microbatches, even_parts, split_rollout

COST = CostModel(linear=24576, quadratic=1)


@given(st.lists(st.integers(0, 7), max_size=30), st.integers(1, 4))
def test_steps_hold_whole_groups_and_every_sample_once(groups, global_batch_size):
    steps = [step.tolist() for step in split_rollout(groups, global_batch_size=global_batch_size)]
    assert sorted(chain.from_iterable(steps)) == list(range(len(groups)))
    groups_by_step = [{groups[sample] for sample in step} for step in steps]
    # Groups come in the order of their first samples, a step's worth at a time.
    in_order = list(dict.fromkeys(groups))
    assert [*chain.from_iterable(sorted(ids, key=in_order.index) for ids in groups_by_step)] == in_order
    assert {len(ids) for ids in groups_by_step[:-1]} <= {global_batch_size}
    assert not groups_by_step or len(groups_by_step[-1]) == (len(in_order) - 1) % global_batch_size + 1


@pytest.mark.parametrize("size", [0, -1, True, 2.0])
def test_a_global_batch_size_that_cannot_be_is_named(size):
    with pytest.raises(BalanceError, match="global_batch_size is"):
        split_rollout([1, 2], global_batch_size=size)
    assert len(split_rollout([1, 2], global_batch_size=np.int64(1))) == 2


@given(st.lists(st.integers(0, 2**50), min_size=1, max_size=30), st.integers(1, 6))
@example([59, 37, 37, 33, 30, 30, 21, 18, 13], 3)
@example([*range(1, 63)], 4)
def test_every_item_in_one_part_and_none_empty(costs, num_parts):
    """R51: one function spreads items, for every host."""
    num_parts, worst = min(num_parts, len(costs)), {}
    for equal_count in (True, False):
        parts = even_parts(costs, num_parts=num_parts, equal_count=equal_count)
        assert sorted(chain.from_iterable(part.tolist() for part in parts)) == list(range(len(costs)))
        assert all(part.size for part in parts)
        assert not equal_count or max(part.size for part in parts) == -(-len(costs) // num_parts)
        assert not equal_count or [part.size for part in parts] == sorted([part.size for part in parts], reverse=True)
        worst[equal_count] = max(sum(costs[item] for item in part) for part in parts)
    assert worst[False] <= worst[True]


@given(
    st.lists(st.integers(1, 60), min_size=2, max_size=40).filter(lambda lengths: len(lengths) % 2 == 0),
    st.integers(120, 300),
    st.integers(1, 3),
    st.integers(1, 5),
    st.booleans(),
)
def test_pairs_are_packed_once_under_the_cap(lengths, max_tokens, multiple, min_count, mountain):
    options = {"min_count": min_count, "multiple": multiple, "samples_per_unit": 2, "mountain": mountain}
    min_slots = -(-max(min_count, -(-sum(lengths) // max_tokens)) // multiple) * multiple
    if len(lengths) // 2 < min_slots:
        with pytest.raises(BalanceError, match="micro-batches under max_tokens_per_gpu"):
            agreed_microbatches(lengths, max_tokens=max_tokens, cost_model=COST, **options)
        return
    try:
        slots = agreed_microbatches(lengths, max_tokens=max_tokens, cost_model=COST, **options)
    except BalanceError:
        assert len(lengths) // 2 < 2 * min_slots + multiple  # too few pairs to fill twice as many
        return
    assert sorted(chain.from_iterable(slots)) == list(range(len(lengths)))
    assert all(sum(lengths[sample] for sample in slot) <= max_tokens for slot in slots)
    assert all(slot[::2] == [sample - 1 for sample in slot[1::2]] for slot in slots)
    assert len(slots) % multiple == 0
    assert len(slots) >= min_slots


def test_modules_that_load_late_are_hooked_late_and_undone_with_the_rest(monkeypatch):
    late = Installation("late_host", remedy="")

    def load(name, **content):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        vars(sys.modules[name]).update(content)
        return sys.modules[name]

    def rows(target):
        return [Hook(target=target, wrap=lambda stock: lambda step: 10 * stock(step), reason="a test")]

    host = load("late_host", plan=lambda step: step)
    stock = host.plan
    late.install(10, lambda: rows("late_host:plan"))
    new = load("new_trainer", Trainer=type("Trainer", (), {"plan": stock}))
    late.install_late(lambda: rows("new_trainer:Trainer.plan"))
    assert [host.plan(3), new.Trainer.plan(3)] == [30, 30]
    late.undo()
    assert [host.plan, new.Trainer.plan] == [stock] * 2


HOST = """
from megatron_balance import BalanceError
def install(*, switch=False, window: int = 2, cost: str | None = None):
    if window > 4:
        raise BalanceError("window is too large.")
    print(switch, window, cost)
"""


def launched(folder, *arguments):
    (folder / "host.py").write_text(HOST)
    code = "from megatron_balance.adapters.kit import launch; launch('host')"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--switch", "--window", "3", "train.py", "--window", "9"], "True 3 None\n['--window', '9'] __main__ beside"),
        (["--cost", "tokens", "-m", "beside"], "False 2 tokens\n[] __main__"),
        (["none.py"], "python -m host: error: there is no script 'none.py'"),
        (["--window", "5", "train.py"], "megatron_balance: window is too large."),
        (["--windows", "3", "train.py"], "usage: python -m host"),
    ],
)
def test_the_command_takes_the_options_of_install_and_hands_on_the_rest(tmp_path, arguments, message):
    tell = "import sys; print(sys.argv[1:], __name__"
    (tmp_path / "train.py").write_text(f"{tell}, 'beside' * ('beside' in sys.modules or bool(__import__('beside'))))")
    (tmp_path / "beside.py").write_text(f"{tell}) if __name__ == '__main__' else None")
    process = launched(tmp_path, *arguments)
    assert message in process.stdout + process.stderr
    assert "Traceback" not in process.stderr


FAILS = """
import sys
from megatron_balance import BalanceError
def load():
    raise OSError(5, "the disk is gone")
stock = sys.excepthook
sys.excepthook = lambda *error: (print("reported", error[0].__name__), stock(*error))
try:
    load()
except OSError as error:
    raise BalanceError("rank 3 failed") from error
"""


def test_an_error_of_the_script_keeps_its_traceback_and_its_cause(tmp_path):
    (tmp_path / "train.py").write_text(FAILS)
    process = launched(tmp_path, "train.py")
    assert "reported BalanceError" in process.stdout
    assert 'train.py", line 5, in load' in process.stderr
    assert process.stderr.rstrip().endswith("BalanceError: rank 3 failed")
    assert process.returncode == 1


@pytest.mark.parametrize("name", ["slime", "torchspec", "verl", "recsys"])
def test_importing_an_adapter_loads_neither_torch_nor_its_host(name):
    hosts = f"{{'torch', 'ray', 'torchrec', 'commons', {name!r}}}"
    code = f"import sys, megatron_balance.adapters.{name} as one; print(one.is_installed(), {hosts} & set(sys.modules))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.split() == ["False", "set()"]


@pytest.mark.parametrize("name", ["slime", "torchspec", "verl", "areal"])
def test_every_option_of_install_is_documented(name):
    """R47, R52, R53."""
    install = importlib.import_module(f"megatron_balance.adapters.{name}").install
    assert all(f"        {option}: " in install.__doc__ for option in inspect.signature(install).parameters)


def imports_within_functions(path):
    nodes = list(ast.walk(ast.parse(path.read_text())))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    descendants = [node for function in functions for node in ast.walk(function)]
    names = [alias.name for node in descendants if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in descendants if isinstance(node, ast.ImportFrom)]
    return nodes, {name.partition(".")[0] for name in names}


def test_tests_print_nothing_and_import_at_the_top():
    """R48, R50. Adapters import hosts late, and what imports them; nothing else."""
    for path in Path(__file__).parents[1].rglob("*.py"):
        nodes, late = imports_within_functions(path)
        assert not [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"], path
        assert not late, path
    for path in Path(kit.__file__).parent.rglob("*.py"):
        _, late = imports_within_functions(path)
        assert not late & {*sys.stdlib_module_names, "numpy", "torch"}, path
