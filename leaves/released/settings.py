"""Settings of a system prompt that is read from a file: data.system_prompt as a section."""

from settings.loader import frozen


@frozen
class Text:
    """A text in a file, such as one of a checkout of a release."""
    file: str                      # .yaml, .json or .py; of any other file it is the whole
    field: str | None = None       # a.b.c in yaml or JSON; in Python the variable that has the text
    sha256: str | None = None      # of the text, in UTF-8: another text is an error


CHOICES = {}
HOOKS = ("read",)
