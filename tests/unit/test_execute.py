"""Strands that share a tag and scratch never run at the same time."""

import pytest

from mpicoll.runtime.execute import Patience, Program


class Strand:
    """A strand of so many rounds, each of which arrives when it is told to."""

    def __init__(self, number, rounds, log):
        self.number, self.rounds, self.log = number, rounds, log
        self.ready = False

    def start(self):
        self.log.append(("start", self.number))
        self.left = self.rounds
        return True

    def test(self):
        return self.ready

    def next(self):
        self.left -= 1
        if not self.left:
            self.log.append(("end", self.number))
        return bool(self.left)


@pytest.mark.parametrize("quick", [0, 1, 2, 3])
def test_a_strand_waits_for_the_one_before_it_in_its_slot(quick):
    """One slot's messages arrive at once, the others' late: it must not take over another slot's strands."""
    width, log = 4, []
    strands = [Strand(i, 2, log) for i in range(12)]
    program = Program(strands, width, "test", Patience(20))
    program.start()
    for i, strand in enumerate(strands):
        strand.ready = i % width == quick
    while ("end", 8 + quick) not in log:
        program.advance()
    assert [entry for entry in log if entry[0] == "start"] == [
        *(("start", i) for i in range(width)),
        ("start", 4 + quick),
        ("start", 8 + quick),
    ]
    for strand in strands:
        strand.ready = True
    while not program.advance():
        pass
    for i in range(width, len(strands)):
        assert log.index(("end", i - width)) < log.index(("start", i))
    assert sum(entry[0] == "end" for entry in log) == len(strands)
