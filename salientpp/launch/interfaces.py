"""Finds the addresses by which other hosts can reach this one: those of a network interface, or of a host name."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct

#: Linux's request for the address of an interface.
_SIOCGIFADDR = 0x8915


def address_of(interface: str) -> str:
    """Returns the IPv4 address of a network interface; '' if it has none, or does not exist."""
    import fcntl  # not available on every system

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", os.fsencode(interface)[:15]))
        return socket.inet_ntoa(answer[20:24])
    return ""


def addresses_of(name: str) -> list[str]:
    """Returns the addresses of a host name, except those that other hosts cannot reach."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    addresses = dict.fromkeys(str(entry[4][0]) for entry in found)
    return [
        address
        for address in addresses
        if not (ip := ipaddress.ip_address(address.partition("%")[0])).is_loopback and not ip.is_link_local
    ]
