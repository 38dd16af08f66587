"""One rank of a test world: joins the gloo group, then runs the cases that arrive until none is left."""

import os
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Client

import exchange_cases
import iterator_cases
import meeting_cases
import torch
import torch.distributed as dist

CASES = {**vars(exchange_cases), **vars(iterator_cases), **vars(meeting_cases)}


def main() -> None:
    rank, num_ranks, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    connection = Client(f"{folder}/socket", "AF_UNIX", authkey=bytes.fromhex(os.environ["RANK_MAIN_KEY"]))
    connection.send(rank)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=30),
    )
    while True:
        try:
            case, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send(("done", CASES[case](**arguments)))
        except Exception:  # noqa: BLE001  # reported to the test, which fails
            connection.send(("failed", traceback.format_exc()))


if __name__ == "__main__":
    main()
