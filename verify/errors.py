"""The error that verify/ raises for a mistake that its user can mend."""


class VerifyError(ValueError):
    """The labelled cases or the calling program must be mended; the message says which part, and how."""
