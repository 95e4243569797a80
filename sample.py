"""The records that flow from stage to stage. Frozen, complete at birth: no later stage fills anything in."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One line of a data set."""

    id: str
    question: str
    answer: str          # the gold final answer alone
    solution: str = ""   # worked gold solution where the data has one


@dataclass(frozen=True, slots=True)
class Prompt:
    """A problem rendered through the model's chat template."""

    id: str
    ids: tuple[int, ...]   # up to and including the generation prompt
    answer: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion, exactly as the behaviour policy produced it."""

    ids: tuple[int, ...]      # sampled tokens, including EOS when `finished`
    logp: tuple[float, ...]   # log pi(ids[t] | prompt, ids[:t]) in nats at the sampling temperature, before any top-p
    finished: bool            # True: ended with an EOS.  False: cut at rollout.max_new_tokens

    def __post_init__(self):
        if not self.ids or len(self.ids) != len(self.logp):
            raise ValueError(f"a Sample needs at least one token and one logp each, "
                             f"not {len(self.ids)} ids and {len(self.logp)} logp")


@dataclass(frozen=True, slots=True)
class Group:
    """The G completions of one prompt."""

    prompt: Prompt
    samples: tuple[Sample, ...]
