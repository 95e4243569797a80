"""The settings of the user's own reward functions are among those of `reward`."""

CHOICES = {}
HOOKS = ()
