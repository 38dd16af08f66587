"""Ranks meet before they make groups. Threads stand for them: the store is what they share. See also test_faults.py."""

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_balance.errors import BalanceError
from megatron_balance.runtime import agreement
from megatron_balance.runtime.agreement import Meeting, agree, differences
from megatron_balance.runtime.peers import (
    MAX_RANKS_NAMED,
    PeerError,
    annotate_peer_loss,
    named_ranks,
    waiting_for,
    with_step_context,
)


def meet(settings, *, seconds=20.0, problems=None, store=None, missing=()):
    """The answer to each rank that comes, "" where it may go on."""
    store = store or dist.HashStore()
    heard = {}

    def be(rank):
        meeting = Meeting(store, rank, num_ranks=len(settings), timeout=timedelta(seconds=seconds))
        try:
            agree(settings[rank], meeting=meeting, topic="flags", problem=(problems or {}).get(rank))
            heard[rank] = ""
        except BalanceError as error:
            heard[rank] = str(error)

    ranks = [threading.Thread(target=be, args=(rank,)) for rank in range(len(settings)) if rank not in missing]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return [heard[rank] for rank in sorted(heard)]


def test_equal_ranks_go_on_as_often_as_they_meet():
    store = dist.HashStore()
    for _ in range(3):
        assert meet([{"cap": "4096"}] * 4, store=store) == [""] * 4


def test_what_differs_is_named_with_its_ranks_on_every_rank():
    here, there = {"cap": "4096", "seed": "1"}, {"cap": "8192", "seed": "1"}
    heard = meet([here, there, here])
    assert len(set(heard)) == 1
    assert "cap is 4096 on ranks 0, 2 and 8192 on rank 1. Give every rank the same command" in heard[0]
    assert "seed" not in heard[0]


def test_a_verdict_is_not_taken_for_that_of_the_next_meeting():
    store = dist.HashStore()
    assert all(meet([{"cap": "1"}, {"cap": "2"}], store=store))
    assert meet([{"cap": "1"}, {"cap": "1"}], store=store) == ["", ""]


def test_a_problem_on_one_rank_is_every_ranks():
    heard = meet([{}, {}, {}], problems={2: "the file is not there"})
    assert heard == ["rank 2: the file is not there"] * 3


def test_a_rank_that_does_not_come_is_named():
    started = time.monotonic()
    heard = meet([{}, {}, {}, {}], seconds=3, missing=(1, 3))
    assert time.monotonic() - started < 30
    assert len(set(heard)) == 1
    assert "ranks 1, 3 of 4 did not come" in heard[0]
    assert "without megatron_balance" in heard[0]


def test_without_rank_0_the_others_say_so():
    heard = meet([{}, {}, {}], seconds=2, missing=(0,))
    assert len(heard) == 2
    assert all("no word from rank 0" in one for one in heard)


def test_a_store_that_is_gone_is_named(monkeypatch):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5), wait_for_workers=False)
    port = store.port
    client = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5), wait_for_workers=False)
    del store
    monkeypatch.setattr(agreement, "READ_SECONDS", 0.1)
    with pytest.raises(PeerError, match="waited for all ranks to agree on their flags"):
        agree({}, meeting=Meeting(client, 1, num_ranks=2, timeout=timedelta(seconds=3)), topic="flags")


def test_a_setting_that_a_rank_lacks_differs():
    assert "balancing is on on rank 0 and off on rank 1" in differences([{"balancing": "on"}, {"balancing": "off"}])
    assert "cap is 1 on rank 0 and not set on rank 1" in differences([{"cap": "1"}, {}])
    named = differences([{"balancing": "on", "cap": "1"}, {"balancing": "off"}])
    assert "balancing" in named
    assert "cap" not in named
    many = differences([{f"s{n}": "1" for n in range(9)}, {}])
    assert "and 4 more" in many


def test_many_ranks_are_counted():
    assert named_ranks([3]) == "rank 3"
    assert named_ranks(range(MAX_RANKS_NAMED + 4)).endswith(" and 4 more")


def test_a_lost_peer_is_told_with_what_and_when_and_keeps_its_cause():
    cause = RuntimeError("[gloo/transport/tcp/pair.cc:561] Connection closed by peer. This is typically caused by x")
    with pytest.raises(PeerError) as raised, with_step_context("iteration 7"), waiting_for("lengths (gather)"):
        raise cause
    assert str(raised.value).startswith("iteration 7: waited for lengths (gather) among the other ranks, and not all ")
    assert "(Connection closed by peer)" in str(raised.value)
    assert "--distributed-timeout-minutes" in str(raised.value)
    assert raised.value.__cause__ is cause


@pytest.mark.parametrize(
    "lost",
    [
        RuntimeError(
            "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:84] Timed out waiting 10000ms for recv"
        ),
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711"),
        dist.DistBackendError("NCCL communicator was aborted"),
    ],
)
def test_lost_peers_in_collectives_of_others_leave_the_error_and_add_a_note(lost):
    with pytest.raises(RuntimeError) as raised, annotate_peer_loss("iteration 7"):
        raise lost
    assert raised.value is lost
    assert lost.__notes__[0].startswith("megatron_balance: iteration 7: Megatron waited for other ranks")


def test_errors_that_are_not_of_peers_get_no_note():
    with pytest.raises(RuntimeError) as raised, annotate_peer_loss("iteration 7"):
        raise RuntimeError("CUDA out of memory")
    assert not hasattr(raised.value, "__notes__")


def test_other_errors_pass():
    with pytest.raises(KeyError), with_step_context("iteration 7"), waiting_for("lengths"):
        raise KeyError("x")
    with pytest.raises(BalanceError, match=r"^mine$"), with_step_context("iteration 7"), waiting_for("lengths"):
        raise BalanceError("mine")
