"""Cases of trouble on the link between two hosts, and the outcome that is required of each."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.hosts.network import Network

SHORT_TIMEOUT_SECONDS = 10
"""Of process groups after the first step: training on this machine is quicker by far."""

LONG_TIMEOUT_SECONDS = 60
"""Of process groups from the beginning, the least that Megatron's flag in minutes can ask for."""

AFTER_STEP = 3
"""The link changes once every rank has done this number of steps."""

AWAY_SECONDS = 3
MBIT_PER_SECOND = 2

DP4 = ""
TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"

_IN_SECONDS = f"--distributed-timeout-minutes 1 --distributed-timeout-seconds-after-init {SHORT_TIMEOUT_SECONDS}"
_IN_A_MINUTE = "--distributed-timeout-minutes 1"


@dataclass(frozen=True)
class Case:
    """One run over two hosts.

    Attributes:
        link: what becomes of the link, for people.
        parallel: Megatron's flags of the layout.
        change: makes it so, after AFTER_STEP steps; None where the link stays as it is.
        timeout_seconds: of process groups where every rank must end with an error; None where the run must go on.
    """

    link: str
    parallel: str = DP4
    change: Callable[[Network], None] | None = None
    timeout_seconds: int | None = None

    @property
    def layout(self) -> str:
        return {DP4: "DP4", TP2: "TP2×DP2", PP2: "PP2×DP2"}[self.parallel]

    @property
    def timeout_flags(self) -> str:
        """Megatron's flags; its minutes are whole ones."""
        return _IN_A_MINUTE if self.timeout_seconds == LONG_TIMEOUT_SECONDS else _IN_SECONDS


def _away(network: Network) -> None:
    network.take_down()
    time.sleep(AWAY_SECONDS)
    network.bring_up()


def _narrow(network: Network) -> None:
    network.narrow(mbit_per_second=MBIT_PER_SECOND)


CASES: dict[str, Case] = {
    "whole": Case("whole"),
    "whole-tp2": Case("whole", parallel=TP2),
    "whole-pp2": Case("whole", parallel=PP2),
    "narrow": Case(f"{MBIT_PER_SECOND} Mbit/s from step {AFTER_STEP}", change=_narrow),
    "away": Case(f"down for {AWAY_SECONDS} s", change=_away),
    "down": Case("down", change=Network.take_down, timeout_seconds=SHORT_TIMEOUT_SECONDS),
    "lost": Case("every packet lost", change=Network.lose_packets, timeout_seconds=SHORT_TIMEOUT_SECONDS),
    # Stages wait for messages, which over gloo keep the timeout that their group was made with, whatever comes later.
    "lost-pp2": Case(
        "every packet lost", parallel=PP2, change=Network.lose_packets, timeout_seconds=LONG_TIMEOUT_SECONDS
    ),
    "down-minute": Case("down", change=Network.take_down, timeout_seconds=LONG_TIMEOUT_SECONDS),
}
"""By the name that chooses one."""
