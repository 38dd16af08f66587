"""Runs an unedited Megatron training script with the balance flags.

    torchrun --nproc-per-node 8 -m megatron_balance.launch pretrain_gpt.py ARGS

Everything after the script belongs to the script.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from megatron_balance.errors import BalanceError

USAGE = "usage: python -m megatron_balance.launch (SCRIPT | -m MODULE) [ARGS ...]"


def main(argv: list[str] | None = None) -> None:
    """Hook Megatron, then run the script as `__main__`.

    Args:
        argv: the arguments after the program's name; `sys.argv[1:]` by default.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        raise SystemExit(USAGE if not arguments else 0)
    as_module = arguments[0] == "-m"
    if as_module:
        del arguments[0]
    if not arguments or (not as_module and not Path(arguments[0]).is_file()):
        raise SystemExit(f"megatron_balance: there is no script {arguments[0] if arguments else ''!r}. {USAGE}")
    target, *rest = arguments
    sys.argv = [target, *rest]
    if not as_module:
        # As Python does for a script, and before Megatron is imported: it may lie beside the script.
        sys.path[0] = str(Path(target).resolve().parent)
    try:
        from megatron_balance.mcore import install

        install()
        if as_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")
    except BalanceError as error:
        raise SystemExit(f"megatron_balance: {error}") from error


if __name__ == "__main__":
    main()
