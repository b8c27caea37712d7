"""Laws of the sampler that draws on a device: it draws what the host draws, element by element.

The kernels run in Triton's interpreter, and are compiled for GPUs that this machine lacks. test_device_sampler_cuda.py runs them on a GPU.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import triton_interpreter
from device_cases import Case, any_key, assert_drawn_as_on_the_host, random_case, random_graph, rejecting_key, star
from rare import rare
from reference import Stream, join_key, mix64

from salientpp import Graph, ops
from salientpp.sampling import device_draw
from salientpp.sampling.device_draw import DeviceGraph, sample_neighbors
from salientpp.sampling.device_topology import DeviceTopology
from salientpp.sampling.stored import GraphTopology
from salientpp.sampling.topology import DrawOptions

triton = pytest.importorskip("triton")
CPU = torch.device("cpu")

#: Sets of 80 random cases. HYPOTHESIS_PROFILE=nightly runs 10,000 cases, which takes minutes in the interpreter.
SETS = range(125) if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else [0, *rare(*range(1, 13))]


@pytest.fixture
def interpreted():
    with triton_interpreter.interpreted():
        yield


@pytest.mark.parametrize("seed", SETS)
def test_a_device_draws_what_the_host_draws(interpreted, seed):
    generator = np.random.default_rng(seed)
    for _ in range(80):
        assert_drawn_as_on_the_host(random_case(generator, 30, 120, 10, [-1, 0, 1, 2, 2, 3, 3, 5]), CPU)


@pytest.mark.parametrize("fanout", [1, 48, 49, 64, *rare(7, 47, 100, 333, 1024)])
@pytest.mark.parametrize("replace", [False, True])
def test_all_fanouts_draw_what_the_host_draws(interpreted, fanout, replace):
    # The host changes its method above 64 neighbours and above a fanout of 48.
    generator = np.random.default_rng(fanout)
    for degree in (fanout - 1, fanout, fanout + 1, 10_000):
        case = Case(star(degree, 3), torch.tensor([2, 0, 1, 0, 2 + degree]), [fanout], any_key(generator), replace)
        assert_drawn_as_on_the_host(case, CPU)


@pytest.mark.parametrize("fanouts", [[-1], [5, 2], [0, 3], [], [2, -1]], ids=str)
@pytest.mark.parametrize("seeds", [[], [0], [0, 0], [1], [20_001, 0]], ids=str)
def test_long_empty_and_repeated_lists_are_drawn_as_on_the_host(interpreted, seeds, fanouts):
    graph = star(20_000, 2)
    for replace in (False, True) if -1 not in fanouts else (False,):
        assert_drawn_as_on_the_host(Case(graph, torch.tensor(seeds, dtype=torch.int64), fanouts, 9, replace), CPU)


def test_equal_seeds_are_drawn_as_on_the_host(interpreted):
    graph = random_graph(np.random.default_rng(4), 30, 400)
    for vertex in range(0, 30, 4):
        assert_drawn_as_on_the_host(Case(graph, torch.full((300,), vertex), [4, 3], vertex, vertex % 8 == 0), CPU)


@pytest.mark.parametrize("hop", [0, 1])
@pytest.mark.parametrize("draw", [0, 1, 4])
@pytest.mark.parametrize("replace", [False, True])
def test_rejected_draws_are_repeated_as_on_the_host(interpreted, replace, draw, hop):
    # The vertex 0 draws 5 of 1,000 neighbours. Its stream gives 0, which is rejected, as the number `draw`.
    key = rejecting_key(0, draw, hop)
    bound = 1000 if replace else 1000 - 5 + draw + 1
    stream = Stream(mix64(join_key(key % 2**64, hop)))
    values = [stream.next() for _ in range(draw + 1)]
    assert values[-1] == 0 and 2**64 % bound > 0, "the draw must be rejected"
    hubs = star(1000, 2)
    sources, targets = torch.cat([hubs.indices, torch.tensor([0])]), torch.arange(2).repeat_interleave(1000)
    edge_index = torch.stack([sources, torch.cat([targets, torch.tensor([2002])])])  # an edge from 0 to 2002
    graph = Graph.from_edge_index(edge_index, 2003)
    seeds = torch.tensor([1, 0] if hop == 0 else [2002])
    assert_drawn_as_on_the_host(Case(graph, seeds, [5] * (hop + 1), key, replace), CPU)


def test_a_table_serves_one_batch_after_the_other(interpreted):
    generator = np.random.default_rng(3)
    graph = random_graph(generator, 50, 300)
    held = DeviceGraph.of(graph, CPU)
    table = held.new_table()
    for key in range(10):
        seeds = torch.from_numpy(generator.integers(0, 50, size=5))
        want = ops.sample_neighbors(graph.indptr, graph.indices, None, seeds, [3, 2], key)
        n_id, edges, *_ = sample_neighbors(held, table, seeds, [3, 2], key)
        assert torch.equal(n_id, want[0]) and torch.equal(edges[:2], want[1])


@pytest.mark.parametrize("seeds, at, got", [([3, 10], 1, 10), ([-1], 0, -1)])
def test_seeds_out_of_range_give_the_hosts_error(interpreted, seeds, at, got):
    graph = random_graph(np.random.default_rng(0), 10, 20)
    held = DeviceGraph.of(graph, CPU)
    error = rf"seeds\[{at}\] must be in \[0, 10\), got {got}"
    seeds = torch.tensor(seeds)
    with pytest.raises(RuntimeError, match=error):
        ops.sample_neighbors(graph.indptr, graph.indices, None, seeds, [2], 0)
    with pytest.raises(RuntimeError, match=error):
        sample_neighbors(held, held.new_table(), seeds, [2], 0)


def test_batches_that_are_too_large_are_refused_before_they_are_drawn(interpreted):
    held = DeviceGraph.of(star(5), CPU)
    with pytest.raises(ValueError, match=r"draws 0 to 1024 neighbours per vertex, or all \(-1\), got 1025 at hop 1"):
        sample_neighbors(held, held.new_table(), torch.tensor([0]), [2, 1025], 0)
    seeds = torch.zeros(2**20, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="a hop on a device must have fewer than"):
        sample_neighbors(held, held.new_table(), seeds, [1024], 0)


def test_arrays_that_were_altered_on_disk_are_refused(interpreted):
    graph = Graph.trusted(torch.tensor([0, 1, 2]), torch.tensor([1, 7]))
    with pytest.raises(ValueError, match="7"):
        DeviceGraph.of(graph, CPU)


# --- the topology -----------------------------------------------------------------------------------------


def assert_same_samples(one, other) -> None:
    for name in ("node", "row", "col", "edge"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert one.num_sampled_nodes == other.num_sampled_nodes and one.num_sampled_edges == other.num_sampled_edges


def test_a_topology_on_a_device_samples_as_the_graph_on_the_host(interpreted):
    graph = random_graph(np.random.default_rng(5), 60, 500)
    host, device = GraphTopology(graph), DeviceTopology(graph, CPU)
    assert all(one is other for one, other in zip(host.arrays(), device.arrays(), strict=True))
    seeds = {None: torch.arange(0, 60, 7)}
    options = DrawOptions([[4, 3]], replace=True)
    # Threads have tables of their own.
    with ThreadPoolExecutor(3) as threads:
        samples = list(threads.map(lambda key: device.sample(seeds, key, options), range(12)))
    for key, sample in enumerate(samples):
        assert_same_samples(sample, host.sample(seeds, key, options))
    only = device.sample(seeds, 3, options, only_vertices=True)
    assert torch.equal(only.node, host.sample(seeds, 3, options).node) and only.row.numel() == 0


def test_a_topology_on_a_device_samples_after_an_error(interpreted, monkeypatch):
    graph = random_graph(np.random.default_rng(6), 60, 500)
    host, device = GraphTopology(graph), DeviceTopology(graph, CPU)
    seeds, options = {None: torch.arange(20)}, DrawOptions([[4, 3]])
    device.sample(seeds, 0, options)
    with monkeypatch.context() as patch:
        patch.setattr(device_draw, "_find", _fail)  # after the seeds were written to the table
        with pytest.raises(MemoryError):
            device.sample(seeds, 1, options)
    assert_same_samples(device.sample(seeds, 2, options), host.sample(seeds, 2, options))


def _fail(*_):
    raise MemoryError


@pytest.mark.parametrize("wrong", ["disjoint", "induced", "shared"])
def test_a_topology_on_a_device_refuses_other_draws(interpreted, wrong):
    topology = DeviceTopology(random_graph(np.random.default_rng(7), 10, 20), CPU)
    with pytest.raises(ValueError, match=f"a device does not draw with {wrong}=True; sample on the host"):
        topology.sample({None: torch.arange(3)}, 0, DrawOptions([[2]], **{wrong: True}))


# --- compilation ------------------------------------------------------------------------------------------

POINTERS = dict(
    frontier="*i64", indptr="*i64", begin="*i64", degree="*i64", table="*i32", flags="*i64", sums="*i64", owner="*i64", ids="*i64", new="*i64",
    edges="*i64",
)  # fmt: skip


def compiled(kernel, constants: dict, **types: str):
    """Compiles a kernel for an H100. Arguments without a type here are as in ``POINTERS``, or int32."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {**POINTERS, **types, **dict.fromkeys(constants, "constexpr")}
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    return triton.compile(ASTSource(kernel, signature, constants, aligned), target=GPUTarget("cuda", 90, 32)).asm


@pytest.mark.parametrize(
    "places, replace, position",
    [
        (1, False, "*i32"),
        (16, True, "*i64"),
        (1024, False, "*i64"),
        *rare(*(
            (places, replace, position)
            for places in (1, 16, 1024)
            for replace in (False, True)
            for position in ("*i32", "*i64")
            if (places, replace, position) not in ((1, False, "*i32"), (16, True, "*i64"), (1024, False, "*i64"))
        )),
    ],
)  # fmt: skip
def test_draws_compile_for_gpus(places, replace, position):
    from salientpp.sampling import device_kernels

    constants = {"REPLACE": replace, "PLACES": places, "BLOCK": min(128, 4096 // places)}
    assembly = compiled(device_kernels._draw, constants, position=position, key="i64")
    assert "st.global" in assembly["ptx"]


@pytest.mark.parametrize(
    "lists, linked, has_id, has_owner, position",
    [
        ("*i64", True, True, False, "*i32"),
        ("*i64", False, True, True, "*i64"),
        ("*i32", False, False, False, "*i32"),
        *rare(
            ("*i64", True, True, False, "*i64"),
            ("*i64", False, True, True, "*i32"),
            ("*i32", False, False, False, "*i64"),
        ),
    ],
)
def test_the_other_kernels_compile_for_gpus(lists, linked, has_id, has_owner, position):
    from salientpp.sampling import device_kernels as kernels

    types, block = {"position": position, "source": "*i32"}, {"BLOCK": 1024}
    assembly = compiled(kernels._mark, {"LINKED": linked, **block}, lists=lists, **types)
    assert "min.s32" in assembly["ptx"], "one instruction marks the first slot of a source"
    compiled(kernels._flag, block, **types)
    compiled(kernels._finish, {"HAS_OWNER": has_owner, "LINKED": linked, "HAS_ID": has_id, **block}, **types)
    compiled(kernels._read_lists, block)
