"""The suite itself: its ranks are one job, not so many singletons."""

import os


def test_ranks_are_one_job(world):
    expected = int(os.environ.get("MPICOLL_RANKS", world.Get_size()))
    assert world.Get_size() == expected
    assert sorted(world.allgather(world.Get_rank())) == list(range(expected))
