"""A switch between emulated hosts that delays every frame. :class:`cluster.Cluster` starts it as a process of its own.

    python delay_line.py SECONDS BYTES_PER_SECOND PID ...

Each PID is a process in the network namespace of a host. The switch makes the interface ``eth0`` of every host, a tap device, and prints ``made``. A frame
reaches its host after SECONDS. A host receives at most BYTES_PER_SECOND (0: without a limit). The switch ends when its standard input closes.

Linux can delay packets itself with tc-netem, but many kernels lack that module.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import select
import struct
import sys
import time

_CLONE_NEWNET = 0x40000000  # <sched.h>
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000  # <linux/if_tun.h>
_PR_SET_TIMERSLACK = 29  # <sys/prctl.h>

#: The most frames that are read from a host before those that are due are sent.
_AT_ONCE = 16
_LARGEST_FRAME = 2**16


def main() -> None:
    delay, rate = float(sys.argv[1]), float(sys.argv[2])
    taps = [_tap_of(int(pid)) for pid in sys.argv[3:]]
    # The switch stands for hardware, so it goes before the hosts' processes, and wakes at the microsecond.
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    print("made", flush=True)
    _switch(taps, delay, rate)


def _tap_of(pid: int) -> int:
    """Makes ``eth0`` in the network namespace of a process. Returns its descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"could not enter the network namespace of process {pid}")
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _IFF_TAP | _IFF_NO_PI))
    return tap


def _switch(taps: list[int], delay: float, rate: float) -> None:
    at_address: dict[bytes, int] = {}  # hardware address -> tap
    free_at = dict.fromkeys(taps, 0.0)  # when a host's link has passed all frames so far
    under_way: list[
        tuple[float, int, int, bytes]
    ] = []  # a heap: when a frame is due, its number, the receiving tap, the frame
    number = 0
    while True:
        pause = max(0.0, under_way[0][0] - time.perf_counter()) if under_way else None
        ready = select.select([0, *taps], [], [], pause)[0]
        if 0 in ready:
            return
        for tap in ready:
            for frame in _frames(tap):
                at_address[frame[6:12]] = tap
                known = at_address.get(frame[:6])
                for receiver in [known] if known is not None else [other for other in taps if other != tap]:
                    due = max(time.perf_counter() + delay, free_at[receiver])
                    free_at[receiver] = due + (len(frame) / rate if rate else 0.0)
                    number += 1
                    heapq.heappush(under_way, (due, number, receiver, frame))
        now = time.perf_counter()
        while under_way and under_way[0][0] <= now:
            _, _, receiver, frame = heapq.heappop(under_way)
            with contextlib.suppress(OSError):  # the host's interface is not up yet, so the frame is lost
                os.write(receiver, frame)


def _frames(tap: int) -> list[bytes]:
    found = []
    with contextlib.suppress(BlockingIOError):
        for _ in range(_AT_ONCE):
            found.append(os.read(tap, _LARGEST_FRAME))
    return found


if __name__ == "__main__":
    main()
