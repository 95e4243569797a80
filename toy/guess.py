"""A number from 1 to 8 that the environment thinks of: each guess gets a hint, and few guesses are good."""

import re

LAST = 8
GUESS = re.compile(r"(\d+)\? (higher|lower|yes)\.")


def hint(guess: int, number: int) -> str:
    return "yes" if guess == number else "higher" if guess < number else "lower"


def reply(text: str, row: dict) -> str | None:
    """Answer "4?" by " lower." or " higher.", and the number itself by " yes."."""
    found = re.search(r"(\d+)\?$", text)
    return found and f" {hint(int(found[1]), row['number'])}."


def quick(text: str, row: dict) -> float:
    """Return 1 for the number at the first guess, 0.2 less for each guess more, and 0 if it is not found."""
    hints = [said for _, said in GUESS.findall(text)]
    return 1 - 0.2 * hints.index("yes") if "yes" in hints else 0.0


def found(text: str, row: dict) -> float:
    """Return 1 if the number is found."""
    return float(any(said == "yes" for _, said in GUESS.findall(text)))
