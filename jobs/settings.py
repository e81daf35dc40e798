"""Settings from one JSON or TOML file, every key of which is checked before anything starts."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, fields
from pathlib import Path
from typing import Any, TypeVar

Settings = TypeVar("Settings")


class ConfigError(ValueError):
    """Settings that cannot be used: says where, what is wrong, and which key may have been meant."""


def setting(default: Any, words: str, fits: Callable[[Any], bool]) -> Any:
    """Make a setting: its default, and which values it takes, in words and as a function."""
    return field(default=default, metadata={"words": words, "fits": fits})


def number(value: Any) -> bool:
    """Tell whether a value is a number; true and false are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def whole(default: int | None, least: int = 1) -> Any:
    """Make a setting that is a whole number."""
    words = f"a whole number of at least {least}"
    return setting(default, words, lambda value: number(value) and value == int(value) and value >= least)


def share(default: float | None) -> Any:
    """Make a setting from 0 to below 1."""
    return setting(default, "a number from 0 to below 1", lambda value: number(value) and 0 <= value < 1)


def positive(default: float | None) -> Any:
    """Make a setting above 0."""
    return setting(default, "a number above 0", lambda value: number(value) and value > 0)


def at_least_0(default: float | None) -> Any:
    """Make a setting that is not negative."""
    return setting(default, "a number of at least 0", lambda value: number(value) and value >= 0)


def one_of(default: str, *choices: str) -> Any:
    """Make a setting that is one of a few words."""
    words = f"one of {', '.join(choices)}"
    return setting(default, words, lambda value: isinstance(value, str) and value in choices)


def text(default: str | None) -> Any:
    """Make a setting that is text."""
    return setting(default, "text", lambda value: isinstance(value, str))


def flag(default: bool | None) -> Any:
    """Make a setting that is true or false."""
    return setting(default, "true or false", lambda value: isinstance(value, bool))


def pair(default: tuple[Any, Any] | None, words: str, fits: Callable[[Any], bool]) -> Any:
    """Make a setting of two values in a list."""

    def both(value: Any) -> bool:
        return isinstance(value, (list, tuple)) and len(value) == 2 and all(fits(item) for item in value)

    return setting(default, words, both)


def load(kind: type[Settings], path: Path | None, changes: Iterable[str] = ()) -> Settings:
    """Read settings and check each by itself.

    Parameters
    ----------
    kind
        A dataclass of sections, themselves dataclasses whose fields are made by the functions above.
    path
        A .json or .toml file; None: all settings have their defaults.
    changes
        ``section.key=value`` each, to replace what the file says.

    Raises
    ------
    ConfigError
        For a file that cannot be read, an unknown key, a value that does not fit.
    """
    where = str(path) if path else "settings"
    sections: dict[str, Any] = {entry.name: entry.default_factory for entry in fields(kind)}
    settings = _read(path) if path else {}
    if not isinstance(settings, dict):
        raise ConfigError(f"{where}: expected sections with keys, got {settings!r}")
    for change in changes:
        _change(settings, change)
    found = {}
    for name, values in settings.items():
        _known(where, "section", name, name, sections, sections)
        found[name] = _section(where, name, values, sections)
    return kind(**found)


def _read(path: Path) -> Any:
    """Parse a file by its ending."""
    try:
        if path.suffix == ".json":
            return json.loads(path.read_text("utf-8"), object_pairs_hook=_no_key_twice)
        if path.suffix == ".toml":
            return _toml(path)
    except (OSError, ValueError) as error:  # both parsers' errors are ValueErrors that name line and column
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{path}: {reason}") from error
    raise ConfigError(f"{path}: expected a name that ends in .json or .toml")


def _toml(path: Path) -> dict[str, Any]:
    try:
        import tomllib
    except ImportError:
        raise ConfigError("TOML needs Python 3.11 or newer; write the same settings as JSON") from None
    return tomllib.loads(path.read_text("utf-8"))


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ConfigError(f"key {next(key for key in keys if keys.count(key) > 1)!r} comes twice")
    return values


def _change(settings: dict[str, Any], change: str) -> None:
    """Apply one ``section.key=value``; the value is JSON, or else text as it stands."""
    key, equals, value = change.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (equals and dot and section and name):
        raise ConfigError(f"--set {change}: expected section.key=value")
    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = value
    holder = settings.setdefault(section, {})
    if not isinstance(holder, dict):
        raise ConfigError(f"{section}: expected a section with keys, got {holder!r}")
    holder[name] = parsed


def _section(where: str, name: str, values: Any, sections: Mapping[str, Any]) -> Any:
    """Make one section from what the file says of it."""
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: {name}: expected a section with keys, got {values!r}")
    known = {entry.name: entry for entry in fields(sections[name])}
    for key, value in values.items():
        _known(where, "key", f"{name}.{key}", key, known, sections)
        rule = known[key].metadata
        if not rule["fits"](value) and not (value is None and known[key].default is None):
            raise ConfigError(f"{where}: {name}.{key}: expected {rule['words']}, got {value!r}")
    return sections[name](**{key: _plain(value) for key, value in values.items()})


def _plain(value: Any) -> Any:
    """Return lists as tuples, and whole floats such as 1e3 as they are written elsewhere: whole."""
    if isinstance(value, list):
        return tuple(map(_plain, value))
    return int(value) if isinstance(value, float) and value == int(value) else value


def _known(
    where: str, what: str, full: str, name: str, known: Mapping[str, Any], sections: Mapping[str, Any]
) -> None:
    """Refuse a name that is not known; name the nearest that is, here or else in any section."""
    if name in known:
        return
    near = difflib.get_close_matches(name, known, 1)
    meant = f"{full.rpartition('.')[0]}.{near[0]}".lstrip(".") if near else " or ".join(_near(name, sections))
    hint = f"did you mean {meant}?" if meant else f"known are {', '.join(known)}"
    raise ConfigError(f"{where}: unknown {what} {full!r}; {hint}")


def _near(key: str, sections: Mapping[str, Any]) -> list[str]:
    """Return the full names of the keys that are called so, or nearly so, in any section."""
    full = {f"{name}.{entry.name}": entry.name for name, kind in sections.items() for entry in fields(kind)}
    near = difflib.get_close_matches(key, full.values(), 1)
    return [name for name, own in full.items() if own in near]
