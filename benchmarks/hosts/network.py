"""Makes two hosts and the link between them from network namespaces, invisible from outside.

Run in a network and process namespace of its own (command.py): when its first process ends, the kernel
ends whatever runs on the hosts and removes hosts and links.

    host 0 [10.77.0.1 wire] ───── [wire 10.77.0.2] host 1

Invariant: hosts reach each other through `wire` and nothing else.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

INTERFACE = "wire"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
START_SECONDS = 30.0


class Network:
    def __init__(self, holders: Sequence[int]) -> None:
        self._holders = holders

    def command(self, host: int, words: Sequence[str]) -> list[str]:
        """The command line that runs `words` on a host."""
        return ["nsenter", f"--net=/proc/{self._holders[host]}/ns/net", *words]

    def run(self, host: int, words: str) -> None:
        subprocess.run(self.command(host, words.split()), check=True)

    def take_down(self) -> None:
        self.run(1, f"ip link set {INTERFACE} down")

    def bring_up(self) -> None:
        self.run(1, f"ip link set {INTERFACE} up")

    def lose_packets(self) -> None:
        """The link stays up, and every packet is lost silently, as behind a firewall or a broken switch."""
        for host in (0, 1):
            self.run(host, f"tc qdisc replace dev {INTERFACE} root blackhole")

    def narrow(self, *, mbit_per_second: int) -> None:
        """Let no more than this through, in each direction."""
        for host in (0, 1):
            limit = f"rate {mbit_per_second}mbit burst 32kbit latency 1000ms"
            self.run(host, f"tc qdisc replace dev {INTERFACE} root tbf {limit}")


@contextmanager
def two_hosts() -> Iterator[Network]:
    processes = [subprocess.Popen(["unshare", "--net", "sleep", "infinity"]) for _ in ADDRESSES]
    try:
        network = Network([process.pid for process in processes])
        for process in processes:
            _wait_for_namespace(process.pid)
        first, second = (f"{INTERFACE} netns {process.pid}" for process in processes)
        subprocess.run(f"ip link add {first} type veth peer name {second}".split(), check=True)
        for host, address in enumerate(ADDRESSES):
            network.run(host, "ip link set lo up")
            network.run(host, f"ip address add {address}/24 dev {INTERFACE}")
            network.run(host, f"ip link set {INTERFACE} up")
        yield network
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _wait_for_namespace(pid: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    current = os.readlink("/proc/self/ns/net")
    while (Path("/proc") / str(pid) / "ns" / "net").readlink() == Path(current):
        if time.monotonic() > deadline:
            raise RuntimeError(f"unshare --net made no namespace within {START_SECONDS:.0f} seconds")
        time.sleep(0.01)
