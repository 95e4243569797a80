"""Choose settings by the memory that there is."""

from leaves.fit.memory import decide

__all__ = ["decide"]
