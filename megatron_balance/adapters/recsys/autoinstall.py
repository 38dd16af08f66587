"""Importing this installs the adapter: one line in a checkout of recsys-examples, see patches/recsys-examples."""

from megatron_balance.adapters.recsys import install

install()
