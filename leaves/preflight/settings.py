"""The checks before a run have no settings."""

CHOICES = {}
HOOKS = ("before_run",)
