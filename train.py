"""Train a reasoning model with group-based reinforcement learning.

    [torchrun --nproc_per_node N] train.py --config NAME.yaml [--set a.b=c ...] [--resume] [--check]

The loop in `train` is the algorithm: draw prompts, sample groups, score, compare within groups, prune, update.

Dimension key:  N prompts (groups) per step,  G completions per prompt.
"""

import argparse
import copy
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

import checkpoint
import config
import data
import dist
import eval as evaluation
import metrics
import preflight
import runfolder
from advantage import group_norm
from config import Config, ConfigError
from model import Decoder, check_positions, choose_backend, export, find_model, load_model
from prune import COMPLETIONS, Offer
from reward import score
from rollout import Engine, start_engine
from sample import Group, Problem, Prompt
from update import Learner, lengths, update


def train(cfg: Config, resume: bool = False) -> Decoder:
    """Run a config to its end and return the trained model. Raises ConfigError for what the user can mend."""
    folder = runfolder.claim(cfg, resume)
    source, tokenizer, problems, prompts, sets = load(cfg)
    learner, engine = set_up(cfg, source, tokenizer)
    if resume:
        first = checkpoint.load(folder / "checkpoints", learner.policy, learner.optimizer)
        engine.sync(learner.policy)
    else:
        first = 0
        preflight.require(preflight.run(learner, engine, tokenizer, problems, prompts))
    dist.barrier()  # every rank has looked at the folder before one writes into it
    log = runfolder.Log(folder if dist.rank() == 0 else None)
    log.resume(first) if resume else log.create(cfg, learner.device)

    def evaluate(step: int) -> None:
        log.evaluated(step, {name: evaluation.evaluate(
            engine, tokenizer, held_out, cfg.eval.max_new_tokens, progress=log.bar(f"eval {name}"))
            for name, held_out in sets.items()})

    if first == 0:
        evaluate(step=0)
    for step in log.steps(first, cfg.steps):
        clock = metrics.Clock()
        drawn = data.draw(prompts, cfg.seed, step, cfg.rollout.prompts_per_step)
        groups, parts = rollout(engine, tokenizer, drawn, cfg, clock, log.bar("rollout"))
        reward_NG = sum(getattr(cfg.reward, name) * part_NG for name, part_NG in parts.items())
        adv_NG = group_norm(reward_NG, cfg.advantage.correction, cfg.advantage.eps)
        offer = Offer(adv_NG, lengths(groups), cfg.loss.per, cfg.loss.kl == 0, dist.seed_for(cfg.seed, step, "prune"))
        pruned = COMPLETIONS[cfg.prune.completions.kind](offer, cfg.prune.completions)
        with clock.phase("sync"):
            engine.sleep()
        measured = update(learner, groups, adv_NG, pruned, step, clock)
        with clock.phase("sync"):
            engine.sync(learner.policy)
        measured |= metrics.of_rollout(groups, reward_NG, parts, adv_NG, pruned)
        log.step(step + 1, measured | clock.metrics())
        log.sample(step + 1, first_group(groups[0], tokenizer, reward_NG[0], adv_NG[0], pruned.keep_NG[0]))
        if due(cfg.eval.every, step + 1, cfg.steps):
            evaluate(step + 1)
        if due(cfg.checkpoint.every, step + 1, cfg.steps):
            checkpoint.save(folder / "checkpoints", step + 1, learner.policy, learner.optimizer, cfg.checkpoint.keep)
    if dist.rank() == 0:
        export(learner.policy, source, folder / "hf")
        print(runfolder.summary(folder), flush=True)
    return learner.policy


def check(cfg: Config) -> list[preflight.Check]:
    """Load everything, as `train` does, and try it before a run. Raises ConfigError where it does not even load."""
    source, tokenizer, problems, prompts, _ = load(cfg)
    learner, engine = set_up(cfg, source, tokenizer)
    return preflight.run(learner, engine, tokenizer, problems, prompts)


def load(cfg: Config) -> tuple[Path, data.Tokenizer, list[Problem], list[Prompt], dict[str, list[Prompt]]]:
    """The model's folder and tokenizer, the problems to train on, those as prompts, and the evaluation sets."""
    source = find_model(cfg.model.path)
    tokenizer = data.Tokenizer(source)
    problems = data.load_problems(cfg.data.train, cfg.data.dir)
    prompts = data.to_prompts(problems, tokenizer, cfg.data.system_prompt, cfg.data.max_prompt_tokens)
    sets = evaluation.load_sets(cfg.data.eval, cfg.data.dir, tokenizer,
                                cfg.data.system_prompt, cfg.data.max_prompt_tokens)
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
    policy = load_model(source, torch.promote_types(dtype, torch.float32), device)
    policy.checkpoint_blocks = cfg.model.checkpoint_blocks
    reference = copy.deepcopy(policy).requires_grad_(False) if cfg.loss.kl else None
    engine = start_engine(cfg.rollout.engine, source, dtype, device, backend, tokenizer.eos_ids, cfg.rollout.slots,
                          longest, cfg.rollout.tensor_parallel, cfg.rollout.cache_gib)
    opt = cfg.optim
    optimizer = torch.optim.AdamW(policy.parameters(), lr=opt.lr, betas=(opt.beta1, opt.beta2),
                                  weight_decay=opt.weight_decay, fused=True)
    return Learner(cfg, device, dtype, backend, policy, reference, optimizer), engine


def rollout(engine: Engine, tokenizer: data.Tokenizer, drawn: list[tuple[int, Prompt]], cfg: Config,
            clock: metrics.Clock, progress: str | None) -> tuple[list[Group], dict[str, Tensor]]:
    """o_1..o_G ~ pi_old(.|q) for the prompts drawn, and their rewards. Each rank samples and scores its share.

    Returns the step's groups in the order drawn, on every rank, and each reward component as a float64 [N, G].
    """
    G = cfg.rollout.group_size
    share = dist.mine([(epoch, prompt, g) for epoch, prompt in drawn for g in range(G)])
    with clock.phase("rollout"):
        seeds = [data.sample_seed(cfg.seed, epoch, prompt.id, g) for epoch, prompt, g in share]
        samples = engine.generate([prompt.ids for _, prompt, _ in share], seeds, cfg.rollout.max_new_tokens,
                                  cfg.rollout.temperature, progress=progress)
    with clock.phase("reward"):
        weights = asdict(cfg.reward)
        parts = [score(tokenizer.decode(s.ids), prompt.answer, weights)
                 for s, (_, prompt, _) in zip(samples, share, strict=True)]
        whole = dist.gather(list(zip(samples, parts, strict=True)))
    groups = [Group(prompt, tuple(sample for sample, _ in whole[n * G:(n + 1) * G]))
              for n, (_, prompt) in enumerate(drawn)]
    reward = {name: torch.tensor([part[name] for _, part in whole], dtype=torch.float64).view(-1, G)
              for name in whole[0][1]}
    return groups, reward


def first_group(group: Group, tokenizer: data.Tokenizer, reward_G: Tensor, adv_G: Tensor, keep_G: Tensor) -> dict:
    """A group as people read it."""
    return {"id": group.prompt.id, "gold": group.prompt.answer, "prompt": tokenizer.decode(group.prompt.ids),
            "texts": [tokenizer.decode(s.ids) for s in group.samples], "reward": reward_G.tolist(),
            "advantage": adv_G.tolist(), "kept": keep_G.tolist()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a yaml file, or the name of one in configs/")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="change one setting")
    parser.add_argument("--resume", action="store_true", help="go on from the run folder's newest checkpoint")
    parser.add_argument("--check", action="store_true", help="try everything that a run needs, print what was found, "
                                                             "and stop; status 2 when something fails")
    args = parser.parse_args()
    try:
        cfg = config.load(args.config, args.set)
        if not args.check:
            train(cfg, args.resume)
            return 0
        checks = check(cfg)
        if dist.rank() == 0:
            print(preflight.table(checks), flush=True)
        return 0 if all(c.passed for c in checks) else 2
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RuntimeError:
        print("the run stopped; --resume goes on from the newest checkpoint (checkpoint.every), once what follows is "
              "mended", file=sys.stderr)
        raise
    except KeyboardInterrupt:
        print("interrupted; --resume goes on from the newest checkpoint (checkpoint.every)", file=sys.stderr)
        return 130
    finally:
        dist.close()


if __name__ == "__main__":
    sys.exit(main())
