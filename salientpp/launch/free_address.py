"""Prints an address of this host at which other hosts can reach it: ``python -m salientpp.launch.free_address``.

Batch scripts for SLURM run it on every storage host. The line has the number of the task, and host and port: ``0 10.0.0.7:41231``. The kernel reports the port
as free. GLOO_SOCKET_IFNAME chooses the network interface, as in :func:`salientpp.init_process_group`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from salientpp.launch.environment import LaunchError
from salientpp.launch.interfaces import address_of, addresses_of


def free_address(environ: Mapping[str, str]) -> str:
    """Returns ``HOST:PORT``, with an IPv6 address in brackets. The port is free now, and nothing listens there yet.

    Raises:
        LaunchError: GLOO_SOCKET_IFNAME names no interface with an IPv4 address, or this host's name has no address.
    """
    interface = environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    name = socket.gethostname()
    for host in filter(None, [address_of(interface)] if interface else addresses_of(name)):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family) as made:
            return f"[{host}]:{made.getsockname()[1]}" if ":" in host else f"{host}:{made.getsockname()[1]}"
    where = f"the network interface {interface} of GLOO_SOCKET_IFNAME" if interface else f"the host name {name}"
    raise LaunchError(
        f"{where} has no address at which other hosts can reach {name}; set GLOO_SOCKET_IFNAME to an interface that connects the hosts"
    )


if __name__ == "__main__":
    try:
        print(os.environ.get("SLURM_PROCID", "0"), free_address(os.environ))
    except LaunchError as error:
        raise SystemExit(f"salientpp.launch.free_address: {error}") from None
