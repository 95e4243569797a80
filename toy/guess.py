"""A number from 1 to 8 that the environment thinks of: each guess gets a hint, and few guesses are good."""

import re

LAST = 8


def hint(guess: int, number: int) -> str:
    if guess == number:
        return "yes"
    return "higher" if guess < number else "lower"


def reply(text: str, row: dict) -> str | None:
    """Answer "4?" by " lower." or " higher.", and the number itself by " yes."."""
    asked = re.search(r"(\d+)\?$", text)
    return asked and f" {hint(int(asked[1]), row['number'])}."


def guesses(turns: tuple[str, ...]) -> list[int]:
    return [int(guess) for guess in re.findall(r"(\d+)\?", "".join(turns[::2]))]


def quick(turns: tuple[str, ...], row: dict) -> float:
    """Return 1 for the number at the first guess, 0.2 less for each guess more, and 0 if it is not found."""
    made, number = guesses(turns), row["number"]
    if number not in made:
        return 0.0
    return max(0.0, 1 - 0.2 * made.index(number))


def found(turns: tuple[str, ...], row: dict) -> float:
    """Return 1 if the number is among the guesses."""
    return float(row["number"] in guesses(turns))
