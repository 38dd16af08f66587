"""Safe handling of bytes that others wrote, beyond what ruff's S rules see (`make lint`)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "megatron_balance").rglob("*.py"))

OBJECT_COLLECTIVES = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}
"""They pickle: whoever can write to a rank's socket could run code on it."""

ONLY_WITH = {"numpy.load": ("allow_pickle", False), "torch.load": ("weights_only", True)}
"""Functions that unpickle by default."""


def faults(source: str) -> Iterator[tuple[int, str]]:
    """Line and what is wrong there."""
    tree = ast.parse(source)
    modules = {"np": "numpy", "numpy": "numpy", "torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {name.asname or name.name: name.name for name in node.names}
    for node in ast.walk(tree):
        named = {ast.Name: "id", ast.Attribute: "attr", ast.alias: "name"}.get(type(node))
        if named is not None and getattr(node, named) in OBJECT_COLLECTIVES:
            yield node.lineno, f"{getattr(node, named)} pickles: send tensors"
        if isinstance(node, ast.ImportFrom):
            bare = "load" in {name.name for name in node.names}
            if bare and f"{node.module}.load" in ONLY_WITH:
                yield node.lineno, f"{node.module}.load under a bare name: call it as {node.module}.load"
        if isinstance(node, ast.Call):
            function = _called(node.func, modules)
            if function in ONLY_WITH and not _says(node, *ONLY_WITH[function]):
                yield node.lineno, f"{function} without {'='.join(map(str, ONLY_WITH[function]))}"


def _called(function: ast.expr, modules: dict[str, str]) -> str:
    """`numpy.load` for `np.load`; "" for what is no attribute of a name."""
    if not isinstance(function, ast.Attribute) or not isinstance(function.value, ast.Name):
        return ""
    return f"{modules.get(function.value.id, function.value.id)}.{function.attr}"


def _says(call: ast.Call, keyword: str, value: bool) -> bool:
    return any(
        one.arg == keyword and isinstance(one.value, ast.Constant) and one.value.value is value for one in call.keywords
    )


def test_no_file_of_the_package_unpickles() -> None:
    assert len(FILES) > 100
    found = [
        f"{file.relative_to(ROOT)}:{line}: {fault}"
        for file in FILES
        for line, fault in faults(file.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import numpy as np\nnp.load(path)",
        "import numpy\nnumpy.load(path, allow_pickle=True)",
        "import numpy as whatever\nwhatever.load(path, allow_pickle=flag)",
        "from numpy import load",
        "import torch\ntorch.load(path)",
        "import torch\ntorch.load(path, weights_only=False)",
        "import torch.distributed as dist\ndist.all_gather_object(out, 1)",
        "from torch.distributed import broadcast_object_list",
        "gather = dist.gather_object",
    ],
)
def test_what_is_looked_for_is_found(source: str) -> None:
    assert [line for line, _ in faults(source)]


def test_what_is_allowed_passes() -> None:
    allowed = (
        "import numpy as np, torch\nnp.load(p, allow_pickle=False)\ntorch.load(p, weights_only=True)\njson.load(p)"
    )
    assert not list(faults(allowed))
