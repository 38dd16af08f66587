"""Run a slime training script with balanced schedules, unedited.

    python -m megatron_balance.adapters.slime train.py ARGS

Everything after the script belongs to the script.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from megatron_balance.adapters.slime.hooks import install
from megatron_balance.errors import BalanceError


def main(argv: list[str] | None = None) -> None:
    """Hook slime, then run the script as `__main__`.

    Args:
        argv: the arguments after the program's name; `sys.argv[1:]` by default.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or not Path(arguments[0]).is_file():
        named = f"there is no script {arguments[0]!r}. " if arguments else ""
        raise SystemExit(f"{named}usage: python -m megatron_balance.adapters.slime SCRIPT [ARGS ...]")
    sys.argv = arguments
    # As Python does for a script; before slime is imported, which may lie beside the script.
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    try:
        install()
    except BalanceError as error:
        raise SystemExit(f"megatron_balance: {error}") from error
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
