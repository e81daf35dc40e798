"""Values of the command line that click knows no type for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from mpicoll.io.files import check_folder


class Finite(click.FloatRange):
    """A number in a range, which infinity and nan are not: `click` lets them through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


class NewFile(click.Path):
    """A file that can be written: it would be a pity to miss that after minutes of work."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, once a file was made there."""
        path = Path(str(super().convert(value, param, ctx)))
        real = path.resolve()
        if not real.parent.is_dir():
            self.fail(f"{real.parent}: no such directory", param, ctx)
        try:
            if real.is_dir():
                self.fail(f"{real}: a directory", param, ctx)
            if not real.exists():
                real.touch()
                real.unlink()
            elif real.is_file():
                check_folder(real.parent)  # a new file will take its place
        except OSError as error:
            self.fail(f"{path}: no file can be made there ({error.strerror})", param, ctx)
        return path
