"""Train a reasoning model with group-based reinforcement learning.

    [torchrun --nproc_per_node N] train.py --config NAME.yaml [--set a.b=c ...] [--resume [auto]] [--check]

The loop in `train` is the algorithm: collect what a step trains on (draw prompts, sample groups, score, compare within
groups, prune), update the policy, hand it to the engine.
"""

import argparse
import errno
import os
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import get_args

import torch

import config
import critic
import data
import dist
import metrics
import preflight
import runfolder
from checkpoint import Checkpoints, Role
from collect import collect, soft_values
from config import Config, ConfigError, Optim
from eval import Sampling, Set, evaluate, load_sets
from model import (
    Critic,
    Decoder,
    check_positions,
    choose_backend,
    empty_model,
    export,
    find_model,
    load_weights,
    read_shape,
)
from reward import span
from rollout import Engine, start_engine
from runfolder import Resume
from sample import Batch, Problem, Prompt, Rolled, Sample
from update import Learner, NotFinite, update

NOT_WRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)


class Stop:
    """SIGTERM or Ctrl-C asks the run to finish its step, save and end; a second one ends it at once.

    torchrun passes on a Ctrl-C that the terminal has sent to its workers already, so what follows within a second is
    still the first.
    """

    def __init__(self):
        self.signal, self.since = 0, 0.0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.ask)

    def ask(self, number: int, frame: object) -> None:
        if not self.signal:
            self.signal, self.since = number, monotonic()
            print("stopping after this step, with a checkpoint; a second signal stops at once", file=sys.stderr)
        elif monotonic() > self.since + 1:
            raise KeyboardInterrupt


def asked_to_stop(stop: Stop | None) -> bool:
    """Whether any rank was."""
    return stop is not None and dist.max_over_ranks(stop.signal) > 0


def train(cfg: Config, resume: Resume = "never", stop: Stop | None = None) -> Decoder:
    """Run a config to its end and return the trained model, sharded over the ranks.

    Raises ConfigError for what the user can mend, KeyboardInterrupt after a `stop`, and NotFinite.
    """
    folder = runfolder.claim(cfg, resume)
    source, tokenizer, problems, prompts, sets = load(cfg)
    learner, engine = set_up(cfg, source, tokenizer)
    history = data.PromptHistory(cfg.prune.prompts.explore)
    checkpoints = Checkpoints(folder / "checkpoints", cfg.checkpoint.keep, roles(learner), learner.device)
    log = runfolder.Log(folder if dist.rank() == 0 else None)
    saved = restore(resume, checkpoints, log)
    if saved is None:
        preflight.require(preflight.run(learner, engine, tokenizer, problems, prompts))
        dist.barrier()  # every rank has looked at the folder before one writes into it
        log.create(cfg, learner.device)
    else:
        history.restore(saved["history"], prompts)
        engine.sync(learner.policy)
        log.resume(saved["step"])
    first = saved["step"] if saved else 0
    begun = saved["begun"] if saved else pretrained(cfg, 0, {})  # the first step in which the policy learns

    def evaluate_all(step: int) -> None:
        sampling = Sampling(cfg.eval.max_new_tokens, cfg.eval.n, cfg.eval.temperature, cfg.eval.top_p)
        log.evaluated(step, {
            s.name: evaluate(engine, tokenizer, s, sampling, log.bar(f"eval {s.name}")) for s in sets})

    if first == 0:
        evaluate_all(step=0)
        if cfg.advantage.kind == "soft_value":
            history.values = soft_values(engine, tokenizer, prompts, cfg, folder, log,
                                         partial(asked_to_stop, stop))
    with checkpoints.finished():
        for step in log.steps(first, cfg.steps):
            clock = metrics.Clock()
            rolled, batch = collect(engine, tokenizer, prompts, history, cfg, step, clock, log)
            with clock.phase("sync"):
                engine.sleep()
            checkpoints.wait_for_copies()
            measured = {} if begun is None else update(learner, batch, step, clock, begun)
            if learner.critic:
                measured |= critic.fit(learner, rolled, step, clock)
                begun = pretrained(cfg, step + 1, measured) if begun is None else begun
            with clock.phase("sync"):
                engine.sync(learner.policy)
            write_down(log, step + 1, rolled, batch, measured | clock.metrics() | checkpoints.metrics(), tokenizer)
            if due(cfg.eval.every, step + 1, cfg.steps):
                evaluate_all(step + 1)
            stopping = asked_to_stop(stop)
            if stopping or due(cfg.checkpoint.every, step + 1, cfg.steps):
                checkpoints.save(step + 1, beside_weights(cfg, history, begun))
            if stopping and step + 1 < cfg.steps:
                checkpoints.wait()
                raise KeyboardInterrupt
    export(learner.policy, source, folder / "hf")
    if dist.rank() == 0:
        print(runfolder.summary(folder), flush=True)
    return learner.policy


def roles(learner: Learner) -> dict[str, Role]:
    """What is saved and loaded."""
    found = {"policy": (learner.policy, learner.optimizer), "critic": (learner.critic, learner.critic_optimizer)}
    return {name: role for name, role in found.items() if role[0]}


def beside_weights(cfg: Config, history: data.PromptHistory, begun: int | None) -> dict:
    """What a checkpoint holds beside them; rank 0 writes it."""
    if dist.rank() > 0:
        return {}
    return {"config": config.flatten(cfg), "history": history.state(), "begun": begun}


def pretrained(cfg: Config, step: int, measured: dict[str, float]) -> int | None:
    """The number of steps done if with them the critic is ready for the policy to learn, else None."""
    explained = measured.get("critic/explained_variance", 0.0)
    enough = cfg.critic.pretrain_until is not None and explained >= cfg.critic.pretrain_until
    return step if step >= cfg.critic.pretrain_steps or enough else None


def restore(resume: Resume, checkpoints: Checkpoints, log: runfolder.Log) -> dict | None:
    """What the newest checkpoint holds beside the weights and moments; None to begin a run, or to begin it again."""
    if resume == "never":
        return None
    log.lock()
    saved = checkpoints.load()
    if resume == "always" and saved is None:
        raise ConfigError(f"--resume: {checkpoints.folder} has no whole checkpoint, so no step of this run is left; "
                          "--resume auto begins it again and clears its logs (checkpoint.every saves on the way)")
    return saved


def check(cfg: Config) -> list[preflight.Check]:
    """Load everything, as `train` does, and try it before a run. Raises ConfigError where it does not even load."""
    source, tokenizer, problems, prompts, _ = load(cfg)
    learner, engine = set_up(cfg, source, tokenizer)
    return preflight.run(learner, engine, tokenizer, problems, prompts)


def load(cfg: Config) -> tuple[Path, data.Tokenizer, list[Problem], list[Prompt], list[Set]]:
    """The model's folder and tokenizer, the problems to train on, those as prompts, and the evaluation sets."""
    source = find_model(cfg.model.path)
    tokenizer = data.Tokenizer(source)
    sets = load_sets(cfg.data.eval, cfg.data.dir, tokenizer, cfg.data.system_prompt, cfg.data.max_prompt_tokens)
    problems = data.load_problems(cfg.data.train, cfg.data.dir, training=True)
    problems = data.without_overlap(problems, [p for s in sets for p in s.problems])[:cfg.data.limit]
    data.name_unreadable(cfg.data.train, problems)
    prompts = data.to_prompts(problems, tokenizer, cfg.data.system_prompt, cfg.data.max_prompt_tokens,
                              cfg.data.drop_longer)
    return source, tokenizer, problems, prompts, sets


def due(every: int, step: int, last: int) -> bool:
    """Whether something done every so many steps (0: never on the way) and after the last is done after this one."""
    return step == last or (every > 0 and step % every == 0)


def set_up(cfg: Config, source: Path, tokenizer: data.Tokenizer) -> tuple[Learner, Engine]:
    """Load the policy and a reference where the loss needs one; start the engine, to be synced. Raises ConfigError."""
    device = dist.init(cfg.device)
    longest = cfg.data.max_prompt_tokens + max(cfg.rollout.max_new_tokens, cfg.eval.max_new_tokens)
    check_positions(source, longest, "data.max_prompt_tokens and rollout.max_new_tokens or eval.max_new_tokens")
    auto = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = auto if cfg.model.dtype == "auto" else getattr(torch, cfg.model.dtype)
    backend = choose_backend(cfg.model.attention, device, dtype)
    policy = load_sharded(cfg, source, dtype, device)
    referred = cfg.loss.kl or cfg.loss.residual
    reference = load_sharded(cfg, source, dtype, device).requires_grad_(False) if referred else None
    engine = start_engine(cfg.rollout.engine, source, dtype, device, backend, tokenizer.eos_ids, cfg.rollout.slots,
                          longest, cfg.rollout.tensor_parallel, cfg.rollout.cache_gib)
    learner = Learner(cfg, device, dtype, backend, policy, reference, adam(policy, cfg.optim))
    if cfg.advantage.kind == "gae":
        values = load_critic(cfg, source, dtype, device)
        learner = replace(learner, critic=values, critic_optimizer=adam(values, critic.optim(cfg)))
    return learner, engine


def load_sharded(cfg: Config, source: Path, dtype: torch.dtype, device: torch.device) -> Decoder:
    """The model spread over the ranks, with weights of at least float32, computing in `dtype`. No rank ever holds the
    whole."""
    model = empty_model(source, torch.promote_types(dtype, torch.float32))
    spread(model, model, cfg, dtype, device)
    load_weights(model, source)
    return model


def load_critic(cfg: Config, source: Path, dtype: torch.dtype, device: torch.device) -> Critic:
    """A critic on the model's backbone, spread likewise."""
    with torch.device("meta"):
        shape, weights = read_shape(source), cfg.reward.weights
        model = Critic(shape, *span(weights), cfg.critic.bounded).to(torch.promote_types(dtype, torch.float32))
    spread(model, model.backbone, cfg, dtype, device)
    load_weights(model.backbone, source)
    for p in model.value.parameters():
        torch.nn.init.zeros_(p)
    return model


def spread(model: torch.nn.Module, backbone: Decoder, cfg: Config, dtype: torch.dtype, device: torch.device) -> None:
    dist.shard(model, backbone.layers, device, dtype, cfg.optim.offload)
    model.to_empty(device="cpu" if cfg.optim.offload else device)
    backbone.checkpoint_blocks = cfg.model.checkpoint_blocks


def adam(model: torch.nn.Module, opt: Optim) -> torch.optim.Optimizer:
    """With its moments in place, which a checkpoint may be loaded into before the first step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=opt.lr, betas=(opt.beta1, opt.beta2),
                                  weight_decay=opt.weight_decay, fused=True)
    for p in model.parameters():
        optimizer.state[p] = {"step": torch.zeros((), device=dist.local(p).device),
                              "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    return optimizer


def write_down(log: runfolder.Log, step: int, rolled: Rolled, batch: Batch, measured: dict[str, float],
               tokenizer: data.Tokenizer) -> None:
    """What a step leaves in the logs."""
    log.step(step, measured | metrics.of_rollout(rolled, batch))
    log.write("decisions.jsonl", {"step": step} | metrics.decisions(rolled, batch))
    done = [n for n, group in enumerate(rolled.groups) if not any(s.pending for s in group.samples)]
    if done:
        log.sample(step, as_read(done[0], rolled, tokenizer))


def as_read(n: int, rolled: Rolled, tokenizer: data.Tokenizer) -> dict:
    """A group as people read it; of its texts those that this rank holds. The advantage is that of the rewards, before
    what a critic or a reference adds to it."""
    group = rolled.groups[n]
    texts = [tokenizer.decode(s.ids) for s in group.samples if isinstance(s, Sample)]
    return {"id": group.prompt.id, "gold": group.prompt.answer, "prompt": tokenizer.decode(group.prompt.ids),
            "texts": texts, "reward": rolled.reward_NG[n].tolist(), "advantage": rolled.adv_NG[n].tolist()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a yaml file, or the name of one in configs/")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="change one setting")
    parser.add_argument("--resume", nargs="?", choices=get_args(Resume), default="never", const="always",
                        help="go on from the run folder's newest checkpoint; auto: or begin where there is none")
    parser.add_argument("--check", action="store_true", help="try everything that a run needs, print what was found, "
                                                             "and stop; status 2 when something fails")
    args = parser.parse_args()
    try:
        cfg = config.load(args.config, args.set)
        if not args.check:
            if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and args.resume == "never":
                raise ConfigError("a run under torchrun --max-restarts needs --resume auto: begin, or go on after a "
                                  "restart")
            train(cfg, args.resume, Stop())
            return 0
        checks = check(cfg)
        if dist.rank() == 0:
            print(preflight.table(checks), flush=True)
        return 0 if all(c.passed for c in checks) else 2
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except NotFinite as error:
        apart = any(group.owners for group in error.records.groups)
        path = Path(cfg.out) / f"not_finite_step_{error.step:06d}{f'_rank{dist.rank()}' if apart else ''}.pt"
        if apart or dist.rank() == 0:
            torch.save(error.records, path)
            print(f"error: {error}; the step's batch is in {path}, and the policy before it in the newest checkpoint",
                  file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno not in NOT_WRITABLE:
            raise
        print(f"error: {error}; make room or allow writing there, and go on with --resume: the newest checkpoint is "
              "whole", file=sys.stderr)
        return 2
    except RuntimeError:  # that of a rank whose peers are gone, among others
        print(f"rank {os.environ.get('RANK', 0)} stopped; --resume goes on from the newest checkpoint "
              "(checkpoint.every), once what follows is mended", file=sys.stderr)
        raise
    except KeyboardInterrupt:
        print("interrupted; --resume goes on from the newest checkpoint", file=sys.stderr)
        return 130
    finally:
        dist.close()


if __name__ == "__main__":
    sys.exit(main())
