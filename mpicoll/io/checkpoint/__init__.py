"""Checkpoints: every rank writes its part, any number of ranks reads it back.

`store` is the door.  `layout` cuts a state into pieces, `view` shows them as whole arrays, `folder` knows
what is on disk, `saving` and `loading` go from one to the other, and `together` lets ranks fail as one.
"""

from mpicoll.io.checkpoint.layout import CheckpointError, Shard
from mpicoll.io.checkpoint.store import Checkpoints, Saved

__all__ = ["CheckpointError", "Checkpoints", "Saved", "Shard"]
