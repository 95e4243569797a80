"""Choose settings by the memory that there is, and measure it before a run."""

from leaves.fit.measured import before_run
from leaves.fit.memory import decide

__all__ = ["before_run", "decide"]
