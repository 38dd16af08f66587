"""Runs an unedited Megatron training script with the balance flags.

    torchrun --nproc-per-node 8 -m megatron_balance.launch pretrain_gpt.py ARGS

Everything after the script belongs to the script.
"""

from megatron_balance.hooking import launch


def main() -> None:
    """Hook Megatron, then run the script as `__main__`."""
    launch("megatron_balance.mcore", command="megatron_balance.launch")


if __name__ == "__main__":
    main()
