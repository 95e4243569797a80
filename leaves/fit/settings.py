"""The counts of memory have no settings."""

CHOICES = {}
HOOKS = ("decide",)
