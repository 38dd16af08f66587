"""Delays the packets of a link: `python -m benchmarks.hosts.delayed_link MILLISECONDS PID PID`.

Makes a TAP device in the network namespace of each process and carries frames between them, in order, each after
the delay. Says a line once both devices are there.
"""

from __future__ import annotations

import fcntl
import os
import queue
import struct
import sys
import threading
import time

from benchmarks.hosts.network import INTERFACE

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_MOST_BYTES = 65536

_Frames = queue.SimpleQueue[tuple[float, bytes]]


def main() -> None:
    """Carry frames until the process is ended."""
    delay_seconds = int(sys.argv[1]) / 1000
    ends = [_tap_of(int(pid)) for pid in sys.argv[2:]]
    for source, target in (ends, reversed(ends)):
        frames: _Frames = queue.SimpleQueue()
        threading.Thread(target=_take_in, args=(source, frames, delay_seconds), daemon=True).start()
        threading.Thread(target=_hand_on, args=(target, frames), daemon=True).start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    threading.Event().wait()


def _tap_of(pid: int) -> int:
    """Make a device in that process's namespace and open it."""
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    os.setns(namespace, os.CLONE_NEWNET)
    os.close(namespace)
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", INTERFACE.encode(), _IFF_TAP | _IFF_NO_PI))
    return device


def _take_in(device: int, frames: _Frames, delay_seconds: float) -> None:
    while True:
        frame = _read(device)
        frames.put((time.monotonic() + delay_seconds, frame))


def _read(device: int) -> bytes:
    while True:
        try:
            return os.read(device, _MOST_BYTES)
        except OSError:  # the interface is not up yet
            time.sleep(0.01)


def _hand_on(device: int, frames: _Frames) -> None:
    while True:
        due, frame = frames.get()
        time.sleep(max(due - time.monotonic(), 0))
        try:
            os.write(device, frame)
        except OSError:
            continue  # the interface is down: the frame is lost, as on a cable


if __name__ == "__main__":
    main()
