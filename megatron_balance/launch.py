"""Runs an unedited Megatron training script with the balance flags.

    torchrun --nproc-per-node 8 -m megatron_balance.launch pretrain_gpt.py ARGS

Everything after the script belongs to the script.
"""

from megatron_balance.hooking import launch

EPILOG = """\
flags of balancing, among the script's own (all: docs/flags.md, or SCRIPT --help):
  --balance                    every feature that no rule excludes, each logged with its reason
  --use-dynamic-batch-size --max-tokens-per-gpu N
                               pack samples up to a number of tokens
  --balance-data               move samples between ranks
  --balance-by-flops           by FLOPs, not by tokens
  --balance-dynamic-cp         share long samples among ranks, and only those
  --balance-verify             compare the first step with that of stock
  --balance-record DIR         keep plans and seconds for megatron-balance report

example:
  torchrun --nproc-per-node 8 -m megatron_balance.launch pretrain_gpt.py --sft … --calculate-per-token-loss --balance

Without one of them the script runs as it is. megatron-balance doctor -- FLAGS checks them before.
"""


def main() -> None:
    """Hook Megatron, then run the script as `__main__`."""
    launch("megatron_balance.mcore", command="megatron_balance.launch", epilog=EPILOG)


if __name__ == "__main__":
    main()
