"""One rank of test_dynamic_packing_scheduler: dev's own pretrain_gpt.py trains with dynamic context parallelism.

    torchrun … dev_dynamic_rank.py RECORD_DIR CHECKOUT FLAGS

Two functions of the checkout need Transformer Engine, for reasons that a CPU does not have: its version is asked for,
and it computes which tokens a context-parallel rank holds. Both are replaced. dev's script looks --spec up and does
not call it: this does. Each rank writes RECORD_DIR/rankN.jsonl,
a line a step; RECORD_DIR/plansN.jsonl has the sizes of this rank's micro-batches, step by step.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

from megatron_balance.devkit.cpu import enable_cpu, patch_megatron


def main() -> None:
    """Train."""
    record, checkout = Path(sys.argv[1]), Path(sys.argv.pop(2))
    enable_cpu()
    from megatron_balance.mcore import install

    install()
    patch_megatron()
    _without_transformer_engine()
    record.mkdir(parents=True, exist_ok=True)
    _write_plans(record / f"plans{os.environ['RANK']}.jsonl")
    os.environ["TRAINING_SCRIPT"] = str(checkout / "pretrain_gpt.py")
    import record_steps

    record_steps.main()


def _without_transformer_engine() -> None:
    from megatron.core.transformer import transformer_block, transformer_config

    from megatron_balance.mcore.thd.context_parallel import thd_get_partitioned_indices

    data_schedule_utils: Any = importlib.import_module("megatron.core.datasets.data_schedule_utils")
    stock = transformer_config.is_te_min_version
    transformer_config.is_te_min_version = lambda version, **how: version == "2.9.0" or stock(version, **how)
    data_schedule_utils.get_thd_partitioned_indices = thd_get_partitioned_indices

    submodules = transformer_block._get_block_submodules

    def called(config: Any, spec: Any, vp_stage: int | None = None, pp_rank: int | None = None) -> Any:
        return submodules(config, spec(config, vp_stage) if isinstance(spec, FunctionType) else spec, vp_stage, pp_rank)

    transformer_block._get_block_submodules = called


def _write_plans(path: Path) -> None:
    data_schedule: Any = importlib.import_module("megatron.core.datasets.data_schedule")
    stock = data_schedule.build_packed_microbatches

    @functools.wraps(stock)
    def recorded(*positional: Any, **keywords: Any) -> Any:
        microbatches = stock(*positional, **keywords)
        with path.open("a") as out:
            out.write(json.dumps([int(microbatch["local_cp_size"]) for microbatch in microbatches]) + "\n")
        return microbatches

    data_schedule.build_packed_microbatches = recorded


if __name__ == "__main__":
    main()
