"""Citing has no settings: the command line of eval.py asks for it."""

CHOICES = {}
HOOKS = ()
