# ruff: noqa: E501 (each mutation is one line)
"""Single changes of the package that random cases must find. A reviewer chose them by reading: a wrong offset, a missing wait, a stale copy, a swapped branch.

``python -m random_cases.mutations`` makes each change in a copy of the package and runs random cases against the copy until one fails. A change that no case
finds *survives*; the end of the output lists the survivors. On two cores, a change that is found takes about a minute, and one that survives 5,000 cases
a quarter of an hour or more.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Mutation(NamedTuple):
    """Replacement of ``old`` by ``new``. ``old`` occurs once in the file."""

    cases: str  # "jobs", or the conversion of random models within whose reach the file lies
    file: str
    old: str
    new: str


MUTATIONS = [
    # --- exchange, tiers, rows
    Mutation("jobs", "store/exchange.py", "wanted[self.placement.server_of(part)][place] = count", "wanted[part][place] = count"),
    Mutation("jobs", "store/exchange.py", "column: torch.cat(pieces[place :: len(widths)])", "column: torch.cat(pieces[0 :: len(widths)])"),
    Mutation("jobs", "store/exchange.py", "self.traffic.bytes_sent += tensor.nbytes - to_itself", "self.traffic.bytes_sent += tensor.nbytes"),
    Mutation("jobs", "store/exchange.py", "number = sum(of_rank[place] for of_rank in wanted)", "number = sum(of_rank[place] for of_rank in asked)"),
    Mutation("jobs", "store/exchange.py", "            row = ids - begin\n", "            row = (ids - begin).flip(0)\n"),
    Mutation("jobs", "store/tiers.py", "remote_counts=counts, remote_row=remote_row)", "remote_counts=counts)"),
    Mutation("jobs", "store/tiers.py", "IdSet.of(ids, self.book.size_of(self.part_id))", "IdSet.of(ids.flip(0), self.book.size_of(self.part_id))"),
    Mutation("jobs", "store/fetch.py", "n_id[type_][:num_seeds] - begin)", "n_id[type_][-num_seeds:] - begin)"),
    Mutation("jobs", "store/fetch.py", "    if repeats:\n        places =", "    if False:\n        places ="),
    Mutation("jobs", "store/row_buffer.py", "        self._slot_of[self._row_of[slots]] = -1\n", ""),
    Mutation("jobs", "store/row_buffer.py", "places[~is_here][order]", "places[~is_here]"),
    Mutation("jobs", "store/row_buffer.py", "            slots = slots[order]\n", ""),
    Mutation("jobs", "store/row_buffer.py", "= missing, 1, 0", "= missing.flip(0), 1, 0"),
    # --- ranks
    Mutation("jobs", "ranks/mail.py", "torch.cat(self._pieces[place :: self.num_letters])", "torch.cat(self._pieces[0 :: self.num_letters])"),
    Mutation("jobs", "ranks/placement.py", "return logical_rank % self.logical_ranks_per_unit", "return 0"),
    Mutation("jobs", "ranks/placement.py", "first, last = self.unit_of(logical_ranks[0]), self.unit_of(logical_ranks[-1])", "first = last = self.unit_of(logical_ranks[0])"),
    # --- seeds, epochs, states
    Mutation("jobs", "sampling/schedule.py", "Turn(ticks.stop - len(pieces) + at, index, [piece])", "Turn(ticks.stop - len(pieces) + at, at, [piece])"),
    Mutation("jobs", "sampling/schedule.py", "self.positions[schedule.unit][given[index]] if self.positions", "given[index] if self.positions"),
    Mutation("jobs", "engine/epochs.py", "self.placement.logical_ranks[0] if logical_rank is None else logical_rank", "self.placement.logical_ranks[0]"),
    Mutation("jobs", "engine/state.py", "return first, min(point.start for point", "return first, max(point.start for point"),
    Mutation("jobs", "engine/seeds.py", "input_id = stored.edge_id if input_id is None else input_id", "input_id = stored.edge_id"),
    Mutation("jobs", "engine/run.py", "if placed is None or tick < placed.tick:", "if placed is None:"),
    Mutation("jobs", "engine/run.py", "        if self._left:\n            self._end()  #", "        if False:\n            self._end()  #"),
    Mutation("jobs", "loader/bookmark.py", "resume = Resume(found.batches, order.round_after(found.batches))", "resume = Resume(found.batches + 1, order.round_after(found.batches))"),
    Mutation("jobs", "loader/bookmark.py", "self.epochs.order = order = order.with_seed(found.seed)", "self.epochs.order = order"),
    # --- stages
    Mutation("jobs", "engine/stages.py", "plan, asks = self.fetch.plan(places), {**state.asks, **places}", "plan, asks = self.fetch.plan(places), {**places, **state.asks}"),
    Mutation("jobs", "engine/stages.py", "            way.on_waiting(request.draws, request.index, sampled.places)\n", "            pass\n"),
    Mutation("jobs", "engine/stages.py", "places=places, plan=plan, asks=asks", "plan=plan, asks=asks"),
    Mutation("jobs", "engine/stages.py", "if contents is not None and not self.builder.is_current(sampled.contents, contents):", "if False:"),
    # --- batches
    Mutation("jobs", "batch/template.py", "storage_of(out, type_).num_nodes = of_type(mfg.node, type_).numel()", "storage_of(out, type_).num_nodes = len(of_type(mfg.node, type_)) + 1"),
    Mutation("jobs", "batch/template.py", "for (owner, name), value in rows.items() if owner == type_}", "for (owner, name), value in rows.items()}"),
    Mutation("jobs", "batch/attributes.py", "return torch.sparse_csr_tensor(indptr, row[order], values[order]", "return torch.sparse_csr_tensor(indptr, row[order], values"),
    Mutation("jobs", "loader/padding.py", "            rest.fill_(-1)\n", "            rest.zero_()\n"),
    # --- topologies in parts
    Mutation("jobs", "sampling/held_lists.py", "shift = self.first_edge - self.first_row", "shift = 0"),
    Mutation("jobs", "sampling/held_lists.py", "for _, drawn in groups])[order] for name in names}", "for _, drawn in groups]) for name in names}"),
    Mutation("jobs", "sampling/part_topology.py", "remote[part] = at, of_part - book.range_of(part)[0]", "remote[part] = at, of_part - book.range_of(0)[0]"),
    Mutation("jobs", "sampling/part_topology.py", "            ids = row + int(bounds[0])\n", "            ids = row\n"),
    Mutation("jobs", "sampling/part_topology.py", "            if drawn.rows:\n                        batch.arrived[number].append(drawn)\n", "            if False:\n                        batch.arrived[number].append(drawn)\n"),
    Mutation("jobs", "sampling/growing_batch.py", "        self.first = size\n", ""),
    Mutation("jobs", "sampling/growing_batch.py", "        return position\n    return torch.arange", "        return position\n    return position if position is not None else torch.arange"),
    Mutation("jobs", "sampling/requests.py", "return (1, window) if isinstance(window, int)", "return (1, int(window)) if isinstance(window, (int, float))"),
    Mutation("jobs", "sampling/in_rounds.py", "{part: of_part[part][at] for part in own} for at, own", "{part: of_part[part][0] for part in own} for at, own"),
    # --- ways
    Mutation("jobs", "ways/cache.py", "scores = _scores_beside(self.scores(basis), tiers)", "scores = self.scores(basis)"),
    Mutation("jobs", "ways/sums/plan.py", "    summed = summed_edge + first_edge\n", "    summed = summed_edge\n"),
    Mutation("jobs", "ways/lookahead/planner.py", "            room -= found.nbytes\n", ""),
    # --- trimmed models
    Mutation("trim", "nn/rules.py", "isinstance(each, int) and each % ndim != op.lead", "isinstance(each, int) and each != op.lead"),
    Mutation("trim", "nn/rules.py", '"clone _to_copy', '"clone flip roll _to_copy'),
    Mutation("trim", "nn/rules.py", 'and not op.named.get("training", False)', ""),
    Mutation("trim", "nn/rules.py", "and int(first.max()) < op.num_seeds", "and int(first.min()) < op.num_seeds"),
    Mutation("trim", "nn/layer_call.py", "    if change_of(conv) is not None or change_inside(conv) is not None:\n        return False\n", ""),
    Mutation("trim", "nn/layer_call.py", "num_edges = hops.edges_into(self.relation, call.in_hops - 1)", "num_edges = hops.edges_into(self.relation, max(0, call.in_hops - 2))"),
    Mutation("trim", "nn/run.py", "        least = min(counts)\n", "        least = max(counts)\n"),
    Mutation("trim", "nn/kernel_products.py", "(_divided(grad, lists, number) if mean else grad).contiguous()", "grad.contiguous()"),
    Mutation("trim", "nn/kernel_products.py", "        grad[:number] += first\n", "        grad[:number] = first\n"),
    Mutation("trim", "nn/kernel_products.py", "return None, product - out * take_targets(lists, sums, num_targets), None", "return None, product - take_targets(lists, sums, num_targets), None"),
    # --- inference and full-graph training
    Mutation("inferred", "layerwise/normalisation.py", "weight = factor[edge_index[0]] * weight * factor[edge_index[1]]", "weight = factor[edge_index[1]] * weight * factor[edge_index[1]]"),
    Mutation("inferred", "layerwise/products.py", "return before[indptr], place[is_inside] - begin", "return before[indptr], place[is_inside]"),
    Mutation("distributed", "fullgraph/normalise.py", "return index, root[index[0]] * weight * root[index[1]]", "return index, root[index[1]] * weight * root[index[1]]"),
    Mutation("distributed", "fullgraph/normalise.py", "variance = total((own - mean).square().sum(0), graph.averaging)", "variance = total((own - own.mean(0)).square().sum(0), graph.averaging)"),
    Mutation("distributed", "fullgraph/product.py", "    is_needed = depths[target] > hop.level\n", "    is_needed = depths[target] > hop.level + 1\n"),
]  # fmt: skip


def outcome(mutation: Mutation, cases: int) -> tuple[bool, str]:
    """Runs cases against the changed package until one fails. Returns True and the failing case, or False.

    Raises:
        ValueError: the case fails against the package as it is, too.
    """
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "salientpp"
        shutil.copytree(ROOT / "salientpp", package, ignore=shutil.ignore_patterns("__pycache__"))
        path = package / mutation.file
        text = path.read_text()
        if text.count(mutation.old) != 1:
            raise ValueError(f"{mutation.file} must have {mutation.old!r} once, got {text.count(mutation.old)} times")
        path.write_text(text.replace(mutation.old, mutation.new))
        found, last = _first_failure(mutation.cases, folder, 0, cases)
    seed = re.match(r"seed (\d+)", found or "")
    if seed is not None and _first_failure(mutation.cases, str(ROOT), int(seed[1]), 1)[0] is not None:
        raise ValueError(f"case {seed[1]} fails without a change, too; mend that first: {found}")
    return found is not None, f"{time.monotonic() - begun:5.0f} s  {(found or last)[:160]}"


def _first_failure(kind: str, folder: str, first: int, cases: int) -> tuple[str | None, str]:
    """Runs cases against the package in a folder until one fails. Returns the line of the failure, or None, and the last line."""
    of_kind = ["--kind", "jobs"] if kind == "jobs" else ["--kind", "models", "--target", kind]
    command = [
        sys.executable, "-W", "ignore", "-m", "random_cases.run", *of_kind, "--first", str(first), "--cases", str(cases)
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=ROOT / "tests", env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:  # fmt: skip
        assert process.stdout is not None
        last, found = "", None
        for line in process.stdout:
            last = line.strip() or last
            if line.startswith("seed"):
                found = line.strip()
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return found or (last if process.returncode > 0 else None), last  # the package may not even be imported


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of mutations")
    given = parser.parse_args(arguments)
    chosen = [(number, each) for number, each in enumerate(MUTATIONS) if given.only is None or number in given.only]
    survivors = []
    with ThreadPoolExecutor(given.at_once) as pool:
        runs = [(number, each, pool.submit(outcome, each, given.cases)) for number, each in chosen]
        for number, each, run in runs:
            found, text = run.result()
            print(f"{number:3d} {'found   ' if found else 'SURVIVED'} {each.file}: {text}", flush=True)
            survivors += [] if found else [number]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} found; survivors: {survivors or 'none'}")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
