"""Check of the network interface over which gloo connects ranks."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import Mapping
from typing import Any

from salientpp.cli.checks.finding import Finding, Machine
from salientpp.launch.environment import LaunchError, detect
from salientpp.launch.interfaces import address_of

#: Interfaces of containers, virtual machines and tunnels, which reach no other host, or reach it slowly.
_VIRTUAL = re.compile(r"(docker|br-|veth|cni|virbr|vnet|tun|tap|wg|podman|lxc|lxd|flannel|cali).*")


def check_network(machine: Machine) -> Finding:
    """Finds the interface that gloo chooses: the one of GLOO_SOCKET_IFNAME, or the one to whose address the host name resolves."""
    there = {name: _facts(machine, name) for name in machine.names("sys/class/net") or _names_of_system()}
    up = [name for name, facts in there.items() if name != "lo" and _is_up(facts)]
    up.sort(  # stable, so names stay in order; a bond has no device, and its members have no address
        key=lambda name: (
            bool(_VIRTUAL.fullmatch(name)),
            there[name]["address"] is None,
            not (machine.root / "sys/class/net" / name / "device").exists(),
        )
    )
    named = [name for name in machine.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    values: dict[str, Any] = {"interfaces": there, "GLOO_SOCKET_IFNAME": ",".join(named) or None}
    if there and (missing := [name for name in named if name not in there]):
        problem = f"Set GLOO_SOCKET_IFNAME to one of {', '.join(there)}: this machine has no {', '.join(missing)}."
        return Finding(f"gloo looks for {', '.join(missing)}, which is missing", values, problems=[problem])
    if named:
        address = there[named[0]]["address"] if there else None
        reason = "GLOO_SOCKET_IFNAME is lo" if named == ["lo"] else ""
    else:
        address, reason = address_of_host_name()
    on = named or [name for name, facts in there.items() if facts["address"] == address]
    words = " ".join(on) or ("lo" if _is_loopback(str(address)) else "an interface")
    text = f"gloo uses {words}" + (f" at {address}" if address else "") + (f", because {reason}" if reason else "")
    if up:
        text += f"; connected: {', '.join(f'{name}{_speed(there[name])}' for name in up)}"
    values["address"] = address
    if not reason:
        return Finding(text, values)
    usable = next(iter(up), "NAME")
    advice = f"GLOO_SOCKET_IFNAME={usable} on every host (or the interface that reaches the other hosts): {reason}, so ranks of other hosts"
    if _on_several_hosts(machine):
        return Finding(text, values, problems=[f"Set {advice} cannot connect, and the job hangs."])
    return Finding(
        text, values, notes=[f"Before a job on several hosts, set {advice} could not connect, and the job would hang."]
    )


def address_of_host_name() -> tuple[str, str]:
    """Returns the first address of this host's name that a socket can bind, and a text that says why other machines cannot reach it, or ""."""
    try:
        entries = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the latter for a name that no address can have, such as one with an empty label
        return "127.0.0.1", "the host name does not resolve to an address"
    for family, kind, protocol, _, place in entries:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(place)
        except OSError:
            continue
        address = str(place[0])
        return address, f"the host name resolves to {address}" if _is_loopback(address) else ""
    return "127.0.0.1", "the host name resolves to addresses of other machines only"


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _names_of_system() -> list[str]:
    """Returns the names of network interfaces from the system, where /sys cannot be read. Empty if the system does not tell them."""
    with contextlib.suppress(OSError, AttributeError):
        return sorted(name for _, name in socket.if_nameindex())
    return []


def _is_up(facts: Mapping[str, str | int | None]) -> bool:
    return facts["address"] is not None if facts["state"] is None else facts["state"] in ("up", "unknown")


def _facts(machine: Machine, name: str) -> Mapping[str, str | int | None]:
    speed = machine.read(f"sys/class/net/{name}/speed")
    return {
        "state": machine.read(f"sys/class/net/{name}/operstate") or None,
        "megabits": int(speed) if speed.isdecimal() else None,
        "address": address_of(name) or None,
    }


def _speed(facts: Mapping[str, str | int | None]) -> str:
    megabits = facts["megabits"]
    return f" ({int(megabits) / 1000:g} Gbit/s)" if megabits else ""


def _on_several_hosts(machine: Machine) -> bool:
    try:
        launch = detect(machine.environ)
    except LaunchError:
        return False
    return launch.ranks_per_host < launch.world_size
