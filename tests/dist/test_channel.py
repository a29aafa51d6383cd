"""One end of a shared segment and its peer: what is counted, seen from outside, and said when the peer is gone."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from longhelix.compute.kernels import native
from longhelix.compute.kernels.tape import Tape
from longhelix.compute.parallel.collectives import SharedMemoryRankGroup
from longhelix.compute.parallel.traffic import Traffic
from longhelix.errors import CollectivesDifferError, PeerLostError

pytestmark = [
    pytest.mark.dist,
    pytest.mark.usefixtures("all_cores"),
    pytest.mark.skipif(native.module is None, reason="the native module is not built here"),
]

RANKS = (3, 8)  # what the whole world calls them
KILLS = 30


class Handle:
    """As much of a process group as a RankGroup asks for."""

    def __init__(self, channel):
        self.channel = channel


def segment():
    fd = os.memfd_create("longhelix")
    os.truncate(fd, native.module.Channel.segment_bytes(2))
    return fd


def threads_ends():
    """Both ends in this process, for two threads."""
    fd, pids = segment(), [os.getpid()] * 2
    ends = [
        SharedMemoryRankGroup(RANKS, RANKS[index], Handle(native.module.Channel(fd, index, pids, RANKS, 60.0)))
        for index in (0, 1)
    ]
    os.close(fd)
    return ends


def add(group, count):
    return group.all_reduce_add(torch.ones(count), torch.zeros(count))


def on_both(ends, *calls):
    with ThreadPoolExecutor(2) as threads:
        return [result.result() for result in [threads.submit(*call) for call in zip(calls, ends, strict=True)]]


def test_both_ranks_count_the_same_and_a_later_run_counts_as_it_would_alone():
    def run(group, counts):
        before = group.traffic
        for count in counts:
            add(group, count)
        return group.traffic.since(before)

    ends = threads_ends()
    first, second = (on_both(ends, *[lambda end, counts=counts: run(end, counts)] * 2) for counts in ((7, 5, 7), (9,)))
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert first[0].collectives == 3
    assert ends[0].traffic == first[0].then(second[0])
    (alone, _) = on_both(threads_ends(), *[lambda end: run(end, (9,))] * 2)
    assert alone == second[0]
    for other in ((5, 7, 7), (7, 5), (7, 5, 8)):
        (found, _) = on_both(threads_ends(), *[lambda end, counts=other: run(end, counts)] * 2)
        assert found.fingerprint != first[0].fingerprint


def test_traffic_of_nothing_changes_nothing():
    some = Traffic(3, 2**64 - 5, 70)
    assert some.then(Traffic()) == Traffic().then(some) == some.since(Traffic()) == some
    assert some.since(some) == Traffic()


def test_what_a_rank_waits_in_shows_to_other_threads():
    ends = threads_ends()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(add, ends[0], 4)
        deadline = time.monotonic() + 10
        while ends[0].progress()[1] == "" and time.monotonic() < deadline:
            time.sleep(0.001)
        assert ends[0].progress() == (1, "all-reduce 1 over ranks (3, 8)")
        add(ends[1], 4)
        waiting.result()
    assert ends[0].progress() == (1, "")


def test_ranks_in_different_collectives_say_so():
    def gather(group):
        group._handle.channel.all_gather(torch.ones(2).data_ptr(), torch.ones(4).data_ptr(), 8)

    ends, errors = threads_ends(), []

    def note(call):
        with pytest.raises(CollectivesDifferError) as raised:
            call()
        errors.append(str(raised.value))

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(note, [lambda: add(ends[0], 4), lambda: gather(ends[1])]))
    assert sorted(errors) == [
        "rank 3 is in all-reduce 1 of 16 bytes where rank 8 is in all-gather 1 of 8 bytes: all ranks must run the same "
        "collectives",
        "rank 8 is in all-gather 1 of 8 bytes where rank 3 is in all-reduce 1 of 16 bytes: all ranks must run the same "
        "collectives",
    ]


def test_a_tape_holds_every_collective():
    """What they compute is linear: a tape that runs them makes twice the results of twice the numbers."""

    def record(end):
        channel, number, tape = end._handle.channel, native.NUMBER_BY_DTYPE[torch.float32], Tape()
        inputs_34 = torch.arange(1.0, 13.0).view(3, 4) * (1 + end.index)
        given_34, made_34 = inputs_34.clone(), torch.zeros(3, 4)
        with tape:
            channel.all_reduce(given_34[0].data_ptr(), 4, number)
            channel.broadcast(given_34[1].data_ptr(), 16, 0)
            channel.reduce_scatter(given_34[2].data_ptr(), made_34[0].data_ptr(), 2, number)
            channel.all_gather(given_34[2].data_ptr(), made_34[1].data_ptr(), 8)
            channel.all_to_all(given_34[2].data_ptr(), [8, 8], made_34[2].data_ptr(), [8, 8])
            channel.barrier()
        first = torch.cat((given_34, made_34))
        given_34.copy_(2 * inputs_34)
        tape.run()
        assert torch.equal(torch.cat((given_34, made_34)), 2 * first)

    ends = threads_ends()
    on_both(ends, record, record)
    assert [end.progress() for end in ends] == [(12, "")] * 2


def start_peer(fd):
    """A process that takes part in whatever all-reduces come, until it is ended."""
    own, values = os.getpid(), torch.ones(16)
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(read)
        os.write(write, b"-")
        os.close(write)
        return pid
    try:
        os.read(read, 1)
        channel = native.module.Channel(fd, 1, [own, os.getpid()], RANKS, 60.0)
        while True:
            channel.all_reduce(values.data_ptr(), 16, native.NUMBER_BY_DTYPE[torch.float32])
    finally:
        os._exit(1)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_time_in_which_a_rank_was_stopped_is_none_that_it_waited():
    fd, (read, write) = segment(), os.pipe()
    test_pid, timeout_s = os.getpid(), 3.0
    pid = os.fork()
    if not pid:
        try:
            channel = native.module.Channel(fd, 1, [test_pid, os.getpid()], RANKS, timeout_s)
            os.write(write, b"-")
            channel.barrier()
            os._exit(0)
        finally:
            os._exit(1)
    channel = native.module.Channel(fd, 0, [test_pid, pid], RANKS, 60.0)
    os.close(fd)
    os.read(read, 1)
    time.sleep(0.2)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(timeout_s + 0.5)
    os.kill(pid, signal.SIGCONT)
    time.sleep(0.2)
    try:
        channel.barrier()
    finally:
        _, status = os.waitpid(pid, 0)
    assert status == 0


def run_on(tape):
    while True:
        tape.run()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_peer_that_ends_while_a_tape_runs_is_a_lost_peer():
    """However it falls: the error is never taken for one of this rank's own."""
    for index in range(KILLS):
        fd = segment()
        peer = start_peer(fd)
        group = SharedMemoryRankGroup(
            RANKS, RANKS[0], Handle(native.module.Channel(fd, 0, [os.getpid(), peer], RANKS, 60.0))
        )
        os.close(fd)
        kept, tape = [torch.ones(16), torch.zeros(16)], Tape()
        with tape:
            kept += [group.all_reduce_add(*kept[:2]) for _ in range(20)]
        killer = threading.Timer(0.0007 * index, os.kill, (peer, signal.SIGKILL))
        killer.start()
        lost = rf"rank 8 \(process {peer}\) has ended before all-reduce \d+ of 64 bytes"
        with pytest.raises(PeerLostError, match=lost):
            run_on(tape)
        killer.join()
        os.waitpid(peer, 0)
