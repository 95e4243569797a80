"""The page has no settings: every run ends with a summary, and report.py draws the rest."""

CHOICES = {}
HOOKS = ("parts", "watch")
