"""An example: TRL's SFTTrainer on a jsonl file; scripts/run_sft_trl.sh starts it. One line balances."""

from __future__ import annotations

import os

from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser

from megatron_balance.loaders import balance_trainer


def main() -> None:
    script, args, model = TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config()
    data = load_dataset("json", data_files=script.dataset_name, split="train")
    trainer = SFTTrainer(model.model_name_or_path, args=args, train_dataset=data)
    balance_trainer(trainer, max_tokens=int(os.environ["MAX_TOKENS"]))
    trainer.train()


if __name__ == "__main__":
    main()
