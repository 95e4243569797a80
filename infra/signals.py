"""Handle the signals that ask a run to stop."""

import signal
import sys
from time import monotonic

from infra import dist


class Stop:
    """SIGTERM or Ctrl-C asks the run to finish its step, save and end; a second one ends it at once.

    torchrun passes on a Ctrl-C that the terminal has sent to its workers already, so what follows within a
    second is still the first.
    """

    def __init__(self):
        self.signal, self.since = 0, 0.0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.ask)

    def ask(self, number: int, frame: object) -> None:
        if not self.signal:
            self.signal, self.since = number, monotonic()
            print("stopping after this step, with a checkpoint; a second signal stops at once",
                  file=sys.stderr)
        elif monotonic() > self.since + 1:
            raise KeyboardInterrupt


def asked_to_stop(stop: Stop | None) -> bool:
    """Tell whether any rank received a stop signal. Collective."""
    return stop is not None and dist.max_over_ranks(stop.signal) > 0
