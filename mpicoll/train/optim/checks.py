"""What parameters and options must be, whatever optimizer takes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["as_float", "check_params"]


def check_params(params: Mapping[str, NDArray[Any]]) -> None:
    """Refuse what no step can change, naming the parameter: all but arrays of real floating-point numbers."""
    if not isinstance(params, Mapping):
        raise ValueError(f"params must map names to arrays, got a {type(params).__name__}")
    for name, param in params.items():
        dtype = getattr(param, "dtype", None)
        if dtype is None or isinstance(param, np.generic):
            raise ValueError(f"parameter {name!r} is a {type(param).__name__}, expected an array")
        if isinstance(param, np.ndarray) and not param.flags.writeable:
            raise ValueError(f"parameter {name!r} is read-only")
        if isinstance(param, np.ndarray) and not dtype.isnative:
            raise ValueError(f"parameter {name!r} is of {dtype}, not this machine's byte order")
        try:
            # it knows bfloat16, as numpy's does not, and takes complex numbers
            real = ml_dtypes.finfo(dtype) and np.dtype(dtype).kind != "c"  # type: ignore[no-untyped-call]
        except (TypeError, ValueError):
            real = False
        if not real:
            raise ValueError(f"parameter {name!r} is of {dtype}, expected real floating-point numbers")


def as_float(value: Any) -> float:
    """Return a number as a float; nan, which lies within no limits, for anything else."""
    try:
        return float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        return math.inf
