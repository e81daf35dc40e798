"""Counting calls."""

import pytest

from mpicoll.runtime import record


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(record, "_totals", {})
    monkeypatch.setattr(record, "recent", record.deque(maxlen=3))


def test_totals_and_stats():
    for nbytes in (8, 16):
        record.note("allreduce", "ring", nbytes, 0.5)
    record.note("bcast", "native", 4)
    assert record.totals()["allreduce", "ring"] == record.Total(2, 24, 1.0)
    assert record.stats() == {"allreduce": {"ring": 2}, "bcast": {"native": 1}}
    assert list(record.recent)[-1] == ("bcast", "native", 4)


def test_what_was_never_called_is_not_listed():
    held = record.total("allreduce", "native")
    assert record.totals() == {} and record.stats() == {}
    held.calls += 1
    assert record.stats() == {"allreduce": {"native": 1}}
    record.clear()
    assert record.stats() == {} and record.total("allreduce", "native") is held


def test_timing():
    record.timing(True)
    assert record.timed
    record.timing(False)
    assert not record.timed
