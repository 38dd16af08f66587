"""A pytest plugin: NeMo-RL's own tests with the adapter on. `pytest -p nemo_rl_plugin` from a checkout of NeMo-RL."""

from __future__ import annotations

from megatron_balance.adapters import nemo_rl

nemo_rl.install(cost="tokens")
