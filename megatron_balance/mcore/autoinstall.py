"""One line in a training script, before it parses arguments: `import megatron_balance.mcore.autoinstall`."""

from megatron_balance.mcore.hooks import install

install()
