"""Trains as pretrain_sft, with stand-ins for the kernels of a family that need a GPU: for `--gain --models`."""

import sys

import families
import pretrain_sft

if __name__ == "__main__":
    if "--multi-latent-attention" in sys.argv:
        sys.argv.remove("--group-query-attention")
    families.kernels()
    pretrain_sft.main()
