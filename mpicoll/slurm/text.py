"""Text of a batch script: paragraphs below their reasons, words quoted."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Mapping


def paragraph(why: str, *lines: str) -> str:
    """Lines of a script, below a comment that says what they are for."""
    return "\n".join([*textwrap.wrap(why, 108, initial_indent="# ", subsequent_indent="# "), *lines])


def word(text: str) -> str:
    """Quote a word for bash; the job's id takes the place of ``{id}``."""
    parts = [shlex.quote(part) if part else "" for part in text.split("{id}")]
    return '"$id"'.join(parts) or "''"


def words(texts: tuple[str, ...]) -> str:
    """Quote words for bash."""
    return " ".join(map(word, texts))


def exports(variables: Mapping[str, str]) -> list[str]:
    """Lines that export variables."""
    return [f"export {name}={word(value)}" for name, value in variables.items()]


def commands(script: str) -> list[str]:
    """Return the lines of a script that are neither blank nor comment, `#SBATCH` lines included."""
    return [line for line in script.splitlines() if not re.match(r"\s*(#(?!SBATCH|!)|$)", line)]
