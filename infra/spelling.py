"""Spell questions in one way, so that one is found again however it is dressed."""

import re
import unicodedata
from functools import lru_cache
from itertools import combinations

LEAST = 8       # characters of a question that is looked for within another text
SENTENCES = 30  # ... and the sentences there, the last ones
ONE_FORM = str.maketrans("`´‘’‚‛′‐‑‒–—―−", "'" * 7 + "-" * 7)
# Characters without a width, quotes, marks of bold text, commas but between numbers, and braces, sizes,
# spaces and borders of LaTeX. A pattern looks ahead for the characters that it begins with, which is faster.
UNMEANT = (
    r"[\u00ad\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufe00-\ufe0f\ufeff\"“”„«»~#]"
    r"|(?=['])(?:''(?!\()|'(?![\w('])|(?<![\w'])')|,(?:(?!\s*\d)|(?<!\d,))"
    r"|(?=\*)(?:\*\*(?!\w)|(?<!\w)\*\*)"
    r"|[{}]|(?m:^>)|[dt](?<=\\.)(?=frac|binom)|q(?<=\\[lgn]eq)(?:slant)?\b|,(?<=\d,)(?=\d{3}(?!\d))"
    r"|(?=[\\$])(?:\\?\$|\\[,;:! ()\[\]]|\\(?:q?quad|left|right|displaystyle)\b)")
ENDS = r"(?=[?。\n.:;!<\[])(?:[?。\n]|(?:[.:;]|(?<=[A-Za-z]{2})!)+(?=\s|$)|<[/|｜]?\w+[|｜]?>|\[/?INST\])"


@lru_cache(10_000)
def runs_of(text: str) -> list[str]:
    """Spell a text without case, spaces and all that is UNMEANT, and likewise each run of its sentences and
    lines that has LEAST characters.

    "What is  $2 + x²$?\nReason." -> ["whatis2+x^2reason", "whatis2+x^2", "whatis2+x^2reason"]
    """
    text = unicodedata.normalize("NFKC", re.sub("[⁰¹²³⁴-⁹]+", r"^\g<0>", text.translate(ONE_FORM)))
    parts = ["".join(part.casefold().split()) for part in re.split(ENDS, re.sub(UNMEANT, "", text))]
    last = parts[-SENTENCES:]
    runs = ("".join(last[i:j]) for i, j in combinations(range(len(last) + 1), 2))
    return ["".join(parts), *(run for run in runs if len(run) >= LEAST)]
