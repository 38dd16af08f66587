"""Ranks meet before they make groups. Threads stand for them: the store is what they share."""

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_balance import BalanceError
from megatron_balance.runtime.comm import PeerError
from megatron_balance.runtime.rendezvous import Rendezvous, check_settings_match


def meet(settings, *, seconds=20.0, problems=None, store=None, missing=(), late=()):
    """The answer to each rank that comes, "" where it may go on; late ranks come seconds after the others."""
    store = store or dist.HashStore()
    heard = {}

    def be(rank):
        time.sleep(0.5 * (rank in late))
        rendezvous = Rendezvous(store, rank, num_ranks=len(settings), timeout=timedelta(seconds=seconds))
        try:
            check_settings_match(settings[rank], rendezvous=rendezvous, topic="flags", error=(problems or {}).get(rank))
            heard[rank] = ""
        except BalanceError as error:
            heard[rank] = str(error)

    ranks = [threading.Thread(target=be, args=(rank,)) for rank in range(len(settings)) if rank not in missing]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return [heard[rank] for rank in sorted(heard)]


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_wait_for_a_late_one_in_a_file_too(tmp_path, late):
    store = dist.FileStore(str(tmp_path / "store"), 2)
    assert meet([{}, {}], store=store, late=(late,)) == ["", ""]


def test_a_verdict_is_not_taken_for_that_of_the_next_check():
    store = dist.HashStore()
    assert all(meet([{"cap": "1"}, {"cap": "2"}], store=store))
    for _ in range(3):
        assert meet([{"cap": "1"}, {"cap": "1"}], store=store) == ["", ""]


@pytest.mark.parametrize(
    ("missing", "words"),
    [((1, 3), ("ranks 1, 3 of 4 did not join", "without megatron_balance")), ((0,), ("rank 0 did not respond",))],
)
def test_a_rank_that_does_not_come_is_named(missing, words):
    heard = meet([{}, {}, {}, {}], seconds=1, missing=missing)
    assert len(heard) == 4 - len(missing)
    assert all(word in one for one in heard for word in words)


def test_a_store_that_is_gone_is_named():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5), wait_for_workers=False)
    port = store.port
    client = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5), wait_for_workers=False)
    del store
    with pytest.raises(PeerError, match="waited for the flags check of all ranks"):
        check_settings_match(
            {}, rendezvous=Rendezvous(client, 1, num_ranks=2, timeout=timedelta(seconds=0.3)), topic="flags"
        )
