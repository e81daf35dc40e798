"""One Chrome trace of all ranks."""

import json
import time

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll.train.timeline import Timeline


def test_every_rank_is_in_the_trace(comm, folder):
    timeline = Timeline(comm)
    with timeline.span("outer", step=comm.rank):
        time.sleep(0.002)
        timeline.mark("here", "events")
        with timeline.span("inner", "other"):
            time.sleep(0.001)
    with pytest.raises(KeyError), timeline.span("failing"):
        raise KeyError
    timeline.write(folder / "trace.json")
    comm.Barrier()
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    for rank in range(comm.size):
        mine = {event["name"]: event for event in events if event["pid"] == rank and event["ph"] != "M"}
        assert list(mine) == ["here", "inner", "outer", "failing"]
        outer, inner, here = mine["outer"], mine["inner"], mine["here"]
        assert outer["args"] == {"step": rank} and outer["dur"] >= 3000 and inner["dur"] >= 1000
        assert 0 <= outer["ts"] < here["ts"] <= inner["ts"]
        assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 0.2  # rounding
        assert len({outer["tid"], inner["tid"], here["tid"]}) == 3 and outer["tid"] == mine["failing"]["tid"]
        names = [event["args"].get("name") for event in events if event["pid"] == rank and event["ph"] == "M"]
        assert names == [f"rank {rank}", None, "events", "other", "compute"]


def test_clocks_agree(comm, folder):
    timeline = Timeline(comm)
    for _ in range(20):
        comm.Barrier()
        timeline.mark("barrier")
    timeline.write(folder / "trace.json")
    comm.Barrier()
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    at = [
        [event["ts"] for event in events if event["pid"] == rank and event["ph"] == "i"]
        for rank in range(comm.size)
    ]
    spread = sorted(max(times) - min(times) for times in zip(*at, strict=True))
    assert spread[0] < 20_000  # one quiet barrier of twenty, on a machine with other things to do


def test_a_disk_that_refuses_is_an_error_on_every_rank(comm, folder):
    timeline = Timeline(comm)
    with pytest.raises(FileNotFoundError, match="absent"):
        timeline.write(folder / "absent" / "trace.json")


def test_collectives_are_recorded_while_it_is_on(comm, folder):
    timeline = Timeline(comm)
    traced = timeline.traced(comm)
    assert traced.size == comm.size
    x = np.ones(100)
    traced.Allreduce(MPI.IN_PLACE, x)
    for request in [traced.Iallreduce(MPI.IN_PLACE, array) for array in (x, np.ones(9))]:
        timeline.look()
        request.Wait()
    timeline.look()
    timeline.on = False
    traced.Allreduce(MPI.IN_PLACE, x)
    traced.Iallreduce(MPI.IN_PLACE, x).Wait()
    with timeline.span("not seen"):
        timeline.mark("nor this")
    timeline.look()
    assert (x == comm.size**4).all()
    timeline.write(folder / "trace.json")
    comm.Barrier()
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    calls = [event["name"] for event in events if event["pid"] == comm.rank and event["ph"] != "M"]
    assert calls == ["Allreduce", "Iallreduce", "Iallreduce"]
    lanes = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert lanes <= {"communication", "communication 2"}
    rows = {}
    for event in events:
        if event["ph"] == "X":
            rows.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], event["ts"] + event["dur"])
            )
    for spans in rows.values():  # those of a row do not overlap
        spans.sort()
        assert all(stop <= start + 0.2 for (_, stop), (start, _) in zip(spans, spans[1:], strict=False))
