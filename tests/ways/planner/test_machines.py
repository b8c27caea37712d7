"""Laws of the file of constants: it returns what was written, knows links by name, and refuses wrong entries with the name of the file."""

from __future__ import annotations

import json

import pytest

from salientpp.ways.planner.machines import COPIES, LINKS, Link, Machines, Step

WHOLE = Machines(
    between=Link(1.5e9, 3e-5), within=Link(4e9, 2e-5), cores=3.5, to_device=2e10, draw=2e-8, row=3e-9, byte=1e-10, wire=5e-10, batch=2e-3,
    look_ahead=3e-7, sum=4e-7, step=Step(0.01, 0.04, 5000.0, 1e6), price=1.25, about={"ranks": 4, "num_neighbors": [15, 10, 5]},
)  # fmt: skip


def test_a_file_returns_the_constants_that_were_written(tmp_path):
    for machines in (WHOLE, Machines(LINKS["10GbE"])):
        machines.write(tmp_path / "machines.json")
        assert Machines.read(tmp_path / "machines.json") == machines


def test_a_file_may_name_links_and_copies_and_leave_out_constants(tmp_path):
    (tmp_path / "m.json").write_text(json.dumps({"between": "25GbE", "to_device": "PCIe 4.0 x16"}))
    found = Machines.read(tmp_path / "m.json")
    assert found == Machines(Link(25e9 / 8, 5e-5), to_device=COPIES["PCIe 4.0 x16"])
    given = {"between": {"bytes_per_second": 1e9}, "step": {"seconds": 0.5}}
    assert Machines.of(given, "here") == Machines(Link(1e9), step=Step(0.5))


ERRORS = {
    "no file of constants": ([1], "m must hold a JSON object with the constants of the machines, got [1]"),
    "a later format": ({"format": 2}, "m has format 2, but this version reads format 1; run salientpp calibrate again"),
    "an unknown entry": (
        {"between": "1GbE", "speed": 1},
        "m has an unknown entry 'speed'; entries are between, within, cores, to_device, draw,",
    ),
    "no link": ({"cores": 2}, "m must have an entry 'between' (the link between hosts), and it has none"),
    "an unknown link": (
        {"between": "2GbE"},
        "between in m must be numbers, or one of 1GbE, 10GbE, 25GbE, 100GbE, InfiniBand HDR, InfiniBand NDR, got '2GbE'",
    ),
    "an unknown copy": (
        {"between": "1GbE", "to_device": "USB"},
        "to_device in m must be numbers, or one of PCIe 3.0 x16, PCIe 4.0 x16, PCIe 5.0 x16, got 'USB'",
    ),
    "a link without a rate": (
        {"between": {"delay": 1}},
        "between in m must be an object with the entries bytes_per_second, delay (needed: bytes_per_second), got {'delay': 1}",
    ),
    "a link that carries nothing": (
        {"between": {"bytes_per_second": 0}},
        "bytes_per_second of between in m must be > 0, got 0",
    ),
    "a negative number": ({"between": "1GbE", "draw": -1}, "draw in m must be a number >= 0, got -1"),
    "a text": ({"between": "1GbE", "price": "2"}, "price in m must be a number >= 0, got '2'"),
    "no cores": ({"between": "1GbE", "cores": 0}, "cores in m must be > 0, got 0"),
    "a wrong step": (
        {"between": "1GbE", "step": {"seconds": 1, "minutes": 2}},
        "step in m must be an object with the entries seconds, cpu_seconds, edges, gradient_bytes (needed: seconds), got ",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_a_wrong_entry_is_refused_by_name(case):
    given, text = ERRORS[case]
    with pytest.raises(ValueError) as raised:
        Machines.of(given, "m")
    assert str(raised.value).startswith(text)


def test_a_file_that_is_no_json_is_refused_by_name(tmp_path):
    (tmp_path / "m.json").write_text("cores = 2")
    with pytest.raises(
        ValueError, match=r"m.json must be a JSON file as salientpp calibrate writes it, but it cannot be read"
    ):
        Machines.read(tmp_path / "m.json")
    with pytest.raises(OSError, match="missing.json"):
        Machines.read(tmp_path / "missing.json")
