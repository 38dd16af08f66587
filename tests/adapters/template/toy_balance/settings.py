"""Every option of the adapter, in one frozen object: from arguments here, or from the host's own flags."""

from dataclasses import dataclass

from megatron_balance import CostModel


@dataclass(frozen=True)
class Settings:
    cost_model: CostModel
    max_tokens: int
