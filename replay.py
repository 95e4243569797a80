"""Do one step of a run again, and show the effect of another pruning.

    [torchrun --nproc_per_node N] replay.py RUN_DIR --step K [--set prune.completions.kind=...] [--draws 200]

The policy is the checkpoint before the step; before step 1 it is the initial policy. The prompts come from
decisions.jsonl, and their completions are sampled again: tokens other than the logged ones are an error.
Printed are the groups that were trained on: advantages, and which completions were kept, with probability and
weight. Then the gradients before the policy moves: of the full batch, of the run's
survivors, and of the survivors of the pruning given by --set. A random pruning is drawn again --draws times.
Last, the step's own update is done again, and its gradient norm compared with the logged one. Nothing is
written into the run folder.

Dimension key:  N groups,  G completions per group,  P weights of this rank.
"""

from infra import commands

if __name__ == "__main__":  # before the imports that take seconds
    commands.of_replay(__doc__)

import json
import math
import shutil
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from tempfile import mkdtemp

import torch
from torch import Tensor

import config
from collect import Selection, choose
from config import Config, ConfigError
from infra import dist, runfolder
from infra.checkpoint import replayable_steps
from infra.copies import COPIES
from infra.device import find_device
from infra.dist import say
from infra.lines import blame_file, read_log, read_metrics
from infra.runfolder import SOFT_VALUES
from infra.signals import exit_status
from learner import Learner
from metrics import Clock, list_decisions
from records import Batch, Metrics, PromptDraw, Rolled, frozen, lengths
from settings import kinds, leaves
from train import Parts, Run, prepare
from update import add_gradients, minibatch, prepare_rows, update

# --set may change the settings with these beginnings.
MAY_CHANGE = ("prune.completions.", "prune.tokens.", "prune.truncated", "loss.denominator")


# ---- the step again

def step_config(folder: Path, step: int, changes: list[str]) -> Config:
    """Read the config that a step ran with, and change it."""
    path, until = folder / "config.yaml", math.inf
    for earlier in folder.glob("config_until_*[0-9].yaml"):
        last = int(earlier.stem.rpartition("_")[2])
        if step <= last < until:
            path, until = earlier, last
    if not path.is_file():
        raise ConfigError(f"{folder} is not a run folder: it has no config.yaml")
    changes = list(changes)
    # The user's own files may have changed since the run began: read the copies made then.
    for setting, name in COPIES.items():
        if (folder / name).is_file():
            changes.append(f"{setting}={json.dumps(str(folder / name))}")
    cfg = config.load(path, changes)
    return config.with_value(cfg, "log.to", None) if "trackers" in leaves.chosen(cfg) else cfg


def require_pruning_alone(own: Config, given: Config) -> None:
    """Raise ConfigError if --set changes a setting that acts before completions are pruned."""
    for key, change in runfolder.changed_settings(own, given).items():
        if not key.startswith(MAY_CHANGE):
            raise ConfigError(f"--set {change}: the step has been rolled out; here prune.completions.*, "
                              "prune.tokens.*, prune.truncated and loss.denominator can be set")


def read_step(folder: Path, step: int) -> tuple[dict, dict]:
    """Find a step's lines in decisions.jsonl and metrics.jsonl. Raises ConfigError if it cannot be done
    again."""
    decided = {line["step"]: line for line in read_log(folder / "decisions.jsonl")}
    if step not in decided:
        raise ConfigError(f"--step {step}: {folder} has done {max(decided, default=0)} steps")
    if "rounds" not in decided[step]:
        raise ConfigError(f"{folder} is of a version that did not hash its tokens, and cannot be replayed")
    able = replayable_steps(folder, max(decided))
    if step not in able:
        raise ConfigError(
            f"--step {step} needs the policy before it, checkpoints/step_{step - 1:06d}, which {folder} does "
            f"not have; it can replay {', '.join(map(str, able))}; a run keeps every step's with "
            "checkpoint.every=1 and checkpoint.keep=all")
    measured = [line for line in read_metrics(folder / "metrics.jsonl") if "time/step" in line]
    return decided[step], next(line for line in measured if line["step"] == step)


@contextmanager
def run_before(folder: Path, step: int, cfg: Config) -> Iterator[Run]:
    """Load a run as it was before a step, in a temporary folder: resume it there, or begin it again."""
    there = dist.on_first(lambda: Path(mkdtemp(prefix="replay_")))
    cfg = replace(cfg, out=str(there))
    try:
        if dist.rank() == 0:
            link_run(folder, there, cfg, step)
        dist.barrier()
        run = prepare(cfg, "always" if step > 1 else "never")
        dist.barrier()  # every rank has read its files
        yield run
        run.log.unlock()
    finally:
        if dist.rank() == 0:
            shutil.rmtree(there)


def link_run(folder: Path, there: Path, cfg: Config, step: int) -> None:
    """Copy a run's small files into a new folder, and link the checkpoint before a step."""
    (there / "config.yaml").write_text(config.dump(cfg))
    files = [folder / name for name in (*COPIES.values(), SOFT_VALUES)]
    if step > 1:
        files = [*files[:-1], *runfolder.RunLog(folder).logs()]
    for path in filter(Path.is_file, files):  # each is replaced before it is written
        (there / path.name).symlink_to(path.resolve())
    if step > 1:
        before = folder / "checkpoints" / f"step_{step - 1:06d}"
        (there / "checkpoints").mkdir()
        (there / "checkpoints" / before.name).symlink_to(before.resolve())


def find_draws(parts: Parts, line: dict) -> list[PromptDraw]:
    """Return the prompts that a line of decisions.jsonl names, as they were drawn."""
    try:
        return parts.history.recall(line["prompts"])
    except KeyError as unknown:
        raise ConfigError(f"data.train={parts.cfg.data.train} is not what it was: there is no "
                          f"{unknown.args[0]}") from None


def roll_again(parts: Parts, line: dict) -> Rolled:
    """Sample and score the groups of a line of decisions.jsonl, in the rounds that they came in."""
    parts = leaves.through("begin", parts.cfg, parts)
    draws = find_draws(parts, line)
    kept = list(accumulate(draw.kept for draw in draws))
    rolled = Rolled()
    for total in accumulate(line["rounds"]):
        first = len(rolled.draws)
        offered = draws[first:bisect_right(kept, total)]
        groups = parts.sampler.rollout(offered)
        rewards = parts.sampler.score(groups)
        adv_NG = parts.advantage(groups, rewards, parts.cfg.advantage)
        rolled += Rolled(offered, groups, rewards, adv_NG)
    return rolled


def require_same_step(line: dict, rolled: Rolled, batch: Batch, engine: str) -> None:
    """Raise ConfigError if the step came out with other tokens or weights than the run has logged."""
    both = zip(line["prompts"], list_decisions(rolled, batch)["prompts"], strict=True)
    pairs = [(old, new) for old, new in both if "tokens" in old]
    other = [old["id"] for old, new in pairs if old["tokens"] != new["tokens"]]
    if other:
        raise ConfigError(
            f"{len(other)} of {len(pairs)} groups have come out with other tokens than those whose hash "
            f"decisions.jsonl has, the first that of {other[0]}, so this would be another step: model, data, "
            f"device, libraries or code are not those of the run, or rollout.engine={engine} does not sample "
            "the same twice, which only the embedded engine promises")
    for old, new in pairs:
        weights, again = (torch.tensor(prompt.get("completion_weight", [])) for prompt in (old, new))
        same = weights.shape == again.shape and torch.allclose(weights, again)
        if not same or old.get("completion_tokens") != new.get("completion_tokens"):
            raise ConfigError(f"the completions of {old['id']} have the tokens that decisions.jsonl says, "
                              "but other weights: the code, or what the reward calls, has changed since")


# ---- gradients

def gradient(learner: Learner, batch: Batch) -> Tensor:
    """Compute the gradient of a whole batch before the policy has moved, [P]."""
    weighed = minibatch(learner, batch, list(range(batch.offered)))
    prepared = prepare_rows(learner, learner.rows(weighed), extra_pass=False)
    add_gradients(learner, weighed, prepared, unmoved=True)
    parts = []
    for p in learner.policy.parameters():
        if p.requires_grad:
            part = torch.zeros_like(p) if p.grad is None else p.grad
            parts.append(dist.local_shard(part).flatten().cpu())
    learner.policy.zero_grad()
    return torch.cat(parts)


def compare_gradients(own_P: Tensor, full_P: Tensor) -> Tensor:
    """Compute a gradient's norm, its cosine with the full batch's gradient, and its squared error over the
    full batch's squared norm, [3]."""
    sums_4 = torch.zeros(4, dtype=torch.float64)
    for own, full in zip(own_P.split(2**20), full_P.split(2**20), strict=True):
        own, full = own.double(), full.double()
        missing = own - full
        sums_4 += torch.stack([own @ own, full @ full, own @ full, missing @ missing])
    square, whole, common, error = torch.stack(dist.gather([sums_4])).sum(dim=0)
    cosine = common / (square * whole).sqrt()
    return torch.stack([square.sqrt(), cosine, error / whole])


# ---- prunings side by side

@frozen
class Arm:
    """A pruning, and its result for the step."""

    name: str
    learner: Learner      # with its loss.denominator
    selection: Selection
    batch: Batch          # by the step's own draw

    @staticmethod
    def of(name: str, run: Run, cfg: Config, rolled: Rolled, seed: int) -> "Arm":
        learner = replace(run.parts.learner, loss=cfg.loss)
        selection = Selection.of(cfg)
        return Arm(name, learner, selection, choose(rolled, selection, seed))


# ---- printing

def print_gradients(arms: list[Arm], rolled: Rolled, draws: int) -> None:
    """Print how the gradients of prunings compare with the gradient of the first, which keeps everything."""
    say(f"\n{'gradient':<22}{'kept':>8}{'tokens':>10}{'norm':>12}{'cosine':>9}{'squared error':>15}")
    gradients = [gradient(arm.learner, arm.batch) for arm in arms]
    full_P = gradients[0]
    for arm, own_P in zip(arms, gradients, strict=True):
        print_gradient(arm.name, [arm.batch], [compare_gradients(own_P, full_P)])
        drawn = draw_again(arm, rolled, draws)
        if drawn:
            figures = [compare_gradients(gradient(arm.learner, batch), full_P) for batch in drawn]
            print_gradient(f"  mean of {draws} draws", drawn, figures)


def draw_again(arm: Arm, rolled: Rolled, draws: int) -> list[Batch]:
    """Draw a pruning so often; none if nothing is left to chance."""
    weight_NG = arm.batch.pruned.weight_NG
    drawn = []
    differs = bool(arm.batch.tokens)
    for i in range(draws):
        batch = choose(rolled, arm.selection, dist.seed_for(arm.batch.seed, i, "draw"))
        differs |= not batch.pruned.weight_NG.equal(weight_NG)
        drawn.append(batch)
    return drawn if differs else []


def print_gradient(name: str, batches: list[Batch], figures: list[Tensor]) -> None:
    """Print the means over batches of survivors, tokens and `compare_gradients`."""
    counts = [count_kept(batch) for batch in batches]
    kept, tokens = torch.tensor(counts, dtype=torch.float64).mean(dim=0)
    norm, cosine, error = torch.stack(figures).mean(dim=0)
    say(f"{name:<22}{kept:>8g}{tokens:>10g}{norm:>12.5g}{cosine:>9.4f}{error:>15.4f}")


def count_kept(batch: Batch) -> tuple[int, int]:
    """Count the survivors, and their tokens with a gradient, up to their cuts."""
    trained_NG = batch.trained_NG
    length_NG = lengths(batch.groups, trained_NG.shape[1])
    if batch.tokens:
        length_NG = torch.tensor([list(map(len, weights)) for weights in batch.tokens])
    return int(batch.pruned.keep_NG.sum()), int((trained_NG * length_NG).sum())


def describe_pruning(cfg: Config) -> str:
    """Name a pruning by its settings."""
    sections = [cfg.prune.completions]
    if cfg.prune.tokens.kind != "none":
        sections.append(cfg.prune.tokens)
    words = []
    for section in sections:
        settings = asdict(section)
        words.append(settings.pop("kind"))
        words += [f"{key}={value}" for key, value in settings.items()]
    truncated = ", truncated" if cfg.prune.truncated else ""
    return f"{' '.join(words)}, loss.denominator={cfg.loss.denominator}{truncated}"


def print_groups(arms: list[Arm], rolled: Rolled) -> None:
    """Print the fate of each completion under each pruning."""
    count = len(arms[0].batch.groups)
    say(f"{len(rolled.draws)} prompts offered, {len(rolled.groups)} rolled out, {count} trained on; under "
        "each pruning the probability to be kept, and the weight of what was")
    say(f"{'reward':>8}{'advantage':>11}" + "".join(f"{arm.name:>13}{'weight':>8}" for arm in arms))
    for n in range(count):
        print_group(arms, n)


def print_group(arms: list[Arm], n: int) -> None:
    """Print a group: one line for all completions of the same outcome."""
    batch = arms[0].batch
    draw, samples = batch.draws[n], batch.groups[n].samples
    drawn = ""
    if draw.prob < 1:
        drawn = f", rolled out with probability {draw.prob:.3g} at weight {draw.weight:.3g}"
    say(f"{draw.prompt.id}, epoch {draw.epoch}{drawn}")
    alike = defaultdict(list)
    for g in range(len(samples)):
        outcome = f"{batch.reward_NG[n, g]:>8.3g}{batch.adv_NG[n, g]:>11.3f}"
        for arm in arms:
            pruned = arm.batch.pruned
            weight = f"{pruned.weight_NG[n, g]:.3g}"
            outcome += f"{pruned.prob_NG[n, g]:>13.3g}{weight if weight != '0' else '-':>8}"
        alike[outcome].append(g)
    for outcome, places in alike.items():
        counts = [samples[g].length for g in places]
        tokens = f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else f"{counts[0]}"
        say(f"{outcome}   {tokens + ' tokens:':<17} {' '.join(map(str, places))}")


def print_agreement(again: Metrics, logged: Metrics) -> None:
    """Print how far the gradient of the step's own update is from the one that was logged."""
    if "train/grad_norm" not in again:
        say("\nthe policy does not learn in this step")
        return
    norm, before = again["train/grad_norm"], logged["train/grad_norm"]
    how = "the same bit for bit"
    if norm != before:
        how = f"{abs(norm - before) / max(norm, before):.1e} of it apart"
    say(f"\nnorm in the step's own update {norm!r}, logged {before!r}: {how}")


def replay(folder: Path, step: int, changes: list[str], draws: int) -> None:
    """Do a step again and print it. Raises ConfigError."""
    line, logged = read_step(folder, step)
    own = step_config(folder, step, [])
    given = step_config(folder, step, changes)
    require_pruning_alone(own, given)
    everything = replace(own.prune, completions=kinds.KeepAll(), tokens=kinds.WholeCompletions())
    configs = {"full batch": replace(own, prune=everything), "the run's": own}
    if given != own:
        configs["--set"] = given
    dist.init(find_device(own.device))
    with run_before(folder, step, own) as run:
        rolled = roll_again(run.parts, line)
        run.parts.engine.sleep()
        arms = [Arm.of(name, run, cfg, rolled, line["seed"]) for name, cfg in configs.items()]
        batch = arms[1].batch
        require_same_step(line, rolled, batch, run.parts.cfg.rollout.engine)
        with blame_file(folder / "env.json"):
            ran_on = json.loads((folder / "env.json").read_text())["ranks"]
        say(f"step {step} of {folder}, again on {dist.world_size()} and first on {ran_on} ranks: tokens and "
            "weights are those that were logged")
        for name, cfg in configs.items():
            say(f"{name:<11}{describe_pruning(cfg)}")
        say("")
        print_groups(arms[1:], rolled)
        print_gradients(arms, rolled, draws)
        print_agreement(update(run.parts.learner, batch, step - 1, Clock()), logged)


def main() -> int:
    args = commands.of_replay(__doc__)
    return exit_status(partial(replay, args.run, args.step, args.set, args.draws))


if __name__ == "__main__":
    sys.exit(main())
