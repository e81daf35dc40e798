"""Numbers in the environment."""

import pytest

from mpicoll.settings import number


@pytest.mark.parametrize(
    ("text", "default", "value"),
    [("", 5, 5), ("0", 5, 0), ("1024", 5, 1024), ("2.5", 60.0, 2.5), ("inf", 1.0, float("inf"))],
)
def test_numbers(monkeypatch, text, default, value):
    monkeypatch.setenv("MPICOLL_STALL", text)
    assert number("MPICOLL_STALL", default) == value
    monkeypatch.delenv("MPICOLL_STALL")
    assert number("MPICOLL_STALL", default) == default


@pytest.mark.parametrize(
    ("text", "default"), [("1G", 5), ("2.5", 5), ("-1", 5), ("soon", 60.0), ("-1", 60.0), ("nan", 60.0)]
)
def test_the_variable_is_named(monkeypatch, text, default):
    monkeypatch.setenv("MPICOLL_ARENA", text)
    with pytest.raises(ValueError, match=f"MPICOLL_ARENA={text}: expected a .*number"):
        number("MPICOLL_ARENA", default)
