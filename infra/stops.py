"""Texts that end a completion, beside the end-of-sequence tokens."""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Stops:
    """Texts that end a completion (rollout.stop), however they are cut into tokens."""

    texts: tuple[str, ...]
    decode: Callable[[list[list[int]]], list[str]] = field(compare=False)  # many at once

    @property
    def tokens(self) -> int:
        """Count the tokens that a text can lie in: one a byte, and one whose first space a decoder drops."""
        return max(len(text.encode()) for text in self.texts) + 1

    def reached(self, tails: list[list[int]]) -> list[bool]:
        """Tell of each completion, by its last `tokens` or more, whether a text is in it."""
        return [any(text in tail for text in self.texts) for tail in self.decode(tails)]
