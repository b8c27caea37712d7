"""Laws of the verdict: each cause is named where it is, with its rank, and nowhere else."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from traces import Times, ranks_of

from salientpp.display import exact_bytes, round_up
from salientpp.report.causes import FEW, verdict_of
from salientpp.report.finding import seconds
from salientpp.report.own_work import uneven
from salientpp.report.parts import PARTS, Job, Rank, transfer_of

FAST = Times()
#: Cached rows, and the remote rows that such a cache leaves.
FORECAST = [[0, 200_000], [1000, 180_000], [20_000, 120_000], [60_000, 60_000], [300_000, 1000]]
#: Numbers of a process that has all rows and draws and takes them in its loop.
ALONE = {
    "batches": 20, "seconds": 10, "wait.seconds": 6, "step.seconds": 4, "work.draw.seconds": 0.5, "work.gather.seconds": 5,
    "stage.sample.seconds": 0.5, "stage.gather_host_rows.seconds": 5, "stage.assemble.seconds": 0.5, "bytes.host": 1e8,
}  # fmt: skip
BYTES = Times(received=3e7, network=0.3, speed=1e8)


def links(ranks: int, slow: dict[tuple[int, int], float]) -> dict:
    """Description of ranks whose links give 1 GB/s, except some."""
    pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    return {"links": [[a, b, slow.get((a, b), 1e9)] for a, b in pairs]}


def with_links(ranks: int, slow: dict[tuple[int, int], float]) -> list[Times]:
    return [Times(received=3e7, network=0.3, about=links(ranks, slow))] * ranks


def ring(ranks: int, slow: dict[tuple[int, int], float]) -> list[Times]:
    """Ranks of which only the links to the next were measured."""
    speeds = [[a, (a + 1) % ranks, slow.get((a, a + 1), 1e9)] for a in range(ranks)]
    return [Times(received=3e7, network=0.3, about={"links": speeds})] * ranks


#: Name -> ranks, cause, rank that is named, a part of the advice.
CASES = {
    "transform of one rank": ([FAST, Times(transform=0.3), FAST], "transform", 1, "before training"),
    "transform of every rank": ([Times(transform=0.3)] * 3, "transform", None, "before training"),
    "transform without other ranks": ([Times(transform=0.3)], "transform", None, "before training"),
    "sampling": ([Times(sample=0.2)] * 2, "sampling", None, "`num_workers=2` instead of 1"),
    "sampling of one rank": ([Times(sample=0.3), FAST], "sampling", 0, "`num_workers=2`"),
    "rows of one rank": ([FAST, Times(rows=0.3)], "rows", 1, "salientpp copy-to-disk"),
    "rows of every rank": ([Times(rows=0.3)] * 2, "rows", None, '`read_ahead="2GiB"`'),
    "links of one rank": ([BYTES, Times(received=3e7, network=0.3, speed=1e7), BYTES], "slow_link", 1, "salientpp doctor"),
    "sending of one rank": (with_links(3, {(2, 0): 1e7, (2, 1): 1e7}), "slow_link", 2, "another host"),
    "receiving of one rank": (with_links(4, {(a, 2): 1e7 for a in (0, 1, 3)}), "slow_link", 2, "another host"),
    "both directions of one rank in a ring": (ring(10, {(3, 4): 1e7, (4, 5): 1e7}), "slow_link", 4, "another host"),
    "one of two directions": (with_links(2, {(1, 0): 1e7}), "slow_link", 1, "another host"),
    "small cache": ([Times(**{**vars(BYTES), "about": {"cache_forecast": FORECAST}})] * 3, "small_cache", None, '`memory="31MB"`'),
    "many bytes": ([BYTES] * 3, "many_bytes", None, "`send_as`"),
    "messages": ([Times(received=3e5, network=0.3, speed=1e8)] * 3, "messages", None, "larger `batch_size`"),
    "batches of one rank": ([FAST, Times(batches=80), FAST], "uneven", 1, "partition"),
    "slow machine": ([FAST, Times(train=0.25, transform=0.08, sample=0.05, rows=0.05), FAST], "uneven", 1, "salientpp doctor"),
    "training step": ([Times(train=0.4)] * 3, "training_step", None, "salientpp.nn.trim(model)"),
    "nothing": ([FAST], "training_step", None, "salientpp.nn.trim(model)"),
}  # fmt: skip


@pytest.mark.parametrize("sync", ["loader", "step"])
@pytest.mark.parametrize("case", CASES)
def test_the_cause_of_a_long_epoch_is_named_and_no_other(case, sync):
    """Ranks wait for slower ones in the loader, or in the training step."""
    ranks, cause, rank, advice = CASES[case]
    job = Job.of(ranks_of(ranks, sync))
    verdict = verdict_of(job)
    first = verdict.findings[0]
    assert (first.cause, first.rank) == (cause, rank), verdict
    assert len(verdict.sentences) == 3 and advice in verdict.sentences[1]
    assert (f"ank {rank}" in verdict.sentences[0]) == (rank is not None)
    # A slow machine is slow in all its work, and the parts of this work are smaller findings.
    others = {finding.cause for finding in verdict.findings} - {cause}
    assert not others or case in ("slow machine",), verdict


def test_a_slow_step_of_one_rank_is_told_where_others_wait_in_the_loader():
    ranks = [FAST, Times(train=0.4), FAST]
    verdict = verdict_of(Job.of(ranks_of(ranks)))
    assert (verdict.findings[0].cause, verdict.findings[0].rank) == ("uneven", 1)
    assert "its training step takes 0.39 s a batch, that of the others 98 ms" in verdict.sentences[0]
    # Where they wait in the step, all steps take as long.
    assert verdict_of(Job.of(ranks_of(ranks, "step"))).findings[0].cause == "training_step"


def test_several_slow_ranks_are_named_together():
    slow = Times(transform=0.3)
    verdict = verdict_of(Job.of(ranks_of([FAST, slow, FAST, slow])))
    assert verdict.sentences[0].startswith("Ranks 1 and 3 are the slowest: the `transform` takes 0.3 s")
    assert verdict.findings[0].expected == pytest.approx(4.3, abs=0.1)


def test_the_second_cause_is_told_if_it_is_nearly_as_large():
    near = verdict_of(Job.of(ranks_of([Times(transform=0.2, sample=0.18)])))
    assert [finding.cause for finding in near.findings] == ["transform", "sampling"]
    assert "Nearly as large: waiting for sampled batches" in " ".join(near.sentences)
    far = verdict_of(Job.of(ranks_of([Times(transform=0.2, sample=0.09)])))
    assert [finding.cause for finding in far.findings] == ["transform", "sampling"]
    assert len(far.sentences) == 3


def test_two_causes_that_hide_each_other_are_told_together():
    """Rank 0 waits for sampled batches as long as rank 1 runs its transform. Without one of them, the epoch is as long."""
    verdict = verdict_of(Job.of(ranks_of([Times(sample=0.3), Times(transform=0.3)])))
    (finding,) = verdict.findings
    assert finding.cause == "together" and finding.expected == pytest.approx(4.3, abs=0.2)
    for words in ("Two causes hide each other. Rank", "its `transform` takes 0.3 s", "Change both.", "`num_workers=2`"):
        assert words in " ".join(verdict.sentences)


def test_waiting_for_many_small_reasons_names_them():
    """Parts of two ranks take 6 to 8 per cent each. Two changes together save 15 per cent, and one change of a tenth is not there."""
    small = Times(train=0.2, transform=0.02, sample=0.02, rows=0.015)
    verdict = verdict_of(Job.of(ranks_of([small] * 2)))
    assert [finding.cause for finding in verdict.findings] == ["together"]
    ranks = ranks_of([Times(train=0.2, transform=0.007, sample=0.007, rows=0.034)] * 2)
    for rank in ranks:
        rank.numbers["bytes.host"] = 1e12  # rows come from memory
    verdict = verdict_of(Job.of(ranks))
    assert [finding.cause for finding in verdict.findings] == ["nothing_alone"] and len(verdict.sentences) == 2
    assert "for several reasons. A batch needs: taking rows 35 ms, transform 7 ms" in verdict.sentences[0]


def test_few_batches_name_the_largest_part_as_a_probable_cause():
    job = Job.of(ranks_of([Times(transform=0.3, batches=FEW - 1), Times(batches=FEW - 1)]))
    verdict = verdict_of(job)
    assert verdict.sentences == [
        "An epoch of 9 batches a rank is too short for a sure answer; the largest part is probably `transform`: 0.3 s of 0.4 s a batch on rank 0.",
        "Train more epochs, or use a smaller `batch_size` for this measurement: a sure answer needs 10 batches or more after the first epoch.",
    ]
    assert not verdict.findings
    assert verdict_of(job, 2).findings[0].cause == "transform"  # means of two epochs
    assert verdict_of(Job.of(ranks_of([Times(transform=0.3, batches=FEW)]))).findings
    one = verdict_of(Job.of(ranks_of([Times(batches=1)]))).sentences[0]
    assert one.startswith("An epoch of 1 batch a rank is")


@pytest.mark.parametrize("sync", ["loader", "step"])
@pytest.mark.parametrize("case", CASES)
def test_parts_of_each_rank_add_up_to_its_seconds(case, sync):
    ranks = ranks_of(CASES[case][0], sync)
    job = Job.of(ranks)
    for rank, parts in zip(ranks, job.parts):
        assert [*parts] == [*PARTS] and min(parts.values()) >= 0
        assert sum(parts.values()) == pytest.approx(rank.of("seconds"))
    assert job.expected() == job.seconds


def test_the_expected_epoch_equals_the_epoch_of_a_job_without_the_cause():
    """The simulated job without the slow transform takes what the verdict expects."""
    for slow in ([FAST, Times(transform=0.3), FAST], [FAST, Times(transform=0.3), Times(transform=0.15)]):
        finding = verdict_of(Job.of(ranks_of(slow))).findings[0]
        without = [Times(transform=0) for _ in slow]
        assert finding.expected == pytest.approx(Job.of(ranks_of(without)).seconds, rel=0.06)


def test_the_time_of_bytes_follows_from_the_links():
    """Rank 0 gets 3 MB from each of two ranks, at 1 MB/s and 3 MB/s."""
    rank = ranks_of([Times(received=6e6, batches=1, about=links(3, {}))] * 3)[0]
    assert transfer_of(rank, {(1, 0): 1e6, (2, 0): 3e6, (0, 1): 1e9, (0, 2): 1e9}) == pytest.approx(4.0)
    assert transfer_of(rank, {(0, 1): 1e6, (0, 2): 1e6}) == pytest.approx(6.0)
    assert transfer_of(rank, {}) == 0


def test_a_rank_without_seeds_hides_nothing():
    ranks = ranks_of([FAST, Times(transform=0.3), FAST])
    idle = ranks_of([Times(batches=1)])[0]
    idle.numbers.update(dict.fromkeys(idle.numbers, 0) | {"rank": 3, "peers.seconds": 0})
    verdict = verdict_of(Job.of([*ranks, idle]))
    assert (verdict.findings[0].cause, verdict.findings[0].rank) == ("transform", 1)


def test_batches_made_ahead_in_threads_are_divided_like_the_work_of_these_threads():
    """One process has all rows. Its threads draw for 2 s and take rows for 6 s, and the loop waits 4 s."""
    rank = ranks_of([Times(batches=20)])[0]
    numbers = {
        "batches": 20,
        "seconds": 10,
        "wait.seconds": 4,
        "step.seconds": 6,
        "work.draw.seconds": 2,
        "work.gather.seconds": 6,
    }
    numbers |= {f"stage.{name}.seconds": 3 for name in ("sample", "gather_host_rows")} | {"stage.assemble.seconds": 0}
    rank.numbers.clear()
    rank.numbers.update(numbers)
    (parts,) = Job.of([rank]).parts
    assert (parts["sample"], parts["rows"], parts["train"], parts["rest"]) == pytest.approx((1, 3, 6, 0))


def test_a_process_that_takes_rows_in_its_own_loop_is_told_to_use_threads():
    """One process has all rows and no threads. With a thread the rows of the next batches are taken while the model trains."""
    alone = Rank(0, ALONE, {"num_workers": 0})
    first = verdict_of(Job.of([alone])).findings[0]
    assert (
        first.cause == "rows"
        and "`num_workers=2` instead of 0" in first.change
        and first.expected == pytest.approx(4.5, abs=0.1)
    )
    with_thread = Rank(0, ALONE, {"num_workers": 1})
    assert "`read_ahead" in verdict_of(Job.of([with_thread])).findings[0].change


def test_equal_steps_of_several_ranks_may_hide_a_slow_rank():
    """Ranks that average gradients in the step wait there for the slowest."""
    for sync in ("loader", "step"):
        several = verdict_of(Job.of(ranks_of([Times(train=0.4)] * 2, sync)))
        assert several.sentences[1].endswith(
            "if the model is not trimmed yet. If ranks average gradients in it, one slow rank makes all steps look equal: "
            "time forward and backward on each rank."
        )
        assert several.sentences[2].endswith("if a step takes half as long.")
    hidden = verdict_of(Job.of(ranks_of([FAST, Times(train=0.4), FAST], "step")))
    assert "one slow rank makes all steps look equal" in hidden.sentences[1]
    assert "average gradients" not in " ".join(verdict_of(Job.of(ranks_of([FAST]))).sentences)


def on_hosts(ranks: list[Rank], hosts: str, **about: object) -> Job:
    """Job on hosts of one letter each, with more in the description of each rank."""
    return Job.of([replace(rank, about={**rank.about, **about}, host=host) for rank, host in zip(ranks, hosts)])


def test_no_more_threads_are_advised_than_a_rank_has_cores():
    slow = Times(sample=0.6)
    ranks = ranks_of([slow] * 2)
    for rank in ranks:
        rank.numbers["work.draw.seconds"] = 40 * 0.6
    of = {cores: verdict_of(on_hosts(ranks, "ab", cores=cores)).findings[0] for cores in (1, 2, 4, 64)}
    assert "`num_workers=7` instead of 1, within 64 cores" in of[64].change
    assert "`num_workers=4` instead of 1, within 4 cores" in of[4].change
    assert "`num_workers=2` instead of 1, within 2 cores" in of[2].change
    assert of[1].change == "Drawing needs more than 1 core, or fewer neighbours (smaller `num_neighbors`)."
    # The work of one rank is 24 s of drawing, 4 s of training, and 0.8 s of others.
    assert of[2].expected == pytest.approx(14.5, abs=0.3) and "at least 14 s" in of[2].how
    assert of[4].expected == pytest.approx(7.3, abs=0.3)
    assert of[64].expected < 4.9
    shared = verdict_of(on_hosts(ranks, "aa", cores=4)).findings[0]
    assert "within 4 cores for 2 ranks on its host" in shared.change and "`num_workers=2`" in shared.change
    assert shared.expected == pytest.approx(of[2].expected)
    with_threads = verdict_of(on_hosts(ranks, "ab", cores=2, torch_threads=2)).findings[0]
    assert "and more if the training step keeps several cores busy" in with_threads.how


def test_one_thread_is_one():
    alone = Rank(0, ALONE | {"seconds": 20, "step.seconds": 14}, {"num_workers": 0, "cores": 8})
    assert "; 1 thread needs 5.5 s for this work" in verdict_of(Job.of([alone])).findings[0].how


@pytest.mark.parametrize(
    ("about", "advice", "others"),
    [
        ({}, ("read_ahead", " if rows lie on a disk", "`store_as`"), ("cores",)),
        ({"reads_files": True}, ("read_ahead", "copy-to-disk`;"), ("cores", "if rows lie")),
        ({"reads_files": False}, ("float16", "cores", "make its `take` faster"), ("read_ahead", "disk")),
        ({"reads_files": False, "row_bytes": {"": 32}}, ("cores", "rows of 32 bytes"), ("read_ahead", "store_as")),
        ({"reads_files": True, "row_bytes": {"": 32}}, ("read_ahead",), ("store_as",)),
    ],
)
def test_rows_in_memory_are_no_slow_disk(about, advice, others):
    finding = verdict_of(Job.of(ranks_of([Times(rows=0.3, about=about)] * 2))).findings[0]
    assert finding.cause == "rows"
    assert [word for word in advice if word not in finding.change] == []
    assert [word for word in others if word in finding.change] == []


def test_narrow_rows_are_judged_by_their_number():
    """40 batches of 10,000 rows of 32 bytes in 0.2 s are 2 million rows, but 64 MB a second."""
    ranks = ranks_of([Times(rows=0.3, about={"row_bytes": {"": 32}})])
    ranks[0].numbers.update({"bytes.host": 32 * 4e5, "bytes.cache": 0, "bytes.sent": 0, "work.gather.seconds": 0.2})
    assert "read_ahead" not in verdict_of(Job.of(ranks)).findings[0].change
    ranks[0].numbers["work.gather.seconds"] = 2.0
    slow = verdict_of(Job.of(ranks)).findings[0]
    assert "read_ahead" in slow.change and "200,000 rows come a second, and memory gives 1,171,875" in slow.how


def test_a_slower_part_is_needed_for_a_slow_rank():
    """The rest of next() counts as a part. Ranks that differ in nothing are not uneven."""
    ranks = ranks_of([FAST] * 3)
    ranks[1].numbers["seconds"] += 4
    ranks[0].numbers["seconds"] += 0.01
    finding = next(each for each in verdict_of(Job.of(ranks)).findings if each.cause == "uneven")
    assert (finding.rank, finding.what) == (
        1, "Rank 1 is the slowest: its rest of next() takes 0.1 s a batch, that of the others 0.12 ms."
    )  # fmt: skip
    assert uneven(Job.of(ranks_of([FAST] * 2))) is None


def test_an_epoch_that_was_left_early_is_not_uneven():
    listed = {"batches_by_rank": [80, 80]}
    ranks = ranks_of([Times(about=listed), Times(batches=80, about=listed)])
    assert uneven(Job.of(ranks)) is None
    assert uneven(Job.of(ranks_of([FAST, Times(batches=80)]))) is not None


def test_the_same_change_is_told_once():
    """More threads would draw and take rows."""
    numbers = ALONE | {"seconds": 20, "wait.seconds": 16, "work.draw.seconds": 7.5, "work.gather.seconds": 8}
    numbers |= {"stage.sample.seconds": 7.5, "stage.gather_host_rows.seconds": 8}
    verdict = verdict_of(Job.of([Rank(0, numbers, {"num_workers": 0})]))
    (finding,) = verdict.findings
    assert len(verdict.sentences) == 3 and "Waiting for sampled batches takes" in finding.what
    assert "Taking feature rows takes" in finding.what and finding.change.count("`num_workers=4`") == 1
    assert finding.expected == pytest.approx(4.5, abs=0.1) == 20 - finding.saved


@pytest.mark.parametrize("workers", [0, 1])
def test_a_slow_sampler_of_the_user_is_not_taken_for_slow_sampling(workers):
    numbers = ALONE | {
        "seconds": 10,
        "wait.seconds": 9,
        "step.seconds": 1,
        "work.draw.seconds": 0.5,
        "work.gather.seconds": 0.4,
    }
    numbers |= {"work.seeds.seconds": 8, "stage.sample.seconds": 0.5, "stage.gather_host_rows.seconds": 0.4}
    numbers |= {"stage.assemble.seconds": 0.05, "transform.seconds": 0.0}
    job = Job.of([Rank(0, numbers, {"num_workers": workers})])
    finding = verdict_of(job).findings[0]
    assert (finding.cause, finding.what) == ("seeds", "The `sampler` takes 0.4 s of 0.5 s a batch.")
    assert finding.expected == pytest.approx(2)
    assert job.parts[0]["sample"] == 0.5 and job.parts[0]["rows"] == 0.4, "threads work no longer than they say"


def test_reasons_that_take_no_time_are_not_listed():
    ranks = ranks_of([Times(train=0.2, transform=0.0, sample=0.0, rows=0.0)] * 2)
    for rank in ranks:
        rank.numbers["wait.seconds"] = 0.5 * rank.of("seconds")
        rank.numbers.update({name: 0.0 for name in rank.numbers if name.startswith("stage.")})
    verdict = verdict_of(Job.of(ranks))
    assert verdict.findings[0].cause == "nothing_alone" and " 0 s" not in verdict.sentences[0]


def test_numbers_are_short():
    assert [seconds(each) for each in (120.4, 9.97, 0.312, 0.0997, 0.0994, 0.0025, 0)] == [
        "120 s",
        "10 s",
        "0.31 s",
        "0.1 s",
        "99 ms",
        "2.5 ms",
        "0 s",
    ]
    amounts = [exact_bytes(round_up(each)) for each in (0, 999, 30_720_001, 8 * 10**9, 64 * 10**6)]
    assert amounts == ["0B", "1kB", "31MB", "8GB", "64MB"]
    assert all(re.fullmatch(r"[\d.]+(B|kB|MB|GB|TB)", exact_bytes(round_up(int(1.7**n)))) for n in range(50))
