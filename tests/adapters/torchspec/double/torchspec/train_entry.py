import json
import os
import sys
from types import SimpleNamespace

from torchspec.controller.training_controller import AsyncTrainingController

if __name__ == "__main__":
    controller = AsyncTrainingController.remote(SimpleNamespace(per_dp_rank_batch_size=2), 2)
    with open(os.environ["TRAIN_ENTRY_REPORT"], "w") as report:
        json.dump({"arguments": sys.argv[1:], "status": controller.get_status()}, report)
