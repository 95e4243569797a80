"""The counts of memory have no settings."""

CHOICES = {}
HOOKS = ("decide", "before_run")
