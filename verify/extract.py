r"""Find the answer that a completion marks as its final one. Every function reads its text once.

The last \boxed{} or \fbox{} counts; \boxed7 is a box too, and so is \\boxed{7} of a text that was escaped
twice. Boxes that are joined by a comma or "and" are one list. A box that is empty or never closes is a wrong
answer. Without a box, the last of "#### x", "<answer>x</answer>" and "the answer is x" counts. Such a mark
behind the last box counts in its place if a sure answer follows it. A box or a mark is none if the words
around it deny it or take it back. The last number of a text without a mark is no answer; only lenient grading
looks at it.
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
# "####" but before a heading, <answer>, a correction, or "answer" with its verb, its colon or its line.
MARK = re.compile(r"""(?ix)
    (?<!\#)\#{4}(?!\#|\s*(?:\d+[.)][ ]+(?!I[ ])[A-Z]|(?:steps?|parts?|cases?|method|approach|attempt|example|
        figure|final|answer|solutions?|solv(?:e|ing)|check(?:ing)?|verif\w+|explanations?|conclusions?|
        summary|recap|results?|notes?|given|problem|question|proof|hint|analysis|reasoning|discussion|
        calculat\w+|comput\w+|find(?:ing)?|using|let|now|simplif\w+|substitut\w+|understand\w*|
        set(?:ting)?[ ]up|key|remarks?|comments?|why|how|what|overview|introduction|intuition|interpretation|
        alternative|details?|takeaways?|tips?)\b))|
    <answer>|
    (?:\bcorrection[*_]*:(?:\s*it[ ]should[ ](?:be|have[ ]been))?|
        \b(?:mistake|wrong|error|oops|sorry)\b[^\n]{0,30}?\bit[ ]should[ ](?:be|have[ ]been)\b|
        (?<![</])(?<!time[ ]to[ ])(?<!confidence[ ]in[ ]the[ ])
        \banswers?\b(?!\s+(?:key|choices|options|sheet|format|check|confidence))
        (?:,[ ](?:which|as|if)[ ][^,.\n]{0,40},)?
        (?:[^.:=\n$\\<!≠]{0,80}?(?:\b(?:is|are)(?:n['’]t)?\b|\b(?:be|equals)\b|[:=])|[*_\#\s]*\n))[\s:*_]*""")
# Words that deny the answer behind them, or only think of it; \0 stands for the answer.
DENIED = re.compile(r"""(?ix)
    # cannot be \0; rather than \0; x \ne \0
    (?:\b(?:not|never|cannot|neither|nor|hardly|scarcely|unlikely|fails?|no[ ](?:longer|way|case)|
            instead[ ]of|rather[ ]than|anything[ ]but|exclud\w+|
            (?:ca|wo|is|does|should|could|would)nt)|n['’]t|\\neq?|≠|(?<=\s)!=)
        (?:[ *_]+(?:be|is|it|to|the|in|any|case|equal|answer|ever|possibly|really|exactly|actually))*
        [\s:*_$\\(\[]*(?:[a-z]\s*=\s*)?\0|
    # I do not think that the answer is \0; one might say ...; if the answer is \0
    \b(?:(?:(?:not|never|hardly|cannot|refuse|nobody|they|one|you|some|someone|many|people|
                (?:his|her|my)[ ]\w+|students)(?:[ ](?:might|may|could|would|will|often|also))?|
                \w+n['’]t|students|tempting)(?:[ ](?:be|to|the))*[ ](?:thinks?|thought|believe|
            say|said|mean|claim|guess|assume|expect|argue|conclude|sure|convinced|certain|true|correct|like|
            likely|clear|case|that)|false|wrong|untrue|unlikely|impossible|no[ ]way|(?<!no[ ])doubt|suppose|
            assume|assuming|let|if|whether)
        (?:[ ](?:that|if|whether|the|my|our|your|this|final|correct))*
        [ ]answers?\b[^.,;\n\0]{0,80}?\b(?:is|are|be|was|were|equals)\b[\s:*_$\\(\[]*\0|
    # no answer is \0; to check our answer: \0; which is the answer \0
    \b(?<!/)(?<!or[ ])(?:wrong|incorrect|false|no)[ ]answers?\b[^.,:;\n\0]*:?\s*\0|
    \b(?:check|verif|test|confirm|plug|substitut)\w*(?:[ ](?:in|that|the|my|our|your|this|final))*[ ]answer
        [^\0]*:\s*\0|
    \bis[ ](?:the|my|our)[ ](?:\w+[ ])?answers?[*_\#\s]*\n[\s:*_]*\0|
    # if n were even, the answer would be \0; the answer would be \0 if; is the answer \0?
    \bif\b[^.\n]*\b(?:were|had)\b[^.\n]*\banswer[ ]would\b[^.\n]*\0|
    \bwould\b[^.\n\0]*\0[^.\n]*\b(?:if|unless|but)\b|
    \b(?:is|are|be)[\s*_]*\0(?:[^.!?\n]|\.\d)*(?<!right)\?""")
# An answer, \0, and words that take it back. A letter, yes and no cannot be: "No. That is wrong."
RETRACTED = re.compile(r"""(?isx)
    (?!\W*(?:\\text\w*\{)?(?:[A-Z]|yes|no|true|false)\W*\0)([^\0]*)\0(?:\W*\?\W*no(?:pe)?\b|
    \W*(?:answer>\W*)?(?:
    # is wrong; wait, that is not right; ... 5 is wrong
    (?:(?:(?:wait|no|but|hmm+|oh|oops|actually|however|sorry|and|so|then|I|think|see|now)\b\W*)*
            (?:(?:that|this|it|which|(?:my|this|that|the)[ ](?:\w+[ ])?answer|the[ ]above)\s*)?|
            .*?(?<!\w)\1\$?\s+)
        (?:(?:is|was|['’]s|would\s+be)\s+(?:\w+ly\s+)?(?:wrong|incorrect|too\s+(?:small|large|big|high|low)|
            an?\s+(?:mistake|error)|not(?:\s+(?:right|correct|the\s+(?:\w+\s+)?answer)|[.!]))|
            (?:isn['’]t|cannot\s+be|can['’]t\s+be|doesn['’]t\s+(?:look|seem))\s+(?:right|correct))
        (?!\s+(?:to|that)\b|\w)|
    (?:is\s+(?:impossible|not\s+possible|ruled\s+out|excluded|out\b)|fails\b|does(?:n['’]t|\s+not)\s+work|
        cannot\s+be\b(?!\s*\w)|isn['’]t\s+it\b)|
    (?:wrong|incorrect|not[ ](?:really|right|correct))\)|
    # actually no; I was wrong; scratch that
    (?:actually|hmm+|oh)\W+no\b|no\W+wait\b|
    (?:\w+\W+){0,3}?(?:I\s+(?:(?:was|am)\s+wrong\b|take\s+(?:that|it|this)\s+back\b|
            made\s+an?\s+(?:mistake|error)\b(?!\s+(?:before|earlier)))|
        (?:scratch|strike|ignore|disregard|forget)\s+(?:that|this|it)\b|never\s*mind\b)|
    # so it is not 5; ... the answer is not 5
    (?:.*?\banswers?\b[^.\n]{0,30}?|(?:(?:so|but|no|wait|and)\W+)*(?:(?:it|this|that)\b[^.\n]{0,20}?)?)
        (?:\b(?:not|never|cannot)|n['’]t)\s+(?:be\s+|equal\s+(?:to\s+)?)?
        (?:\$|\\\(|\\boxed\{)*\1(?!\w|\.\d)))""")
# A mark, \0, an answer, \0, and the text behind it. These are sentences, remarks, and headings before a text.
REMARK = r"""(?i:[^\0]*\0(?:(?:[^\s\0]+\s+){3}[^\s\0]|(?:
    not|neither|never|in|on|at|as|to|of|for|from|by|with|within|between|below|above|under|over|an?|the|what|
    one[ ]of|that|this|these|it|also|now|still|here|see|ok|okay|fine|good|done|correct|right|final|given|
    shown|stated|rounded|expressed|written|divisible|unique|exact|valid|verified|checked|confirmed|consistent|
    reasonable|clear|unclear|complete|simplified|boxed|found|obtained|based|larger|greater|less|more|smaller|
    close|half[ ]of|independent|true[ ]for|required|known|helpful|obvious|likely|probably|possible)\b)|
    \#{4}\0[^\0]*\0(?:</?\w+>|[^\w<])*\w)"""
# These are surely answers: in a tag, like a number or a formula but for "3 times the first", behind a colon.
SURE = re.compile(rf"""(?x)<answer>|
    [^\0]*\0(?!\(?[a-z]\)\s|\w{{1,2}}[.)]\s+[a-zA-Z]{{2}}|\d+(?:st|nd|rd|th)\s|
        [^\0]*\b(?:than|significant|places|digits?[ ]long|times[ ](?:the|as|larger|smaller|more))\b)
    (?:(?i:yes|no|true|false)\W*\0|[*_"'`(]*(?:[^\s\w\0*_"'`(,.;:!?]|\.?\d|[^\Wa-zA-Z_]|
        [a-zA-Z](?![a-zA-Z'’]|\s+(?!and\b|or\b)[a-z]{{2}})|[A-Z]{{2,4}}\s*[=+-]|
        (?:sin|cos|tan|ln|log|exp|sqrt|pi|minus|negative|roughly|around|USD?)\b))|
    (?!{REMARK})[^\0]*(?:[\#:\n]|\0[A-Z][a-z])""")
# And these are none: a denied one, and a sentence without a number behind "the answer is".
NO_ANSWER = re.compile(r"[^\0]*\0never\s|[^\0#:\n]*\0(?:[^\s\0\d\\$]+\s+){3}[^\0\d\\$]+\0")
YES_END = r"(?:(?<=\byes)|(?<=\bno)|(?<=\btrue)|(?<=\bfalse))(?:,| -| \()|"
LINE_END = re.compile(rf"(?i:{YES_END}\n)|</(?:answer|think)>|(?<=[a-z]{{2}})!|"
                      r"[.!]\s+(?=(?:I|We|You|It|The|This|That|So|As|Because|Since|Thus|Hope)\b)")
# Money: an opening dollar sign before a space, or a closing one after a space or before a digit.
MATH = re.compile(r"(?:\$\$(.+?)\$\$|\$(?!\s)([^$\n]+?)(?<![\s\\])\$(?!\d)|\\+\[(.+?)\\+\]|\\+\((.+?)\\+\))"
                  r"[\s.*]*", re.DOTALL)
SENTENCE_END = re.compile(YES_END + r"[.!?*\"]*(?:\.(?=\s|\Z)|\n|\Z|</(?:answer|think)>)|"
                          r"[;,]?\s(?:because|since|which|where|so|given|therefore|thus|hence|but|and not|"
                          r"- not|rather than|instead of|although|even though|(?:is|are) (?:the )?correct|"
                          r"(?:is|are) (?:the )?right)\b|[,;]\s+(?!and\b|or\b)(?=[a-z]{2})", re.IGNORECASE)
VERB = re.compile(r"\A.*\s(?:is|are|equals)\s+", re.DOTALL)
# Behind a formula: the answer is more than that formula.
GOES_ON = re.compile(
    r"(?:is|are|equals|=)\s|"
    r"(?<!\n)(?:(?:\w+illion|thousand|hundred|dozen|and a half|halves|thirds|squared|cubed|pi|"
    r"or (?:more|less|fewer|greater)|to the power)\b|(?:(?:plus|minus|times|over|through|to|out of|less than|"
    r"more than|divided by|percent of)\s+|[-+/^]\s*|:)(?=\$?[\d\\])|\$\\pm|\$[-+])")
FILLER = re.compile(r"^(?:(?:therefore|thus|indeed|then|simply|exactly|just|only|approximately|about|clearly|"
                    r"definitely|certainly|actually|obviously|of course|either|both|none other than|equal to|"
                    r"no other than|option|choice)\b[,:]?\s*)+(?=\S)", re.IGNORECASE)
BUT = re.compile(r"(?i)^(?:not|neither|never)\b[^.\n]*?\b(?:but(?: rather)?|"
                 r"(?:it|that)(?:['’]s| is| (?:must|should) be))\s+")
NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)")


def last_tag(text: str) -> str | None:
    """Return the content of the last <answer>...</answer>."""
    _, opened, content = text.rpartition("</answer>")[0].rpartition("<answer>")
    return content.strip() if opened else None


def last_number(text: str) -> str | None:
    """Return the last number of the answer tag, or of a text without one, commas removed."""
    tag = last_tag(text)
    numbers = NUMBER.findall((text if tag is None else tag).replace(",", ""))
    return numbers[-1].removesuffix(".") if numbers else None


def last_boxed(text: str) -> str | None:
    """Return the content of the last box that is not denied. "" if the last never closes, None for no box."""
    return read_boxes(text)[0]


def read_boxes(text: str) -> tuple[str | None, int]:
    r"""Return the content of the last \boxed{...} or \boxed7, and of the boxes joined to it, and its end.

    The outermost of nested boxes counts. A box that the words around it deny is none.
    """
    boxes, unclosed = find_boxes(text)
    if unclosed:
        return "", len(text)
    for start, end, first, last in boxes[:-MARKS:-1]:
        if not (DENIED.search(text[max(0, start - 100):start] + "\0")
                or RETRACTED.match(f"{text[first:last]}\0{text[end:end + TAIL]}")):
            break
        boxes.pop()
    else:
        return None, 0
    joined = [boxes[-1]]
    for box in reversed(boxes[:-1]):
        between = text[box[1]:min(joined[-1][0], box[1] + 80)]
        if not (BETWEEN_BOXES.fullmatch(between) and re.search(r"[,;]|\band\b|\bor\b", between)):
            break
        joined.append(box)
    contents = [text[start:end] for _, _, start, end in reversed(joined)]
    return ", ".join(dict.fromkeys(contents)), end


def find_boxes(text: str) -> tuple[list[tuple[int, int, int, int]], bool]:
    """Find the outermost boxes: start and end of box and content. Also tell if the last is open."""
    opened, boxes = [], []     # starts of open boxes and of their contents; of an open brace, itself
    for mark in BRACES.finditer(text):
        if mark["bare"]:
            boxes.append((*mark.span(), *mark.span("bare")))
        elif mark[0] == "}":
            start, content = opened.pop() if opened else (0, 0)
            if content > start + 1:
                while boxes and boxes[-1][0] > start:
                    boxes.pop()
                boxes.append((start, mark.end(), content, mark.start()))
        elif len(mark[0]) != 2:  # and no escaped character
            opened.append(mark.span())
    unclosed = [start for start, content in opened if content > start + 1]
    return boxes, unclosed[-1:] > [start for start, *_ in boxes[-1:]]


def read_phrase(tail: str) -> str:
    """Read the answer behind "the answer is": formulas, or a sentence without its remarks."""
    tail = BUT.sub("", FILLER.sub("", tail))
    math, formulas = MATH.match(tail), []
    if math and not GOES_ON.match(tail, math.end()):
        while math:
            formulas.append(next(filter(None, math.groups())))
            gap = re.match(r"(?:,|and\b|or\b|\s)*", tail[math.end():])
            tail = tail[math.end() + gap.end():]
            math = MATH.match(tail) if re.search(r",|and|or", gap[0]) else None
        return ", ".join(formulas)
    answer = VERB.sub("", tail[:SENTENCE_END.search(tail).start()]).strip(" *_`\"':")
    return re.sub(r"(?<=\w)\s+\((?!\s*mod)[^()]*\)$", "", FILLER.sub("", answer))


def extract(text: str) -> str | None:
    """Return the final answer that a completion marks, None if it marks none.

    Thoughts count only if no answer follows them.
    """
    text = undouble(text)
    for searched in dict.fromkeys((text.rpartition("</think>")[2], text)):
        boxed, end = read_boxes(searched)
        named = last_mark(searched, end, least=1 if boxed is None else 3)
        if (answer := boxed if named is None else named) is not None:
            return answer
    return None


def last_mark(text: str, start: int, least: int) -> str | None:
    """Return the answer behind the last of the weightiest marks from `start` on; boxes are no marks here.

    "This answer is correct" does not replace an answer before it. A sure answer weighs 3, words weigh 2, and
    remarks 1. Marks of less weight than `least` do not count.
    """
    answer = None
    for mark in reversed(deque(MARK.finditer(text, start), maxlen=MARKS)):
        before, tail = text[max(0, mark.start() - 100):mark.start()], text[mark.end():mark.end() + TAIL]
        denied = DENIED.search(f"{before}{mark[0]}\0{tail[:80]}")
        if content := read_behind_mark(mark, "never " + tail if denied else tail):
            behind = tail.partition(content)[2]
            said = f"{mark[0]}\0{content}\0{behind}"
            words = 0 if NO_ANSWER.match(said) else 1 if re.match(REMARK, said, re.VERBOSE) else 2
            weight = 3 if SURE.match(said) else words
            if weight >= least and not RETRACTED.match(f"{content}\0{behind}"):
                answer, least = content, weight + 1
    return answer


def read_behind_mark(mark: re.Match, tail: str) -> str:
    """Read the answer that follows a mark."""
    if mark[0] == "<answer>":
        return tail.partition("</answer>")[0].strip() if "</answer>" in tail else ""
    if mark[0] == "####":
        return LINE_END.split(tail.lstrip(": ").strip(), 1)[0].strip(" *")
    return read_phrase(tail)
