"""OTB as released, with the own completion in its baseline: a control of otb.py, with bias."""

from functools import partial

from court import otb
from court.otb import wrap as wrap

weigh = partial(otb.weigh, own=True)
