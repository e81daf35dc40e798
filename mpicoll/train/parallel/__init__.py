"""Ways to train what one rank, or one type of number, does not hold."""

from mpicoll.train.parallel.precision import LossScale, MixedPrecision

__all__ = ["LossScale", "MixedPrecision"]
