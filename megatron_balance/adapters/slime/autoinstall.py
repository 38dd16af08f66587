"""One line in train.py, before `train(args)`: `import megatron_balance.adapters.slime.autoinstall`."""

from megatron_balance.adapters.slime import install

install()
