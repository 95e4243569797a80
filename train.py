"""Train a reasoning model with group-based reinforcement learning.

    [torchrun --nproc_per_node N] train.py --config NAME.yaml [--set a.b=c ...] [--resume]

The loop in `train` is the algorithm: draw prompts, sample groups, score, compare within groups, prune, update.

Dimension key:  N prompts (groups) per step,  G completions per prompt,  T tokens of a packed row,
C completion tokens in it,  D width,  B rows of one mini-batch on this rank.
"""

import argparse
import contextlib
import copy
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

import checkpoint
import config
import data
import dist
import eval as evaluation
import metrics
import runfolder
from advantage import group_norm
from config import Config, ConfigError
from loss import clip, k3, token_weight
from model import BACKENDS, Decoder, check_positions, choose_backend, export, find_model, load_model
from pack import Row, pack
from prune import COMPLETIONS, Pruned
from reward import score
from rollout import ENGINES, TorchEngine
from sample import Group, Prompt


@dataclass(frozen=True, slots=True)
class Learner:
    """What an update works with: the model in training and how packed rows pass through it."""

    cfg: Config
    device: torch.device
    dtype: torch.dtype          # of the computation; the weights are float32 (float64 where that is asked for)
    backend: str                # a key of model.BACKENDS
    policy: Decoder
    reference: Decoder | None   # frozen copy of the initial policy, where the loss has a KL
    optimizer: torch.optim.Optimizer

    def log_probs(self, model: Decoder, row: Row) -> Tensor:
        """[C] log-probs in nats of the row's completion tokens."""
        half = self.dtype == torch.bfloat16
        with torch.autocast(self.device.type, self.dtype) if half else contextlib.nullcontext():
            hidden_TD = model(row.ids_T, row.position_T, BACKENDS[self.backend](row.offsets, row.max_len))
            return model.log_probs(hidden_TD[row.predict_C], row.target_C,
                                   self.cfg.rollout.temperature, self.cfg.model.logp_chunk)


def train(cfg: Config, resume: bool = False) -> Decoder:
    """Run a config to its end and return the trained model. Raises ConfigError for what the user can mend."""
    folder = runfolder.claim(cfg, resume)
    source = find_model(cfg.model.path)
    tokenizer = data.Tokenizer(source)
    prompts = data.to_prompts(data.load_problems(cfg.data.train, cfg.data.dir), tokenizer,
                              cfg.data.system_prompt, cfg.data.max_prompt_tokens)
    sets = evaluation.load_sets(cfg.data.eval, cfg.data.dir, tokenizer,
                                cfg.data.system_prompt, cfg.data.max_prompt_tokens)
    learner, engine = set_up(cfg, source, tokenizer)
    first = checkpoint.load(folder / "checkpoints", learner.policy, learner.optimizer) if resume else 0
    dist.barrier()  # every rank has looked at the folder before one writes into it
    log = runfolder.Log(folder if dist.rank() == 0 else None)
    log.resume(first) if resume else log.create(cfg, learner.device)

    def evaluate(step: int) -> None:
        log.evaluated(step, {name: evaluation.evaluate(
            engine, tokenizer, held_out, cfg.eval.max_new_tokens, progress=log.bar(f"eval {name}"))
            for name, held_out in sets.items()})

    engine.sync(learner.policy)
    if first == 0:
        evaluate(step=0)
    for step in log.steps(first, cfg.steps):
        clock = metrics.Clock()
        drawn = data.draw(prompts, cfg.seed, step, cfg.rollout.prompts_per_step)
        groups, parts = rollout(engine, tokenizer, drawn, cfg, clock, log.bar("rollout"))
        reward_NG = sum(getattr(cfg.reward, name) * part_NG for name, part_NG in parts.items())
        adv_NG = group_norm(reward_NG, cfg.advantage.correction, cfg.advantage.eps)
        pruned = COMPLETIONS[cfg.prune.completions.kind](adv_NG, cfg.prune.completions)
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


def due(every: int, step: int, last: int) -> bool:
    """Whether something done every so many steps (0: never on the way) and after the last is done after this one."""
    return step == last or (every > 0 and step % every == 0)


def set_up(cfg: Config, source: Path, tokenizer: data.Tokenizer) -> tuple[Learner, TorchEngine]:
    """Load the policy, a reference where the loss needs one, and the engine's own copy. Raises ConfigError."""
    device = dist.init(cfg.device)
    longest = cfg.data.max_prompt_tokens + max(cfg.rollout.max_new_tokens, cfg.eval.max_new_tokens)
    check_positions(source, longest, "data.max_prompt_tokens and rollout.max_new_tokens or eval.max_new_tokens")
    auto = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = auto if cfg.model.dtype == "auto" else getattr(torch, cfg.model.dtype)
    backend = choose_backend(cfg.model.attention, device, dtype)
    policy = load_model(source, torch.promote_types(dtype, torch.float32), device)
    policy.checkpoint_blocks = cfg.model.checkpoint_blocks
    reference = copy.deepcopy(policy).requires_grad_(False) if cfg.loss.kl else None
    engine = ENGINES[cfg.rollout.engine](
        load_model(source, dtype, device), tokenizer.eos_ids, cfg.rollout.slots, backend)
    opt = cfg.optim
    optimizer = torch.optim.AdamW(policy.parameters(), lr=opt.lr, betas=(opt.beta1, opt.beta2),
                                  weight_decay=opt.weight_decay, fused=True)
    return Learner(cfg, device, dtype, backend, policy, reference, optimizer), engine


def rollout(engine: TorchEngine, tokenizer: data.Tokenizer, drawn: list[tuple[int, Prompt]], cfg: Config,
            clock: metrics.Clock, progress: str | None) -> tuple[list[Group], dict[str, Tensor]]:
    """o_1..o_G ~ pi_old(.|q) for the prompts drawn, and their rewards. Each rank samples and scores its share.

    Returns the step's groups in the order drawn, on every rank, and each reward component as a float64 [N, G].
    """
    G = cfg.rollout.group_size
    share = dist.mine([(epoch, prompt, g) for epoch, prompt in drawn for g in range(G)])
    with clock.phase("rollout"):
        seeds = [dist.seed_for(cfg.seed, epoch, prompt.id, g, "rollout") for epoch, prompt, g in share]
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


def update(learner: Learner, groups: list[Group], adv_NG: Tensor, pruned: Pruned, step: int,
           clock: metrics.Clock) -> dict[str, float]:
    """All optimizer steps on one rollout. Masks, weights and rows are made once and serve every epoch."""
    cfg, policy, optimizer = learner.cfg, learner.policy, learner.optimizer
    with clock.phase("pack"):
        batches = [pack_batch(learner, groups, adv_NG, pruned, members) for members in minibatches(step, cfg)]
    with clock.phase("score"):
        ref = [score_rows(learner, learner.reference, rows) for rows in batches]
        # With one batch its first pass itself runs under the policy before the update, so no extra pass is needed.
        old = [score_rows(learner, policy if len(batches) > 1 else None, rows) for rows in batches]
    sums, norms = metrics.PassSums(), []
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, cfg)
    with clock.phase("update"):
        for epoch in range(cfg.update.epochs):
            for rows, old_B, ref_B in zip(batches, old, ref, strict=True):
                accumulate(learner, rows, old_B, ref_B, sums, first_pass=epoch == 0)
                dist.sum_gradients(policy)
                norms.append(torch.nn.utils.clip_grad_norm_(
                    policy.parameters(), cfg.optim.clip_norm, error_if_nonfinite=True))
                optimizer.step()
                optimizer.zero_grad()
    return sums.metrics(cfg.pack.capacity, len(norms)) | {
        "train/grad_norm": torch.stack(norms).mean().item(), "train/lr": optimizer.param_groups[0]["lr"]}


@torch.no_grad()
def score_rows(learner: Learner, model: Decoder | None, rows: list[Row]) -> list[Tensor | None]:
    """Log-probs of the rows under a model, without gradient; nothing for no model."""
    return [None if model is None else learner.log_probs(model, row) for row in rows]


def accumulate(learner: Learner, rows: list[Row], old_B: list[Tensor | None], ref_B: list[Tensor | None],
               sums: metrics.PassSums, first_pass: bool) -> None:
    """Add the gradient of this rank's rows to the policy's. A row without old log-probs gets them from this pass."""
    for i, row in enumerate(rows):
        logp_C = learner.log_probs(learner.policy, row)
        if old_B[i] is None:
            old_B[i] = logp_C.detach()
        loss, f_C, k3_C = row_loss(logp_C, old_B[i], ref_B[i], row, learner.cfg)
        loss.backward()
        sums.add(row, loss.detach(), old_B[i], f_C, k3_C, first_pass)


def row_loss(logp_C: Tensor, old_C: Tensor, ref_C: Tensor | None, row: Row, cfg: Config) -> tuple[Tensor, ...]:
    """The row's part of the loss: -w f A logp, plus w beta k3. Also returns f and k3 (or none), for the metrics."""
    f_C = clip(logp_C, old_C, row.adv_C, cfg.loss.clip_low, cfg.loss.clip_high, cfg.loss.dual_clip)
    loss = -(row.weight_C * f_C * row.adv_C * logp_C).sum()
    if ref_C is None:
        return loss, f_C, None
    k3_C = k3(logp_C, ref_C)
    return loss + cfg.loss.kl * (row.weight_C * k3_C).sum(), f_C, k3_C.detach()


def minibatches(step: int, cfg: Config) -> list[list[int]]:
    """Which groups each optimizer step of an epoch trains on: a seeded split, the same in every epoch."""
    N, parts = cfg.rollout.prompts_per_step, cfg.update.minibatches
    shuffled = torch.randperm(N, generator=torch.Generator().manual_seed(dist.seed_for(cfg.seed, step, "minibatch")))
    return [sorted(part.tolist()) for part in shuffled.chunk(parts)]


def pack_batch(learner: Learner, groups: list[Group], adv_NG: Tensor, pruned: Pruned, members: list[int]) -> list[Row]:
    """This rank's rows of one mini-batch, on the device. The weights' denominator is the mini-batch's own."""
    cfg = learner.cfg
    adv_NG, part = adv_NG[members], Pruned(pruned.keep_NG[members], pruned.weight_NG[members])
    chosen = [groups[n] for n in members]
    len_NG = torch.tensor([[len(s.ids) for s in group.samples] for group in chosen])
    weight_NG = token_weight(len_NG, part, cfg.loss.per, cfg.loss.count, cfg.rollout.max_new_tokens)
    dtype = learner.policy.embed_tokens.weight.dtype
    rows = pack(chosen, adv_NG, weight_NG, part.keep_NG, cfg.pack.capacity, dist.rank(), dist.world_size())
    return [row.to(learner.device, dtype) for row in rows]


def learning_rate(step: int, cfg: Config) -> float:
    """A pure function of the step: linear warm-up, then constant or a cosine to 0."""
    opt = cfg.optim
    if step < opt.warmup_steps:
        return opt.lr * (step + 1) / opt.warmup_steps
    if opt.schedule == "constant":
        return opt.lr
    done = (step - opt.warmup_steps) / max(1, cfg.steps - opt.warmup_steps)
    return opt.lr * (1 + math.cos(math.pi * done)) / 2


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
    args = parser.parse_args()
    try:
        train(config.load(args.config, args.set), args.resume)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; --resume goes on from the newest checkpoint (checkpoint.every)", file=sys.stderr)
        return 130
    finally:
        dist.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
