"""Which algorithm serves a call, and how its message is cut: no MPI, no arrays."""

from .selection import DEFAULTS, TRANSPORTS, Choice, Rule, Selection, Setting, preferred

__all__ = ["DEFAULTS", "TRANSPORTS", "Choice", "Rule", "Selection", "Setting", "preferred"]
