"""What a run shows of itself beside numbers: groups of each step as text."""

from collections.abc import Callable, Iterable, Iterator

from records import Batch, Rolled

Decode = Callable[[Iterable[int], bool], str]  # of tokens, and whether special ones are written out


def samples(rolled: Rolled, batch: Batch, decode: Decode, count: int) -> list[dict]:
    """Write out the first groups whose completions have all ended, each a line of samples.jsonl."""
    trained = {id(group): n for n, group in enumerate(batch.groups)}
    ended = [n for n, group in enumerate(rolled.groups) if not any(s.pending for s in group.samples)]
    lines = []
    for n in ended[:count]:
        group = rolled.groups[n]
        completions = list(written_out(rolled, n, batch, trained.get(id(group)), decode))
        lines.append({"id": group.prompt.id, "prompt": decode(group.prompt.ids, True),
                      "gold": group.prompt.answer, "completions": completions})
    return lines


def written_out(rolled: Rolled, n: int, batch: Batch, place: int | None, decode: Decode) -> Iterator[dict]:
    """Yield the completions of the n-th group, which is trained on at `place` of the batch, or not at all
    (None). The advantage is that of the rewards, before a critic or a reference changes it."""
    pruned, components = batch.pruned, rolled.rewards.components
    for g, sample in enumerate(rolled.groups[n].samples):
        yield {
            "text": decode(sample.ids, True), "tokens": sample.length, "finished": sample.finished,
            "reward": rolled.rewards.total_NG[n, g].item(),
            "components": {name: value_NG[n, g].item() for name, value_NG in components.items()},
            "advantage": rolled.adv_NG[n, g].item(),
            "kept": place is not None and bool(pruned.keep_NG[place, g]),
            "prob": None if place is None else pruned.prob_NG[place, g].item(),
            "weight": 0.0 if place is None else pruned.weight_NG[place, g].item(),
        }
