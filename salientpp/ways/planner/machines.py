"""Constants of the machines of a job: the rates and seconds from which the planner predicts an epoch.

``salientpp calibrate`` measures them and writes a JSON file. A file may also be written by hand, for machines that are not available yet. All seconds
are seconds of one thread. All ranks compute and communicate at the same time while the constants are measured, because they do so in training.
"""

from __future__ import annotations

import dataclasses
import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from salientpp.arguments import as_real
from salientpp.files import write_whole

#: Version of the JSON file.
FORMAT = 1

#: Largest constant. Its reciprocal is the smallest one besides 0, so that products and ratios stay finite.
_MOST = 1e18


@dataclass(frozen=True)
class Link:
    """Connection of a rank to ranks of other hosts, or to ranks of its own host.

    Attributes:
        bytes_per_second: rate at which a rank receives rows while it sends equally many, and all ranks exchange rows.
        delay: seconds of an exchange between all ranks that carries almost no bytes.
    """

    bytes_per_second: float
    delay: float = 0.0


#: Links by name, with the rate of their data sheets. A file may name a link instead of giving its numbers. Delays are round trips in one room, between
#: 10 and 100 microseconds. They depend more on the software than on the link.
LINKS: Mapping[str, Link] = {
    "1GbE": Link(1e9 / 8, 1e-4),  # IEEE 802.3ab: 1 Gbit/s
    "10GbE": Link(10e9 / 8, 5e-5),  # IEEE 802.3ae: 10 Gbit/s
    "25GbE": Link(25e9 / 8, 5e-5),  # IEEE 802.3by: 25 Gbit/s
    "100GbE": Link(100e9 / 8, 3e-5),  # IEEE 802.3ba: 100 Gbit/s
    "InfiniBand HDR": Link(200e9 / 8, 1e-5),  # InfiniBand Trade Association, roadmap: 200 Gbit/s for four lanes
    "InfiniBand NDR": Link(400e9 / 8, 1e-5),  # the same roadmap: 400 Gbit/s for four lanes
}

#: Bytes per second from host to device, by name.
COPIES: Mapping[str, float] = {
    "PCIe 3.0 x16": 15.75e9,  # PCI-SIG: 8 GT/s, 128b/130b, 16 lanes
    "PCIe 4.0 x16": 31.5e9,  # PCI-SIG: 16 GT/s
    "PCIe 5.0 x16": 63.0e9,  # PCI-SIG: 32 GT/s
}


@dataclass(frozen=True)
class Step:
    """A training step of the user's model.

    Attributes:
        seconds: time of a step, without its loader, on all ranks at once. With gradients that are averaged over the ranks, it includes the exchange.
        cpu_seconds: CPU time of a step, of all threads.
        edges: mean number of edges in the batches of these steps. The time of a batch is taken to be proportional to its edges.
        gradient_bytes: bytes that a rank receives in a step to average gradients.
    """

    seconds: float
    cpu_seconds: float = 0.0
    edges: float = 0.0
    gradient_bytes: float = 0.0


@dataclass(frozen=True)
class Machines:
    """Constants of the machines of a job. All except ``between`` have defaults, which were measured on a server of 2024.

    Attributes:
        between, within: links between hosts, and between the ranks of a host.
        cores: number of cores that a rank gets while all ranks compute.
        to_device: bytes per second from the host's memory to the device; 0: no device.
        draw: seconds per sampled edge.
        row, byte: seconds per gathered row, and per byte of it.
        wire: seconds per byte of rows that is sent or received.
        batch: seconds per batch, for all steps whose time does not depend on the batch's size.
        look_ahead: seconds per vertex of a batch, to decide which rows a lookahead cache keeps.
        sum: seconds per edge of the last hop, to choose and to compute sums.
        step: the training step; None: only loading is planned.
        price: price of a host per hour, in any currency; None: unknown.
        about: where the constants come from: date, versions, ranks.
    """

    between: Link
    within: Link = Link(5e9, 1e-5)
    cores: float = 1.0
    to_device: float = 0.0
    draw: float = 1e-7
    row: float = 5e-8
    byte: float = 2e-10
    wire: float = 4e-10
    batch: float = 1.5e-3
    look_ahead: float = 1e-7
    sum: float = 3e-7
    step: Step | None = None
    price: float | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    def loading(self, batches: float, vertices: float, gathered: float, moved: float) -> float:
        """Returns the seconds that one thread takes to load batches after they were drawn.

        Args:
            vertices: number of their vertices.
            gathered: bytes of rows that are gathered for these batches and for other ranks.
            moved: bytes that are sent and received.
        """
        return self.batch * batches + self.row * vertices + self.byte * gathered + self.wire * moved

    @classmethod
    def read(cls, path: str | Path) -> Machines:
        """Reads constants from a JSON file.

        Raises:
            ValueError: the file is no JSON, lacks ``between``, or has an unknown name or a wrong value. The text names the file and the entry.
            OSError: the file cannot be read.
        """
        try:
            given = json.loads(Path(path).read_text())
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{path} must be a JSON file as salientpp calibrate writes it, but it cannot be read: {error}"
            ) from None
        return cls.of(given, str(path))

    @classmethod
    def of(cls, given: Any, where: str) -> Machines:
        """Makes constants from the values of a JSON file. ``where`` names the source in errors; see :meth:`read`."""
        if not isinstance(given, Mapping):
            raise ValueError(
                f"{where} must hold a JSON object with the constants of the machines, got {reprlib.repr(given)}"
            )
        values = {name: value for name, value in given.items() if name != "format"}
        if given.get("format", FORMAT) != FORMAT:
            raise ValueError(
                f"{where} has format {reprlib.repr(given['format'])}, but this version reads format {FORMAT}; run salientpp calibrate again"
            )
        names = [each.name for each in dataclasses.fields(cls)]
        for name in values:
            if name not in names:
                raise ValueError(f"{where} has an unknown entry {reprlib.repr(name)}; entries are {', '.join(names)}")
        if "between" not in values:
            raise ValueError(f"{where} must have an entry 'between' (the link between hosts), and it has none")
        for name in ("between", "within"):
            if name in values:
                values[name] = _link(values[name], f"{name} in {where}")
        if isinstance(values.get("to_device"), str):
            values["to_device"] = _named(COPIES, values["to_device"], f"to_device in {where}")
        if values.get("step") is not None:
            values["step"] = _numbers(Step, values["step"], ["seconds"], f"step in {where}")
        if values.get("price") is None:
            values.pop("price", None)
        others = ("between", "within", "step", "about")
        numbers = {name: _number(value, f"{name} in {where}") for name, value in values.items() if name not in others}
        if not isinstance(values.get("about", {}), Mapping):
            raise ValueError(
                f"about in {where} must be an object that says where the constants come from, got {reprlib.repr(values['about'])}"
            )
        if numbers.get("cores", 1.0) == 0:
            raise ValueError(f"cores in {where} must be > 0, got 0")
        return cls(**{**values, **numbers})

    def to_dict(self) -> dict[str, Any]:
        """Returns the constants as JSON values, which :meth:`of` reads."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    def write(self, path: str | Path) -> None:
        text = json.dumps(self.to_dict(), indent=1) + "\n"
        write_whole(Path(path), lambda file: file.write(text.encode()))


def _link(given: Any, where: str) -> Link:
    if isinstance(given, str):
        return _named(LINKS, given, where)
    found = _numbers(Link, given, ["bytes_per_second"], where)
    if found.bytes_per_second == 0:
        raise ValueError(f"bytes_per_second of {where} must be > 0, got 0")
    return found


def _named(table: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in table:
        raise ValueError(f"{where} must be numbers, or one of {', '.join(table)}, got {reprlib.repr(name)}")
    return table[name]


def _numbers(kind: Any, given: Any, needed: list[str], where: str) -> Any:
    """Makes a :class:`Link`, a :class:`Step` or another ``kind`` from JSON values, which must be numbers >= 0."""
    names = [each.name for each in dataclasses.fields(kind)]
    if (
        not isinstance(given, Mapping)
        or any(name not in names for name in given)
        or any(name not in given for name in needed)
    ):
        raise ValueError(
            f"{where} must be an object with the entries {', '.join(names)} (needed: {', '.join(needed)}), got {reprlib.repr(given)}"
        )
    return kind(**{name: _number(value, f"{name} of {where}") for name, value in given.items()})


def _number(given: Any, where: str) -> float:
    number = as_real(given)
    if (number is None and not isinstance(given, int)) or (number is not None and number < 0):
        raise ValueError(f"{where} must be a number >= 0, got {reprlib.repr(given)}")
    if number is None or not (number == 0 or 1 / _MOST <= number <= _MOST):
        raise ValueError(
            f"{where} must be a number >= 0 (0, or from {1 / _MOST:g} to {_MOST:g}), got {reprlib.repr(given)}"
        )
    return number
