"""Installs the hooks on import: put `import megatron_balance.mcore.autoinstall` before a script parses arguments."""

from megatron_balance.mcore.hooks import install

install()
