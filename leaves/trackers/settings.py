"""Settings of trackers: `log.to` names them."""

CHOICES = {}
HOOKS = ("decide", "watch")
