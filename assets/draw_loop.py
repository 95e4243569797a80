"""Draw assets/loop.svg: one step of the loop, with completions that are pruned and packed.

    python assets/draw_loop.py

The numbers are computed, not sketched: rewards of two groups of eight, their standardised advantages, and one
draw of prune.completions.kind=bernoulli at drop_prob 1/2: a small |A| is dropped with probability 1/2, and
weighs 2 if it survives. The panel has its own background, so it reads on light and on dark pages.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import mean, pstdev

INK = "#26323a"
MUTED = "#62717a"
PAPER = "#f6f4ee"
EDGE = "#b9b5a8"
RIGHT = "#2f8f6b"
WRONG = "#c8643c"
PROMPT = "#8a95a0"
BACK = "#4a6fa5"
WIDTH = 1120
HEIGHT = 404
PITCH = 14     # from line to line
TOP = 92
UNIT = 8.5     # width of a token
CAPACITY = 31  # tokens of a packed row


@dataclass(frozen=True, slots=True)
class Completion:
    length: int
    right: bool
    survives: bool  # the draw, for a small |A|


def make_group(lengths: list[int], right: list[int], surviving: list[int]) -> list[Completion]:
    return [Completion(length, i in right, i in surviving) for i, length in enumerate(lengths)]


GROUPS = (
    make_group([8, 12, 7, 10, 15, 9, 6, 11], right=[1, 5], surviving=[0, 1, 3, 5, 7]),
    make_group([9, 7, 13, 8, 10, 12, 6, 9], right=[0, 1, 3, 4, 5, 7], surviving=[1, 2, 4, 6, 7]),
)
STAGES = (
    (18, "1 draw", "history.py", "skip q at times"),
    (128, "2 sample", "rollout.py", "o\u1d62 ~ \u03c0(\u00b7|q)"),
    (290, "3 score", "reward.py", "r\u1d62"),
    (382, "4 compare", "advantage.py", "A\u1d62 = (r\u1d62 \u2212 mean) / std"),
    (560, "5 prune", "prune.py", "v\u1d62 = 1/p\u1d62 or 0"),
    (714, "6 pack", "pack.py", "each prompt once"),
    (1000, "7 update", "loss.py", "\u2212\u03a3 w f A \u2207log \u03c0"),
)


def text(x: float, y: float, words: str, size: int = 13, fill: str = INK, weight: str = "normal") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" font-weight="{weight}">{words}</text>'


def bar(x: float, y: float, width: float, fill: str, height: float = 9, ghost: bool = False) -> str:
    paint = f'fill="{fill}"'
    if ghost:
        paint = f'fill="none" stroke="{fill}" stroke-opacity="0.6" stroke-dasharray="3 2"'
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" {paint}/>'


def path(points: str, arrow: bool = True) -> str:
    end = ' marker-end="url(#head)"' if arrow else ""
    return f'<path d="{points}" fill="none" stroke="{BACK}" stroke-width="2"{end}/>'


def advantages(group: list[Completion]) -> list[float]:
    rewards = [float(c.right) for c in group]
    middle, deviation = mean(rewards), pstdev(rewards)
    return [(r - middle) / deviation for r in rewards]


def weights(group: list[Completion]) -> list[int]:
    """Weigh a completion 1 if its |A| is at or above the group's mean |A|, else 2 or 0 by the draw."""
    sizes = [abs(a) for a in advantages(group)]
    chosen = []
    for size, c in zip(sizes, group, strict=True):
        drawn = 2 if c.survives else 0
        chosen.append(1 if size >= mean(sizes) else drawn)
    return chosen


def colour(completion: Completion) -> str:
    return RIGHT if completion.right else WRONG


def draw_group(top: float, number: int, group: list[Completion]) -> list[str]:
    """Draw stages 1 to 5 of one group, a line for each completion."""
    marks = [
        bar(24, top + 40, 54, PROMPT, 22),
        path(f"M 82 {top + 51:g} H 120"),
        text(43, top + 56, f"q{number}", fill=PAPER, weight="bold"),
    ]
    for i, (c, adv, weight) in enumerate(zip(group, advantages(group), weights(group), strict=True)):
        y = top + i * PITCH
        width, fill = c.length * UNIT, colour(c)
        reward = "1" if c.right else "0"
        times = f"\u00d7{weight}" if weight else ""
        marks.append(bar(130, y, width, fill))
        marks.append(text(300, y + 9, reward, 12, fill, "bold"))
        marks.append(bar(446 + min(adv, 0) * 26, y, abs(adv) * 26, fill))
        marks.append(bar(562, y, width, fill, ghost=not weight))
        marks.append(text(562 + width + 5, y + 9, times, 11, MUTED))
    marks.append(f'<path d="M 446 {top - 4:g} V {top + 8 * PITCH:g}" stroke="{MUTED}" stroke-width="1"/>')
    return marks


def pack() -> list[list[tuple[int, str]]]:
    """Pack each group's prompt before all of its kept completions: rows of (tokens, colour)."""
    rows = []
    for group in GROUPS:
        row = [(2, PROMPT)]
        for c, weight in zip(group, weights(group), strict=True):
            if not weight:
                continue
            if sum(n for n, _ in row) + c.length > CAPACITY:
                rows.append(row)
                row = [(2, PROMPT)]
            row.append((c.length, colour(c)))
        rows.append(row)
    return rows


def draw_rows(top: float) -> list[str]:
    marks = []
    for i, row in enumerate(pack()):
        x, y = 716.0, top + i * 30
        marks.append(f'<rect x="{x:g}" y="{y:g}" width="{CAPACITY * UNIT}" height="18" rx="3" fill="none" '
                     f'stroke="{EDGE}"/>')
        for length, fill in row:
            marks.append(bar(x + 0.5, y + 2, length * UNIT - 1, fill, 14))
            x += length * UNIT
    return marks


def picture() -> str:
    marks = [f'<rect x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="12" fill="{PAPER}" '
             f'stroke="{EDGE}"/>']
    for x, name, file, formula in STAGES:
        marks += [text(x, 28, name, 17, weight="bold"), text(x, 46, file, 12, BACK)]
        marks.append(text(x, 66, formula, 13, MUTED))
    second = TOP + 8 * PITCH + 22
    marks += draw_group(TOP, 1, GROUPS[0]) + draw_group(second, 2, GROUPS[1])
    skipped = second + 8 * PITCH + 10
    marks += [
        bar(24, skipped, 54, PROMPT, 22, ghost=True),
        text(43, skipped + 16, "q3", fill=MUTED),
        text(86, skipped + 16, "skipped", 12, MUTED),
    ]
    marks += draw_rows(TOP + 30)
    middle = TOP + 30 + 15 * len(pack())
    marks += [
        path(f"M 990 {middle:g} H 1016"),
        f'<rect x="1020" y="{middle - 28:g}" width="76" height="56" rx="8" fill="{BACK}"/>',
        text(1047, middle + 9, "\u03c0", 26, PAPER, "bold"),
        path(f"M 1058 {middle + 30:g} V {HEIGHT - 24} H 206 V {skipped - 2:g}"),
        text(470, HEIGHT - 32, "new weights go into the engine that samples the next step", 13, BACK),
    ]
    return "\n".join(marks)


def svg() -> str:
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"
     font-family="Segoe UI, Helvetica, Arial, sans-serif">
<title>One step of Winnow: draw prompts, sample groups, score, compare, prune, pack, update</title>
<defs><marker id="head" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="6" markerHeight="6" orient="auto">
<path d="M 0 0 L 8 4 L 0 8 z" fill="{BACK}"/></marker></defs>
{picture()}
</svg>
"""


if __name__ == "__main__":
    Path(__file__).with_name("loop.svg").write_text(svg(), encoding="utf-8")
