r"""Find the answer that a completion marks as its final one. Every function reads its text once.

The last \boxed{} or \fbox{} counts; \boxed7 is a box too, and so is \\boxed{7} of a text that was escaped
twice. Boxes that are joined by a comma or "and" are one list. A box that is empty or never closes is a wrong
answer. Without a box, the last of "#### x", "<answer>x</answer>" and "the answer is x" counts. The last
number of a text without a mark is no answer; only lenient grading looks at it.
"""

import re
from collections import deque

from verify.spelling import undouble

TAIL, MARKS = 1000, 50  # characters read after a mark; only so many last marks are tried

BOX = r"(?<!\\)\\+(?:boxed|fbox)(?![a-zA-Z])\s*"  # a model may write its backslash twice
BRACED = r"\{(?:[^{}]|\{[^{}]*\})*\}"
# A box without braces holds one token in TeX. Here it holds the formula or the number up to a space or a
# comma, because a reader of \boxed12 and \boxed2\sqrt3 means the whole. Words in a box need braces.
BARE = (r"(?=[-+.(\\$]*[^\W_])(?!\(?[a-zA-Z]{2})"
        r"(?:[^\s{}()\[\]$\\,<`*?\u3000-\u9fff\uff00-\uffef]|,(?=\d{3}(?!\d))|<(?!/)|\*+(?=\w)|\([^()]*\)|"
        r"\[[^\[\]]*\]|\\[$%]|\\(?:text|math|[dt]?frac|sqrt)[a-z]*\s+[a-zA-Z](?![a-zA-Z])|"
        rf"\\(?!end|q?quad|hspace|tag|label)[a-zA-Z]+(?:\s*(?:{BRACED}|\d))*|{BRACED})+")
BRACES = re.compile(rf"{BOX}\{{|{BOX}(?P<bare>{BARE})|\\.|[{{}}]", re.DOTALL)
BETWEEN_BOXES = re.compile(r"(?:[\s$,;&{}]|\b[a-zA-Z](?:_\w)?\s*=|\\[()\[\],;: \\]|\\{1,2}(?:q?quad\b|text)|"
                           r"\band\b|\bor\b|\bfor part \(\w\))*")
MARK = re.compile(r"####(?!#)(?!\s*(?:step|part|case|\d\.[ ]+[A-Z]))|<answer>|"
                  r"(?<![</])\banswers?\b(?:[^.:=\n$\\<]{0,80}?(?:\b(?:is|are|be|equals)\b|[:=])|[*_#\s]*\n)"
                  r"[\s:*_]*", re.IGNORECASE)
# Money: an opening dollar sign before a space, or a closing one after a space or before a digit.
MATH = re.compile(r"(?:\$\$(.+?)\$\$|\$(?!\s)([^$\n]+?)(?<![\s\\])\$(?!\d)|\\+\[(.+?)\\+\]|\\+\((.+?)\\+\))"
                  r"[\s.*]*", re.DOTALL)
SENTENCE_END = re.compile(r"[.!?*\"]*(?:\.(?=\s|\Z)|\n|\Z|</answer>)|"
                          r"[;,]?\s(?:because|since|which|where|so|given|therefore|thus|hence)\b|"
                          r",\s+(?!and\b|or\b)(?=[a-z]{2})", re.IGNORECASE)
VERB = re.compile(r".*\s(?:is|are|equals)\s+", re.DOTALL)
FILLER = re.compile(r"^(?:(?:therefore|thus|indeed|then|simply|exactly|just|only|approximately|about|clearly|"
                    r"option|choice)\b,?\s*)+(?=\S)", re.IGNORECASE)
NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)")


def last_tag(text: str) -> str | None:
    """Return the content of the last <answer>...</answer>."""
    head, closed, _ = text.rpartition("</answer>")
    _, opened, content = head.rpartition("<answer>")
    return content.strip() if closed and opened else None


def last_number(text: str) -> str | None:
    """Return the last number of the answer tag, or of a text without one, commas removed."""
    tag = last_tag(text)
    numbers = NUMBER.findall((text if tag is None else tag).replace(",", ""))
    return numbers[-1].removesuffix(".") if numbers else None


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} or \boxed7, and of the boxes joined to it.

    The outermost of nested boxes counts. "" if the last box never closes, None if there is no box.
    """
    boxes, unclosed = find_boxes(text)
    if unclosed:
        return ""
    if not boxes:
        return None
    joined = [boxes[-1]]
    for box in reversed(boxes[:-1]):
        between = text[box[1]:min(joined[-1][0], box[1] + 80)]
        if not (BETWEEN_BOXES.fullmatch(between) and re.search(r"[,;]|\band\b|\bor\b", between)):
            break
        joined.append(box)
    contents = [text[start:end] for _, _, start, end in reversed(joined)]
    return ", ".join(dict.fromkeys(contents))


def find_boxes(text: str) -> tuple[list[tuple[int, int, int, int]], bool]:
    """Find the outermost boxes: start and end of box and content. Also tell if the last is open."""
    stack: list[tuple[int, int] | None] = []     # an open brace: starts of its box and content, or None
    boxes = []
    newest = -1
    for mark in BRACES.finditer(text):
        if mark["bare"]:
            newest = mark.start()
            boxes.append((*mark.span(), *mark.span("bare")))
        elif mark[0] == "}":
            box = stack.pop() if stack else None
            if box:
                while boxes and boxes[-1][0] > box[0]:
                    boxes.pop()
                boxes.append((box[0], mark.end(), box[1], mark.start()))
        elif mark[0] == "{":
            stack.append(None)
        elif len(mark[0]) > 2:  # and no escaped character
            newest = mark.start()
            stack.append(mark.span())
    return boxes, any(box and box[0] == newest for box in stack)


def read_phrase(tail: str) -> str:
    """Read the answer behind "the answer is": formulas, or a sentence without its remarks."""
    tail = FILLER.sub("", tail)
    math, formulas = MATH.match(tail), []
    if math and not re.match(r"\s*(?:is|are|equals|=)\s", tail[math.end():]):
        while math:
            formulas.append(next(filter(None, math.groups())))
            gap = re.match(r"(?:,|and\b|or\b|\s)*", tail[math.end():])
            tail = tail[math.end() + gap.end():]
            math = MATH.match(tail) if re.search(r",|and|or", gap[0]) else None
        return ", ".join(formulas)
    answer = VERB.sub("", tail[:SENTENCE_END.search(tail).start()]).strip(" *_`\"'")
    return re.sub(r"(?<=\w)\s+\([^()]*\)$", "", FILLER.sub("", answer))


def extract(text: str) -> str | None:
    """Return the final answer that a completion marks, None if it marks none.

    Thoughts count only if no answer follows them.
    """
    text = undouble(text)
    for searched in dict.fromkeys((text.rpartition("</think>")[2], text)):
        for find in (last_boxed, last_mark):
            if (answer := find(searched)) is not None:
                return answer
    return None


def last_mark(text: str) -> str | None:
    """Return the answer behind the last mark; boxes are no marks here.

    An answer in words counts only if no mark has a number or a formula: "this answer is correct" does not
    replace an answer before it.
    """
    in_words = None
    for mark in reversed(deque(MARK.finditer(text), maxlen=MARKS)):
        content = read_behind_mark(mark, text[mark.end():mark.end() + TAIL])
        if re.search(r"[\d\\$]|\A\(?[A-Z]\)?\Z", content) or content and mark[0] == "<answer>":
            return content
        if content and mark[0] != "####" and len(content.split()) <= 3:
            in_words = in_words or content
    return in_words


def read_behind_mark(mark: re.Match, tail: str) -> str:
    """Read the answer that follows a mark."""
    if mark[0] == "<answer>":
        return tail.partition("</answer>")[0].strip() if "</answer>" in tail else ""
    if mark[0] == "####":
        return tail.lstrip(": ").strip().partition("\n")[0].partition("</answer>")[0]
    return read_phrase(tail)
