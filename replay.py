"""Do one step of a run again, and see what another pruning would have done with it.

    [torchrun --nproc_per_node N] replay.py RUN_DIR --step K [--set prune.completions.kind=...] [--draws 200]

The policy is that of the checkpoint before the step, or the initial one before the first. The prompts are
those of decisions.jsonl, and their completions are sampled again: tokens other than the logged ones are an
error. Printed are the groups that were trained on: advantages, and who was kept, with which probability and
weight. Then gradients before the policy moves: of the full batch, which keeps every completion, of what the
run kept, and of what the pruning given by --set keeps. Where a pruning draws, it is drawn again --draws
times. Last the step's own update is done again, and its gradient norm compared with the logged one. Nothing
is written into the run folder.

Dimension key:  N groups,  G completions per group,  K gradients that others are sums of,  D of those sums,
P weights of this rank.
"""

import argparse
import json
import re
import shutil
import sys
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from tempfile import mkdtemp

import torch
from torch import Tensor

import config
from advantage import advantage
from collect import Selection, choose
from config import Config, ConfigError
from infra import dist, formats, runfolder
from infra.checkpoint import replayable
from infra.runfolder import COPIES, SOFT_VALUES
from infra.signals import exit_status
from learner import Learner
from methods import soft_value
from metrics import Clock, list_decisions
from preflight import memory
from records import Batch, Pruned, Rolled, Turn, lengths
from settings import kinds
from settings.paths import user_path
from train import Run, prepare
from update import add_gradients, minibatch, prepare_rows, update

# Beginnings of what --set may change.
GIVEN = ("prune.completions.", "prune.tokens.", "prune.truncated", "loss.count")
TERMS = 4 * 2**30   # bytes for the gradients of single completions, of all ranks


# ---- the step again

def config_of(folder: Path, step: int, changes: list[str]) -> Config:
    """Read the config that a step ran with, and change it."""
    until = sorted((int(match[1]), path) for path in folder.glob("config_until_*.yaml")
                   if (match := re.fullmatch(r"config_until_(\d+)\.yaml", path.name)))
    path = next((path for last, path in until if step <= last), folder / "config.yaml")
    if not path.is_file():
        raise ConfigError(f"{folder} is not a run folder: it has no config.yaml")
    cfg = config.load(path, [*changes, "log.wandb=null"])
    # The user's own files as they were when the run began, whatever has become of them.
    own, template = (str(copy) if (copy := folder / name).is_file() else config.flatten(cfg)[setting]
                     for setting, name in COPIES.items())
    return replace(cfg, reward=replace(cfg.reward, custom_file=own),
                   data=replace(cfg.data, chat_template=template))


def require_pruning_alone(own: Config, given: Config) -> None:
    """Raise ConfigError where --set changes what has happened before the pruning of completions."""
    for key, change in runfolder.changed_settings(own, given).items():
        if not key.startswith(GIVEN):
            raise ConfigError(f"--set {change}: the step has been rolled out; here prune.completions.*, "
                              "prune.tokens.*, prune.truncated and loss.count can be set")


def logged(folder: Path, step: int) -> tuple[dict, dict]:
    """Find a step's lines in decisions.jsonl and metrics.jsonl. Raises ConfigError where it cannot be done
    again."""
    decided = {line["step"]: line for line in runfolder.read(folder / "decisions.jsonl", formats.decided)}
    if step not in decided:
        raise ConfigError(f"--step {step}: {folder} has done {max(decided, default=0)} steps")
    if "rounds" not in decided[step]:
        raise ConfigError(f"{folder} is of a version that did not hash its tokens, and cannot be replayed")
    able = replayable(folder, max(decided))
    if step not in able:
        raise ConfigError(
            f"--step {step} needs the policy before it, checkpoints/step_{step - 1:06d}, which {folder} does "
            f"not have; it can replay {', '.join(map(str, able))}; a run keeps every step's with "
            "checkpoint.every=1 and checkpoint.keep=all")
    for n, prompt in enumerate(decided[step]["prompts"]):
        formats.require(prompt, f"{folder}/decisions.jsonl: step {step}: prompts[{n}]", formats.DRAWN)
    measured = [line for line in runfolder.read(folder / "metrics.jsonl", formats.measured)
                if "time/step" in line]
    return decided[step], next(line for line in measured if line["step"] == step)


@contextmanager
def as_it_was(folder: Path, step: int, cfg: Config) -> Iterator[Run]:
    """Load a run as it was before a step: resume it in a folder of links, or begin it there again."""
    there, = dist.gather([Path(mkdtemp(prefix="replay_"))] if dist.rank() == 0 else [])
    cfg = replace(cfg, out=str(there))
    try:
        if dist.rank() == 0:
            (there / "config.yaml").write_text(config.dump(cfg))
            for path in (folder / name for name in (*COPIES.values(), SOFT_VALUES)):
                if path.is_file():
                    shutil.copyfile(path, there / path.name)
            if step > 1:
                before = folder / "checkpoints" / f"step_{step - 1:06d}"
                (there / "checkpoints").mkdir()
                (there / "checkpoints" / before.name).symlink_to(before.resolve())
        dist.barrier()
        run = prepare(cfg, "always" if step > 1 else "never")
        dist.barrier()  # every rank has read what it needs
        yield run
        run.log.unlock()
    finally:
        if dist.rank() == 0:
            shutil.rmtree(there)


def roll_again(run: Run, line: dict) -> Rolled:
    """Sample, score and compare the groups of a line of decisions.jsonl, in the rounds that they came in."""
    table, by_id = None, {prompt.id: prompt for prompt in run.task.prompts}
    if run.cfg.advantage.kind == "soft_value":
        table = soft_value.estimate_table(run.sampler, run.task.prompts, run.cfg.advantage, Path(run.cfg.out),
                                          sampled=True)
    if missing := [prompt["id"] for prompt in line["prompts"] if prompt["id"] not in by_id]:
        raise ConfigError(f"data.train={run.cfg.data.train} is not what it was: there is no {missing[0]}")
    turns = [Turn(by_id[p["id"]], p["epoch"], p["prob"], p["weight"], p.get("copy", 0))
             for p in line["prompts"]]
    rolled, start, kept = Rolled(), 0, list(accumulate(turn.kept for turn in turns))
    for total in accumulate(line["rounds"]):
        end = bisect_right(kept, total)
        groups = run.sampler.rollout(turns[start:end])
        rewards = run.sampler.score(groups)
        adv_NG = table.advantage(groups, rewards) if table else advantage(rewards, run.cfg.advantage)
        rolled += Rolled(turns[start:end], groups, rewards, adv_NG)
        start = end
    return rolled


def require_same(line: dict, rolled: Rolled, batch: Batch, engine: str) -> None:
    """Raise ConfigError where the step came out as another one than the run has logged."""
    pairs = [pair for pair in zip(line["prompts"], list_decisions(rolled, batch)["prompts"], strict=True)
             if "tokens" in pair[0]]
    other = [old["id"] for old, new in pairs if old["tokens"] != new["tokens"]]
    if other:
        raise ConfigError(
            f"{len(other)} of {len(pairs)} groups have come out with other tokens than those whose hash "
            f"decisions.jsonl has, the first that of {other[0]}, so this would be another step: model, data, "
            f"device, libraries or code are not those of the run, or rollout.engine={engine} does not sample "
            "the same twice, which only the embedded engine promises")
    for old, new in pairs:
        weights = [torch.tensor(of.get("completion_weight", []), dtype=torch.float64) for of in (old, new)]
        cuts = {str(of.get("completion_tokens")) for of in (old, new)}
        if len(weights[0]) != len(weights[1]) or not torch.allclose(*weights) or len(cuts) > 1:
            raise ConfigError(f"the completions of {old['id']} have the tokens that decisions.jsonl says, "
                              "but other weights: the code, or what the reward calls, has changed since")


# ---- gradients

def trained(learner: Learner) -> list[Tensor]:
    return [p for p in learner.policy.parameters() if p.requires_grad]


def gradient(learner: Learner, batch: Batch) -> Tensor:
    """Compute the gradient of a whole batch before the policy has moved, [P]."""
    weighed = minibatch(learner, batch, list(range(batch.offered)))
    prepared = prepare_rows(learner, learner.rows(weighed), extra_pass=False)
    add_gradients(learner, weighed, prepared, unmoved=True)
    mine = torch.cat([dist.local(torch.zeros_like(p) if p.grad is None else p.grad).flatten().cpu()
                      for p in trained(learner)])
    learner.policy.zero_grad()
    return mine


def products(gradients_KP: Tensor) -> Tensor:
    """Compute the inner products of gradients over all ranks, [K, K]."""
    mine_KK = sum((x @ x.T).double() for x in gradients_KP.split(2**16, dim=1))
    return torch.stack(dist.gather_rows(mine_KK)).sum(dim=0)


def inner_products(learner: Learner, batch: Batch, inert: bool) -> Tensor:
    """Compute the inner products of the completions' terms of a batch's gradient, [NG, NG].

    `inert`: an advantage of 0 means no gradient at all (Selection).
    """
    some_NG = (batch.pruned.weight_NG > 0) & ((batch.adv_NG != 0) | (not inert))
    place_K = some_NG.flatten().nonzero()[:, 0]
    terms_KP = torch.zeros(len(place_K), sum(dist.local(p).numel() for p in trained(learner)),
                           dtype=dist.dtype_of_trained(learner.policy))
    for k, place in enumerate(place_K):
        only_NG = torch.zeros_like(some_NG).view(-1).index_fill(0, place, True).view_as(some_NG)
        alone = Pruned(only_NG, batch.pruned.weight_NG * only_NG, batch.pruned.prob_NG)
        terms_KP[k] = gradient(learner, replace(batch, pruned=alone))
    product = torch.zeros(some_NG.numel(), some_NG.numel(), dtype=torch.float64)
    product[place_K[:, None], place_K] = products(terms_KP)
    return product


def compared(product_KK: Tensor, share_DK: Tensor, full_K: Tensor) -> Tensor:
    """Compare sums of K gradients with the full batch's, [D, 3]: norm, cosine, and squared error over the
    full batch's squared norm.

    Args:    product_KK  inner products of the K gradients
             share_DK    how much of each is in each sum
             full_K      and in the full batch's
    """
    def inner(a: Tensor, b: Tensor) -> Tensor:
        return (a @ product_KK * b).sum(dim=-1)

    error_DK, whole = share_DK - full_K, inner(full_K, full_K)
    square_D = inner(share_DK, share_DK).clamp(min=0)
    return torch.stack([square_D.sqrt(), inner(share_DK, full_K) / (square_D * whole).sqrt(),
                        inner(error_DK, error_DK).clamp(min=0) / whole], dim=1)


# ---- prunings side by side

@dataclass(frozen=True, slots=True)
class Arm:
    """A pruning, and what it makes of the step."""

    name: str
    learner: Learner      # with its loss.count
    selection: Selection
    batch: Batch          # by the step's own draw

    @staticmethod
    def of(name: str, run: Run, cfg: Config, rolled: Rolled, seed: int) -> "Arm":
        selection = Selection.of(cfg)
        return Arm(name, replace(run.learner, loss=cfg.loss), selection, choose(rolled, selection, seed))

    def weights(self, batch: Batch) -> Tensor:
        """Return the weight of the tokens of each completion in a draw of this pruning, [NG]."""
        return minibatch(self.learner, batch, list(range(batch.offered))).weight_NG.double().flatten()


@dataclass(frozen=True, slots=True)
class Line:
    """What is printed of a gradient, or the means over several."""

    name: str
    kept: float      # completions
    tokens: float
    figures: list[float]  # those of `compared`

    @staticmethod
    def of(name: str, batches: list[Batch], figures_D3: Tensor) -> "Line":
        kept = sum(batch.pruned.keep_NG.sum().item() for batch in batches) / len(batches)
        tokens = sum((batch.pruned.keep_NG * lengths_up_to_cuts(batch)).sum().item() for batch in batches)
        return Line(name, kept, tokens / len(batches), figures_D3.mean(dim=0).tolist())


def lengths_up_to_cuts(batch: Batch) -> Tensor:
    if batch.tokens:
        return torch.tensor([[len(weight_L) for weight_L in weights] for weights in batch.tokens])
    return lengths(batch.groups, batch.adv_NG.shape[1])


@dataclass(frozen=True, slots=True)
class Terms:
    """The full batch's gradient as a sum over completions, of which every pruning is a weighted one."""

    product: Tensor   # inner products of the completions' terms, [NG, NG]
    unit: Tensor      # weight of the tokens of each in its term, [NG]
    whole: Tensor     # how much of each is in the full batch, [NG]

    @staticmethod
    def of(full: Arm) -> "Terms | None":
        """Pass every completion on its own; None where their gradients have no room."""
        size = sum(p.numel() * p.element_size() for p in trained(full.learner))
        if full.batch.adv_NG.numel() * size > TERMS:
            return None
        # With loss.count=all no completion's weight depends on what else is kept.
        plain = replace(full, learner=replace(full.learner, loss=replace(full.learner.loss, count="all")))
        product = inner_products(plain.learner, full.batch, full.selection.inert)
        unit = plain.weights(full.batch)
        return Terms(product, unit, shares(full, full.batch, unit))

    def compare(self, arm: Arm, batches: list[Batch]) -> Tensor:
        share_DK = torch.stack([shares(arm, batch, self.unit) for batch in batches])
        return compared(self.product, share_DK, self.whole)


def shares(arm: Arm, batch: Batch, unit: Tensor) -> Tensor:
    """Compute how much of each completion's term is in the gradient of a draw, [NG]."""
    return (arm.weights(batch) / unit).nan_to_num(nan=0.0, posinf=0.0)


def side_by_side(arms: list[Arm], rolled: Rolled, draws: int) -> Iterator[Line]:
    """Compare the gradients of prunings, the first of which keeps everything, in the step and over draws."""
    gradients_KP = torch.stack([gradient(arm.learner, arm.batch) for arm in arms])
    eye, terms = torch.eye(len(arms), dtype=torch.float64), None
    figures_K3 = compared(products(gradients_KP), eye, eye[0])
    seeds = [dist.seed_for(arms[0].batch.seed, i, "draw") for i in range(draws)]
    for arm, figures_3 in zip(arms, figures_K3, strict=True):
        yield Line.of(arm.name, [arm.batch], figures_3[None])
        drawn = [choose(rolled, arm.selection, seed) for seed in seeds]
        if all(batch.pruned.weight_NG.equal(arm.batch.pruned.weight_NG) for batch in drawn) and (
                not arm.batch.tokens):
            continue
        terms = terms or Terms.of(arms[0])
        first, *others = terms.compare(arm, [arm.batch, *drawn]) if terms else [figures_3 * torch.nan]
        if arm.batch.tokens or not first[0].isclose(figures_3[0], rtol=1e-3):
            # No room, or a gradient that is no such sum, as with cuts: each draw is a pass of its own.
            others = [compared(products(torch.stack([gradient(arm.learner, batch), gradients_KP[0]])),
                               eye[:1, :2], eye[1, :2])[0] for batch in drawn]
        yield Line.of(f"  mean of {draws} draws", drawn, torch.stack(others))


# ---- what is printed

def say(text: str) -> None:
    if dist.rank() == 0:
        print(text, flush=True)


def described(cfg: Config) -> str:
    """Name a pruning by its settings."""
    named = []
    for section in (cfg.prune.completions, cfg.prune.tokens):
        settings = asdict(section)
        named += [settings.pop("kind"), *(f"{key}={value}" for key, value in settings.items())]
    named = named[:-1] if cfg.prune.tokens == kinds.WholeCompletions() else named
    return f"{' '.join(named)}, loss.count={cfg.loss.count}" + ", truncated" * cfg.prune.truncated


def say_groups(arms: list[Arm], rolled: Rolled) -> None:
    """Print what became of each completion under each pruning."""
    count = len(arms[0].batch.groups)
    say(f"{len(rolled.turns)} prompts offered, {len(rolled.groups)} rolled out, {count} trained on; under "
        "each pruning the probability to be kept, and the weight of what was")
    say(f"{'reward':>8}{'advantage':>11}" + "".join(f"{arm.name:>13}{'weight':>8}" for arm in arms))
    for n in range(count):
        say("\n".join(group_lines(arms, n)))


def group_lines(arms: list[Arm], n: int) -> Iterator[str]:
    """Write a group: its completions, those of one outcome in a line."""
    batch, turn = arms[0].batch, arms[0].batch.turns[n]
    drawn = f", rolled out with probability {turn.prob:.3g} at weight {turn.weight:.3g}" * (turn.prob < 1)
    yield f"{turn.prompt.id}, epoch {turn.epoch}{drawn}"
    alike: dict[str, list[int]] = {}
    for g in range(len(batch.groups[n].samples)):
        cells = [f"{batch.reward_NG[n, g]:>8.3g}{batch.adv_NG[n, g]:>11.3f}"]
        for arm in arms:
            prob, weight = arm.batch.pruned.prob_NG[n, g], arm.batch.pruned.weight_NG[n, g]
            cells.append(f"{prob:>13.3g}{f'{weight:.3g}' if weight > 0 else '-':>8}")
        alike.setdefault("".join(cells), []).append(g)
    for outcome, places in alike.items():
        tokens_of = sorted({batch.groups[n].samples[g].length for g in places})
        tokens = f"{tokens_of[0]} to {tokens_of[-1]}" if len(tokens_of) > 1 else f"{tokens_of[0]}"
        yield f"{outcome}   {tokens + ' tokens:':<17} {' '.join(map(str, places))}"


def agreement(again: dict[str, float], before: dict[str, float]) -> str:
    """Say how far the gradient of the step's own update is the one that was logged."""
    if "train/grad_norm" not in again:
        return "\nthe policy does not learn in this step"
    norm, was = (measured["train/grad_norm"] for measured in (again, before))
    how = "the same bit for bit" if norm == was else f"{abs(norm - was) / max(norm, was):.1e} of it apart"
    return f"\nnorm in the step's own update {norm!r}, logged {was!r}: {how}"


def replay(folder: Path, step: int, changes: list[str], draws: int) -> None:
    """Do a step again and print it. Raises ConfigError."""
    line, before = logged(folder, step)
    own, given = (config_of(folder, step, of) for of in ([], changes))
    require_pruning_alone(own, given)
    dist.init(memory.find_device(own.device))
    with as_it_was(folder, step, own) as run:
        rolled = roll_again(run, line)
        run.engine.sleep()
        everything = replace(own.prune, completions=kinds.KeepAll(), tokens=kinds.WholeCompletions())
        configs = {"full batch": replace(own, prune=everything),
                   "the run's": own} | ({"--set": given} if given != own else {})
        arms = [Arm.of(name, run, cfg, rolled, line["seed"]) for name, cfg in configs.items()]
        batch = arms[1].batch
        require_same(line, rolled, batch, run.cfg.rollout.engine)
        ran_on = json.loads((folder / "env.json").read_text())["ranks"]
        say(f"step {step} of {folder}, again on {dist.world_size()} and first on {ran_on} ranks: tokens and "
            "weights are those that were logged")
        say("".join(f"{arm.name:<11}{described(configs[arm.name])}\n" for arm in arms))
        say_groups(arms[1:], rolled)
        say(f"\n{'gradient':<22}{'kept':>8}{'tokens':>10}{'norm':>12}{'cosine':>9}{'squared error':>15}")
        for row in side_by_side(arms, rolled, draws):
            norm, cosine, error = row.figures
            say(f"{row.name:<22}{row.kept:>8g}{row.tokens:>10g}{norm:>12.5g}{cosine:>9.4f}{error:>15.4f}")
        say(agreement(update(run.learner, batch, step - 1, Clock()), before))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=user_path, metavar="RUN_DIR", help="a run folder")
    parser.add_argument("--step", type=int, required=True, metavar="K", help="as the logs count them, from 1")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c",
                        help="another pruning: prune.completions.*, prune.tokens.*, prune.truncated, "
                             "loss.count")
    parser.add_argument("--draws", type=int, default=200, metavar="D",
                        help="how often a pruning is drawn again (200; 0: not)")
    args = parser.parse_args()
    return exit_status(partial(replay, args.run, args.step, args.set, args.draws))


if __name__ == "__main__":
    sys.exit(main())
