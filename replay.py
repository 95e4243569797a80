"""Do one step of a run again, and show the effect of another pruning.

    [torchrun --nproc_per_node N] replay.py RUN_DIR --step K [--set prune.completions.kind=...] [--draws 200]

The policy is the checkpoint before the step; before step 1 it is the initial policy. The prompts come from
decisions.jsonl, and their completions are sampled again: tokens other than the logged ones are an error.
Printed are the gradients before the policy moves: of the full batch, of the run's survivors, and of the
survivors of the pruning given by --set. A random pruning is drawn again --draws times. Last, the step's own
update is done again, and its gradient norm compared with the logged one. Nothing is written into the run
folder.

Dimension key:  N groups,  G completions per group,  P weights of this rank.
"""

from infra import viewers

if __name__ == "__main__":  # before the imports that take seconds
    viewers.of_replay(__doc__)

import json
import sys
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

import config
from collect import Selection, choose
from config import Config, ConfigError
from infra import dist, runfolder
from infra.checkpoint import step_folders, step_of
from infra.device import find_device
from infra.digests import read_list
from infra.dist import say
from infra.lines import read_log, read_metrics
from infra.signals import exit_status
from learner import Learner
from metrics import Clock, list_decisions
from records import Batch, Rolled, lengths
from settings import kinds, leaves
from train import Parts, Run, prepare
from update import add_gradients, make_minibatch, prepare_rows, update

# --set may change the settings with these beginnings.
MAY_CHANGE = ("prune.completions.", "prune.tokens.", "prune.truncated", "loss.denominator")
Arms = dict[str, tuple[Config, Batch]]  # prunings: the step's settings, and its batch by its own draw


# ---- the step again

def step_config(folder: Path, step: int, changes: list[str]) -> Config:
    """Read the config that a step ran with, and change it."""
    earlier = [path for path in folder.glob("config_until_*[0-9].yaml")
               if step <= int(path.stem.rpartition("_")[2])]
    path = min(earlier, default=folder / "config.yaml")
    # The user's own files may have changed since the run began: read the copies made then.
    copies = [f"{setting}={json.dumps(str(folder / name))}"
              for setting, name in runfolder.COPIES.items() if (folder / name).is_file()]
    cfg = config.load(path, [*changes, *copies])
    return config.with_value(cfg, "log.to", None) if "trackers" in leaves.chosen(cfg) else cfg


def read_step(folder: Path, step: int) -> tuple[dict, dict]:
    """Find a step's lines in decisions.jsonl and metrics.jsonl. Raises ConfigError if it cannot be done
    again."""
    decided = {line["step"]: line for line in read_log(folder / "decisions.jsonl")}
    if step not in decided:
        raise ConfigError(f"--step {step}: {folder} has done {max(decided, default=0)} steps"
                          f"{'' if decided else ', or is not a run folder'}")
    # The policy is there before the first step, and in each checkpoint that has its list of files.
    whole = [step_of(path) for path in step_folders(folder / "checkpoints") if read_list(path)]
    able = [before + 1 for before in (0, *whole) if before < max(decided)]
    if step not in able:
        raise ConfigError(
            f"--step {step} needs the policy before it, checkpoints/step_{step - 1:06d}, which {folder} does "
            f"not have; it can replay {', '.join(map(str, able))}; a run keeps every step's with "
            "checkpoint.every=1 and checkpoint.keep=all")
    logged, = (line for line in read_metrics(folder / "metrics.jsonl")
               if line["step"] == step and "time/step" in line)
    return decided[step], logged


@contextmanager
def run_before(folder: Path, step: int, cfg: Config) -> Iterator[Run]:
    """Load a run as it was before a step, in a temporary folder: resume it there, or begin it again."""
    with TemporaryDirectory(prefix="replay_") as there:
        cfg = dist.on_first(link_run, folder, step, replace(cfg, out=there))
        run = prepare(cfg, "always" if step > 1 else "never")
        dist.barrier()  # every rank has read its files
        yield run
        run.log.unlock()


def link_run(folder: Path, step: int, cfg: Config) -> Config:
    """Fill the folder of a config with links to a run's small files and to the checkpoint before a step."""
    there, names = Path(cfg.out), {*runfolder.COPIES.values(), runfolder.SOFT_VALUES, "env.json"}
    names |= {str(path.relative_to(folder)) for path in folder.glob("**/*.py")}  # modules that they import
    (there / "config.yaml").write_text(config.dump(cfg))
    if step > 1:
        names |= {*runfolder.LOGS, *(path.name for path in runfolder.evaluations(folder).values())}
        names.add(f"checkpoints/step_{step - 1:06d}")
    for name in names:  # each is replaced before it is written
        if (folder / name).exists():
            (there / name).parent.mkdir(parents=True, exist_ok=True)
            (there / name).symlink_to((folder / name).resolve())
    return cfg


def roll_again(parts: Parts, line: dict) -> Rolled:
    """Sample and score the groups of a line of decisions.jsonl, in the rounds that they came in."""
    parts = leaves.through("begin", parts.cfg, parts)
    try:
        draws = parts.history.recall(line["prompts"])
    except KeyError as unknown:
        raise ConfigError(f"data.train={parts.cfg.data.train} is not what it was: there is no "
                          f"{unknown.args[0]}") from None
    kept = list(accumulate(draw.kept for draw in draws))
    rolled = Rolled()
    for total in accumulate(line["rounds"]):
        offered = draws[len(rolled.draws):bisect_right(kept, total)]
        groups = parts.sampler.rollout(offered)
        rewards = parts.sampler.score(groups)
        rolled += Rolled(offered, groups, rewards, parts.advantage(groups, rewards, parts.cfg.advantage))
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
        for key in ("completion_weight", "completion_tokens"):
            if not np.allclose(old.get(key, 0), new.get(key, 0)):
                raise ConfigError(
                    f"the completions of {old['id']} have the tokens that decisions.jsonl says, but other "
                    "weights: the code, or what the reward calls, has changed since")


# ---- gradients

def gradient(learner: Learner, batch: Batch) -> Tensor:
    """Compute the gradient of a whole batch before the policy has moved, [P]."""
    weighed = make_minibatch(learner, batch, list(range(batch.offered)))
    prepared = prepare_rows(learner, weighed, learner.rows(weighed), extra_pass=False)
    add_gradients(learner, weighed, prepared, unmoved=True)
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad
                 for p in learner.policy.parameters() if p.requires_grad]
    learner.policy.zero_grad()
    return torch.cat([dist.local_shard(part).flatten().cpu() for part in gradients])


def compare_gradients(own_P: Tensor, full_P: Tensor) -> Tensor:
    """Compute a gradient's norm, its cosine with the full batch's gradient, and its squared error over the
    full batch's squared norm, [3]."""
    products = (own_P * own_P, full_P * full_P, own_P * full_P, (own_P - full_P).square())
    sums_4 = torch.stack([product.sum(dtype=torch.float64) for product in products])
    square, whole, common, error = sum(dist.gather([sums_4]))
    return torch.stack([square.sqrt(), common / (square * whole).sqrt(), error / whole])


# ---- printing

def print_gradients(learner: Learner, rolled: Rolled, arms: Arms, draws: int) -> None:
    """Print how the gradients of prunings compare with the gradient of the first, which keeps everything."""
    say(f"\n{'gradient':<22}{'kept':>8}{'tokens':>10}{'norm':>12}{'cosine':>9}{'squared error':>15}"
        f"{'predicted':>11}")
    full_P = None
    for name, (cfg, own) in arms.items():
        learner = replace(learner, loss=cfg.loss)
        full_P = gradient(learner, own) if full_P is None else full_P
        print_gradient(name, learner, [own], full_P)
        drawn = [choose(rolled, Selection.of(cfg), dist.seed_for(own.seed, i, "draw")) for i in range(draws)]
        weight_NG = own.pruned.weight_NG
        if draws and (own.tokens or not all(weight_NG.equal(batch.pruned.weight_NG) for batch in drawn)):
            print_gradient(f"  mean of {draws} draws", learner, drawn, full_P)


def print_gradient(name: str, learner: Learner, batches: list[Batch], full_P: Tensor) -> None:
    """Print the means over batches of survivors, of their tokens with a gradient, of `compare_gradients`, and
    of the error that was predicted, if the draw weighs its survivors."""
    rows = []
    for batch in batches:
        length_NG = lengths(batch.groups, batch.trained_NG.shape[1])
        if batch.tokens:  # up to their cuts
            length_NG = torch.tensor([list(map(len, weights)) for weights in batch.tokens])
        counts = torch.stack([batch.pruned.keep_NG.sum(), (batch.trained_NG * length_NG).sum()])
        predicted = torch.tensor([torch.nan if batch.error is None else batch.error])
        rows.append(torch.cat([counts, compare_gradients(gradient(learner, batch), full_P), predicted]))
    kept, tokens, norm, cosine, error, predicted = torch.stack(rows).mean(dim=0)
    say(f"{name:<22}{kept:>8g}{tokens:>10g}{norm:>12.5g}{cosine:>9.4f}{error:>15.4f}"
        + f"{predicted:>11.4f}".replace("nan", "  -"))


def replay(folder: Path, step: int, changes: list[str], draws: int) -> None:
    """Do a step again and print it. Raises ConfigError."""
    line, logged = read_step(folder, step)
    own, given = step_config(folder, step, []), step_config(folder, step, changes)
    for key, change in runfolder.changed_settings(own, given).items():
        if not key.startswith(MAY_CHANGE):
            raise ConfigError(f"--set {change}: the step has been rolled out; here prune.completions.*, "
                              "prune.tokens.*, prune.truncated and loss.denominator can be set")
    everything = replace(own.prune, completions=kinds.KeepAll(), tokens=kinds.WholeCompletions())
    configs = {"full batch": replace(own, prune=everything), "the run's": own}
    if given != own:
        configs["--set"] = given
    dist.init(find_device(own.device))
    with run_before(folder, step, own) as run:
        rolled = roll_again(run.parts, line)
        run.parts.engine.sleep()
        arms = {name: (cfg, choose(rolled, Selection.of(cfg), line["seed"])) for name, cfg in configs.items()}
        _, batch = arms["the run's"]
        require_same_step(line, rolled, batch, run.parts.cfg.rollout.engine)
        say(f"step {step} of {folder} again on {dist.world_size()} ranks: tokens and weights are those that "
            f"were logged; {len(rolled.draws)} prompts offered, {len(batch.groups)} trained on")
        for name, cfg in configs.items():
            say(f"{name:<11}{cfg.prune.completions}, loss.denominator={cfg.loss.denominator}")
        print_gradients(run.parts.learner, rolled, arms, draws)
        selection = Selection.of(own)
        redrawn = [choose(rolled, selection, line["seed"], epoch) for epoch in range(1, selection.draws)]
        again = update(run.parts.learner, batch, step - 1, Clock(), redrawn)
    if "train/grad_norm" not in again:
        say("\nthe policy does not learn in this step")
        return
    norm, before = again["train/grad_norm"], logged["train/grad_norm"]
    apart = abs(norm - before) / (max(norm, before) or 1)
    how = f"{apart:.1e} of it apart" if apart else "the same bit for bit"
    say(f"\nnorm in the step's own update {norm!r}, logged {before!r}: {how}")
    if apart > 0.01:  # more than rounding on other ranks
        raise ConfigError("this is another step: the code, or a method's file, is not that of the run")


def main() -> int:
    args = viewers.of_replay(__doc__)
    return exit_status(partial(replay, args.run, args.step, args.set, args.draws))


if __name__ == "__main__":
    sys.exit(main())
