"""The trace: that it says when exchanges complete, and so shows HOP-B at work; and the file that it is written to."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

from longhelix.compute.models.batch import AttentionRows, Batch, RowRotation, RowView, StepShape
from longhelix.compute.models.overlap import attend_and_exchange
from longhelix.compute.parallel.collectives import RankGroup
from longhelix.compute.runner.trace import TraceEvent, TraceFile
from longhelix.compute.runner.tracer import Tracer
from longhelix.errors import UserError

pytestmark = pytest.mark.unit

HANG_S = 20  # that a rank waits for what does not come
ROWS, HEADS, SIZE = 8, 4, 16
ROW_BYTES = HEADS * (SIZE * 4 + 4)
ROW_S = 0.03  # a row attends for so long, and its exchange takes as long on the slow link


class SlowRank:
    """A rank and its link to another one, which has no KV; a thread carries one exchange after the other.

    Each part's exchange waits until the next part attends, which does not end before that exchange has arrived. So they
    overlap however busy the machine is, and hang for a while where parts run one after the other.
    """

    def __init__(self, parts):
        self._thread = ThreadPoolExecutor(1)
        self._attends = [threading.Event() for _ in range(parts + 1)]
        self._arrived = [threading.Event() for _ in range(parts + 1)]
        self._attends[parts].set()
        self._arrived[0].set()
        self._attended = self._carried = 0

    def attend(self, q_TqC, *arguments):
        self._attends[self._attended].set()
        time.sleep(ROW_S * len(q_TqC))
        self._arrived[self._attended].wait(HANG_S)
        self._attended += 1
        return q_TqC, torch.zeros(q_TqC.shape[:2])

    def alltoall_base(self, received, send, received_sizes, send_sizes):
        future = Future()
        self._thread.submit(self._carry, received, send, send_sizes[0], future)
        return _create_work_from_future(future)

    def _carry(self, received, send, own_bytes, future):
        self._carried += 1
        self._attends[self._carried].wait(HANG_S)
        time.sleep(ROW_S * len(send) / ROW_BYTES)
        received.zero_()
        received[:own_bytes] = send[:own_bytes]
        received[own_bytes:].view(-1, SIZE * 4 + 4)[:, SIZE * 4 :] = torch.tensor([-torch.inf]).view(torch.uint8)
        future.set_result(received)
        self._arrived[self._carried].set()


def layer_of(parts):
    """Attention and exchange of one layer: what came out, its events, and the seconds that waits were exposed."""
    indices = torch.arange(ROWS)
    nothing = torch.zeros(ROWS, 1)
    batch = Batch(
        token_ids_T=indices,
        shape=StepShape(num_sequences=ROWS, most_tokens=ROWS, parts=parts),
        attention=AttentionRows(
            row_starts_b=torch.arange(ROWS + 1),
            limits_t=indices,
            extents_b2=torch.arange(ROWS + 1).unfold(0, 2, 1),
            max_rows=1,
            rotations=(RowRotation(nothing, nothing),),
            views=(RowView(indices, indices),),
        ),
    )
    tracer, rank = Tracer(torch.device("cpu")), SlowRank(parts)
    group = RankGroup((0, 1), 0, rank, tracer)
    q_TqC = torch.arange(ROWS * HEADS * SIZE, dtype=torch.float32).view(ROWS, HEADS, SIZE)
    out_TnC = attend_and_exchange(q_TqC, None, batch, 1.0, group, [2, 2], rank.attend, spans=tracer)
    return out_TnC, tracer.take(), group.waited_s


def named(events, name):
    return sorted((event for event in events if event.name == name), key=lambda event: event.details["part"])


def overlap_us(first, second):
    return max(0.0, min(first.end_us, second.end_us) - max(first.start_us, second.start_us))


def test_an_exchange_travels_while_the_next_part_attends_and_cannot_in_one_part():
    runs = {parts: [layer_of(parts) for _ in range(3)] for parts in (1, 4)}
    for (whole, events_1, _), (parted, events_4, _) in zip(runs[1], runs[4], strict=True):
        assert torch.equal(whole, parted)
        assert (len(named(events_1, "exchange")), len(named(events_4, "exchange"))) == (1, 4)
        exchanges, attentions = named(events_4, "exchange"), named(events_4, "attention")
        for exchange, following in zip(exchanges, attentions[1:], strict=False):
            assert overlap_us(exchange, following) > 0.9e6 * ROW_S * ROWS / 4
        assert overlap_us(*named(events_1, "attention"), *named(events_1, "exchange")) == 0
    # What else a machine does only adds to times, so the shortest are compared.
    exposed_s = {parts: min(exposed_s for _, _, exposed_s in runs[parts]) for parts in runs}
    length_us = {parts: min(_length_us(events) for _, events, _ in runs[parts]) for parts in runs}
    # The last part's exchange alone is exposed, a quarter of the one exchange's.
    assert exposed_s[4] < exposed_s[1] / 2
    assert length_us[4] < length_us[1]


def _length_us(events):
    return max(event.end_us for event in events) - min(event.start_us for event in events)


def test_an_exchange_ends_when_it_is_complete_and_not_when_it_is_waited_for():
    _, events, _ = layer_of(4)
    first, last_attention = named(events, "exchange")[0], named(events, "attention")[-1]
    assert first.end_us < last_attention.start_us


def test_a_collective_that_fails_to_complete_is_an_error_and_not_a_shorter_trace(monkeypatch):
    monkeypatch.setattr("longhelix.compute.runner.tracer._PENDING_S", 0.01)
    tracer = Tracer(torch.device("cpu"))
    tracer.begin("exchange", "exchange")
    with pytest.raises(RuntimeError, match="exchange was not completed"):
        tracer.take()


def test_a_span_may_end_on_another_thread():
    tracer = Tracer(torch.device("cpu"))
    span = tracer.begin("exchange", "exchange")
    threading.Thread(target=lambda: (time.sleep(0.05), tracer.end(span))).start()
    (event,) = tracer.take()
    assert event.end_us - event.start_us >= 0.05e6


def write(path, events_by_rank):
    file = TraceFile(path)
    for rank, events in events_by_rank:
        file.write(rank, events)
    file.close()
    file.close()
    return json.loads(path.read_text())


def test_the_file_is_an_array_of_complete_events(tmp_path):
    events = [TraceEvent("attention", "compute", 10.0, 25.0, {"layer": 3, "part": 1})]
    assert write(tmp_path / "t.json", [(1, events)]) == [
        {
            "name": "attention",
            "cat": "compute",
            "ph": "X",
            "ts": 10.0,
            "dur": 15.0,
            "pid": 1,
            "tid": "compute",
            "args": {"layer": 3, "part": 1},
        }
    ]
    assert write(tmp_path / "none.json", []) == []


def test_events_of_a_kind_that_overlap_have_lanes_of_their_own(tmp_path):
    spans = [(0, 10), (5, 20), (10, 30), (21, 25), (31, 32)]
    events = [TraceEvent("exchange", "exchange", float(start), float(end)) for start, end in reversed(spans)]
    written = write(tmp_path / "t.json", [(0, events), (1, events[:1])])
    assert [entry["tid"] for entry in written] == [
        "exchange",
        "exchange 2",
        "exchange",
        "exchange 2",
        "exchange",
        "exchange",
    ]


def test_a_file_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"cannot be written .*choose another file for the trace"):
        TraceFile(tmp_path / "missing" / "t.json")


@pytest.mark.parametrize("num_events", [0, 1, 1000])  # none, or fewer or more than is buffered
def test_a_trace_ends_with_one_warning_where_the_disk_is_full(recwarn, num_events):
    file = TraceFile(Path("/dev/full"))
    events = [TraceEvent("attention", "compute", 10.0, 25.0)] * num_events
    for _ in range(3):
        file.write(0, events)
    file.close()
    file.close()
    assert [str(warning.message) for warning in recwarn] == [
        "the trace in /dev/full ends here: No space left on device"
    ]
