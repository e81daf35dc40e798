"""Errors that many ranks raise alike: records in a stream that launchers may cut, mix and damage."""

import errno
import fcntl
import os
import random
import sys

import pytest

from mpicoll.cli import fold, rank
from mpicoll.cli.relay import Relay

TRACE = 'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\n    f()\nValueError: no\n'


def stream(*texts, size=None):
    """What ranks 0, 1, ... write; None from one that writes nothing."""
    size = size or len(texts)
    return [b"".join(fold.records(rank, size, text)) for rank, text in enumerate(texts) if text is not None]


def shown(chunks):
    """What is shown at once, and at the end."""
    folded = fold.Fold(1)
    return b"".join(folded.feed(chunk, 0) for chunk in chunks).decode(), folded.flush().decode()


def test_equal_errors_once():
    assert shown(stream(TRACE, TRACE, TRACE)) == ("", f"ranks 0-2 of 3: {TRACE}")


def test_different_errors_in_the_order_in_which_they_came():
    chunks = stream(TRACE, "KeyError: 1\n", TRACE, None, TRACE, size=6)
    assert shown(chunks)[1] == f"ranks 0, 2, 4 of 6: {TRACE}rank 1 of 6: KeyError: 1\n"
    assert shown(chunks[::-1])[1].endswith("rank 1 of 6: KeyError: 1\n")


def test_errors_that_name_their_own_rank():
    trace = 'File "a.py"\n  line 1\nValueError: rank {0} got {0} of 2, expected 2.0 for {0}.\n'
    assert shown(stream(*(trace.format(rank) for rank in range(2))))[1] == (
        f"ranks 0-1 of 2, here rank 0: {trace.format(0)}"
    )
    # a number that is all ranks' tells nothing, and lines of the program are what they are
    assert shown(stream("no 1\n", "no 1\n"))[1] == "ranks 0-1 of 2: no 1\n"
    assert shown(stream("  line 0\n", "  line 1\n"))[1].count("rank") == 2
    assert shown(stream("10 of 0\n", "11 of 1\n"))[1].count("rank") == 2


def test_one_rank_alone_is_not_named():
    assert shown(stream(TRACE)) == ("", TRACE)


@pytest.mark.parametrize(
    ("ranks", "expected"), [([3], "3"), ([2, 0, 1, 5], "0-2, 5"), ([0, 1, 3, 4, 7], "0-1, 3-4, 7")]
)
def test_ranges(ranks, expected):
    assert fold.ranges(ranks) == expected


def test_what_is_no_record_passes_at_once():
    folded = fold.Fold(1)
    for text in (b"\r 10%", b"\x1e{}\n", b"mpicoll 1\n", b"half a line"):
        assert folded.feed(text, 0) == text and not folded.held


def test_a_record_behind_a_progress_bar():
    assert shown([b"\r 99%" + stream(TRACE)[0] + b"more\n"]) == ("\r 99%", f"{TRACE}more\n")


def test_any_cut():
    whole = b"before\n" + b"".join(stream(TRACE, TRACE)) + b"after\n"
    for at in range(len(whole)):
        now, later = shown([whole[:at], whole[at:]])
        assert now + later == f"before\nranks 0-1 of 2: {TRACE}after\n"


def test_a_mark_that_turns_out_to_be_none():
    folded = fold.Fold(1)
    assert folded.feed(b"a\x1emp", 0) == b"a" and folded.feed(b"ty", 0) == b"\x1empty" and not folded.held


def test_long_and_strange_texts():
    text = "\0\r\n\x1e\"'" + "\U0001f600" * 2000 + "\udc80\n"
    lines = b"".join(fold.records(0, 1, text)).splitlines(keepends=True)
    assert len(lines) > 1 and max(map(len, lines)) < 4096
    random.Random(2).shuffle(lines)
    assert shown(lines)[1] == text.encode(errors="backslashreplace").decode()


def test_records_between_the_pieces_of_others():
    one, two, three = stream(TRACE, TRACE, TRACE)
    chunks = [one[:50], two[:70], three, two[70:], one[50:]]
    assert shown(chunks) == ("", f"ranks 0-2 of 3: {TRACE}")


def test_a_damaged_record_is_shown_as_it_is():
    one, two = stream(TRACE, TRACE)
    now, later = shown([one, two.replace(b"Value", b"Vague")])
    assert now == "" and later.startswith(f"rank 0 of 2: {TRACE}") and "VagueError: no" in later
    now, later = shown([one, two[:60]])
    assert later.startswith(f"rank 0 of 2: {TRACE}") and later.endswith(two[:60].decode())


def test_a_lost_part_is_missed():
    lines = fold.records(0, 2, "a" * 1000)
    assert fold.LOST in shown([lines[0], lines[2]])[1]


ABORT = """--------------------------------------------------------------------------
MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD
  Proc: [[13324,1],1]
  Errorcode: 1

NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.
You may or may not see output from other processes, depending on
exactly when Open MPI kills them.
--------------------------------------------------------------------------
"""
OLDER = ABORT.replace("  Proc: [[13324,1],1]\n  Errorcode: 1\n", "with errorcode 1.\n")
EXITED = """--------------------------------------------------------------------------
prterun has exited due to process rank 1 with PID 0 on node vm calling
"abort". This may have caused other processes in the application to be
terminated by signals sent by prterun (as reported here).
--------------------------------------------------------------------------
"""
STATUS = """--------------------------------------------------------------------------
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-vm-23767@1,1]
   Exit code:    1
--------------------------------------------------------------------------
"""
MPICH = "Abort(1) on node 1 (rank 1 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 1) - process 1\n"


@pytest.mark.parametrize("text", [ABORT, OLDER, EXITED, STATUS, MPICH, ABORT + EXITED, EXITED + "\0"])
def test_what_launchers_say_of_an_abort_that_is_explained(text):
    record = stream(None, TRACE, size=3)[0]
    assert shown([record, text.encode()])[1] == f"rank 1 of 3: {TRACE}"
    kept = text.replace("rank 1", "rank 2").replace(",1]\n   Exit", ",2]\n   Exit")
    assert shown([record, kept.encode()])[1] == f"rank 1 of 3: {TRACE}{kept}"
    assert shown([text.encode()]) == (text, "")


def test_nothing_unknown_is_dropped():
    rule = "-" * 74 + "\n"
    text = f"{rule}A warning\n{rule}mine\n{ABORT}{rule}Another\n{rule}"
    record = stream(None, TRACE, size=3)[0]
    later = shown([record, text.encode()])[1]
    assert later == f"rank 1 of 3: {TRACE}{rule}A warning\n{rule}mine\n{rule}Another\n{rule}"


def test_relay_shows_records_in_time_and_the_rest_at_the_end(capfd):
    read, write = os.pipe()
    relay = Relay(os.fdopen(read, "rb"), patience=0.1)
    relay.start()
    seen = ""

    def until(text):
        nonlocal seen
        for _ in range(1000):
            seen += capfd.readouterr().err
            if seen.endswith(text):
                return
            relay.join(0.01)
        raise AssertionError(f"{text!r} was not shown: {seen!r}")

    os.write(write, b"bar 1%")
    until("bar 1%")
    os.write(write, stream(TRACE, None, size=2)[0])
    until(f"rank 0 of 2: {TRACE}")
    os.write(write, stream(None, TRACE, size=2)[0] + b"end")
    relay.finish()  # though something still holds the other end of the pipe
    until(f"rank 1 of 2: {TRACE}end")
    os.close(write)


def test_a_stderr_that_cannot_be_asked_what_is_unread_is_written_to(capfd, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOTTY, os.strerror(errno.ENOTTY))

    monkeypatch.setattr(fcntl, "ioctl", refuse)
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)
    monkeypatch.setenv("MPICOLL_FOLD", "0")
    rank.tell(TRACE)
    assert shown([capfd.readouterr().err.encode()]) == ("", TRACE)
