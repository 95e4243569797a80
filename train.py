"""Train a reasoning model with group-based reinforcement learning.

    [torchrun --nproc_per_node N] train.py --config NAME.yaml [MORE.yaml ...] [--set a.b=c ...]
        [--resume [auto]] [--check | --fit | --show]
    train.py --settings [SECTION]

The loop in `train` is the algorithm: draw prompts, sample groups, score them, compare within groups, prune,
update the policy, hand it to the engine. docs/methods.md has every method. Papers have it otherwise:

1. Advantages come from all G completions, before pruning, over the sample deviation as in the released codes.
   GRPO's paper does not say which (advantage.correction); PODS alone compares the kept.
2. The loss is a weighted sum. Weights and denominators come once per optimizer step from the whole batch of
   all ranks, so no cut into rows or ranks changes the gradient. CPPO divides by the kept (loss.denominator).
3. Completions of a prompt share it in a row: it is paid for once, and the gradient is the same.
4. Log-probs before the update are the trainer's own, not the engine's (loss.old_logp).
5. Prompts that Dynamic Pruning skips are not replaced, and its prompt level is our reconstruction.
"""

from infra import commands

if __name__ == "__main__":  # before the imports that take seconds
    commands.refuse_early(commands.of_train(__doc__))

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import config
import data
from advantage import advantage
from collect import Sampler, Selection, choose, describe_missing, prompts_needed, reward_midpoint, shortage
from config import Config, ConfigError
from eval import EvalSet, evaluate, load_sets
from history import PromptHistory
from infra import checkpoint, checks, dist, runfolder
from infra.checkpoint import Checkpoints, find_newest, how_to_go_on, save_plainly
from infra.choices import REQUESTED, list_choices, longest_sampled, resolve_auto
from infra.device import engine_spec, find_device
from infra.export import prompted_files
from infra.rows import all_have_answers
from infra.runfolder import Resume
from infra.signals import exit_status
from infra.stopping import Stop, Stopped, asked_to_stop, stop_engine
from infra.stored import once_a_node
from infra.tokenizer import Tokenizer, load_tokenizer
from infra.weights import check_positions, find_model
from learner import Learner, NotFinite, build_learner
from metrics import Clock, list_decisions, memory_metrics, rollout_metrics, sample_lines
from model import Decoder
from policy import Weights
from records import Batch, Metrics, Rolled, frozen
from reward import own_rewards
from rollout import Engine, start_engine
from settings import leaves
from update import update


@frozen
class Parts:
    """The objects that a run is made of. A leaf puts its own in their places (settings/leaves.py)."""

    cfg: Config                            # with all that was left to `auto` decided
    task: data.Task
    weights: Weights
    learner: Learner
    engine: Engine
    sampler: Sampler
    history: PromptHistory
    first: int                             # the step to begin with
    # Of groups, rewards and settings, before pruning.
    advantage: Callable = lambda groups, rewards, settings: advantage(rewards, settings)
    after_update: tuple[Callable, ...] = ()  # of learner, rollouts, step and clock; they return metrics
    measures: tuple[Callable, ...] = ()      # of rollouts and batch; they return metrics


@frozen
class Run:
    """A run from its first step to its last."""

    parts: Parts
    checkpoints: Checkpoints
    log: runfolder.RunLog
    inputs: dict[str, str]                 # hashes of data, tokenizer and weights


def train(cfg: Config, resume: Resume = "never", stop: Stop | None = None) -> Decoder:
    """Run a config to its end and return the trained model, sharded over the ranks.

    Raises ConfigError for a mistake that the user can mend, Stopped after a `stop`, and NotFinite.
    """
    run, selection = prepare(cfg, resume), Selection.of(cfg)
    stop_engine(run.parts.engine, stop, alone=cfg.rollout.tensor_parallel == 1)
    with run.log.running(run.parts.cfg), run.checkpoints.finished():
        parts = before_steps(run)
        learner, engine, sampler, history = parts.learner, parts.engine, parts.sampler, parts.history
        for step in run.log.steps(parts.first, cfg.steps):
            clock, rolled, seed = Clock(), Rolled(), dist.seed_for(cfg.seed, step, "prune")
            while count := prompts_needed(rolled, selection, seed):  # in rounds, if rollout.until says so
                draws = history.draw(count)                 # 1. prompts; some are skipped
                with clock.phase("rollout"):
                    groups = sampler.rollout(draws)         # 2. o_1 .. o_G ~ pi_old(. | q), with log-probs
                with clock.phase("reward"):
                    rewards = sampler.score(groups)         # 3. named components, on every rank
                # 4. A_i from all G, before pruning
                adv_NG = parts.advantage(groups, rewards, cfg.advantage)
                newest = Rolled(draws, groups, rewards, adv_NG)
                history.record(newest)
                rolled += newest
            # 5. survivors and their weights, of each epoch if update.redraw asks for it
            batch, *redrawn = [choose(rolled, selection, seed, epoch) for epoch in range(selection.draws)]
            history.adapt(rolled)
            with clock.phase("sync"):
                engine.sleep()
            if run.checkpoints.written:
                run.checkpoints.wait_for_copies()
            # 6. pack, 7. -sum w f A logp, optimizer step
            measured = update(learner, batch, step, clock, redrawn)
            for follow in parts.after_update:
                measured |= follow(learner, rolled, step, clock)
            with clock.phase("sync"):
                engine.sync(learner.policy)
            log_step(run, step + 1, rolled, batch, measured, clock)
            run.log.warn(step + 1, shortage(rolled, batch, selection))
            run.checkpoints.reach(step + 1, extra_state(run, cfg))
            if is_due(cfg.eval.every, step + 1, cfg.steps):
                evaluate_sets(run, step + 1)
            if is_due(cfg.checkpoint.every, step + 1, cfg.steps):
                run.checkpoints.save()
            if asked_to_stop(stop) and step + 1 < cfg.steps:
                raise Stopped
        engine.sleep()  # an export gathers weights in float32
        texts = prompted_files(parts.task.tokenizer, cfg.data.system_prompt)
        parts.weights.export(learner.policy, parts.task.source, Path(cfg.out) / "hf", texts)
    return learner.policy


def log_step(run: Run, step: int, rolled: Rolled, batch: Batch, measured: Metrics, clock: Clock) -> None:
    """Log a step: metrics, warnings about its rewards, decisions, and some groups as text."""
    parts = run.parts
    machine = clock.metrics() | run.checkpoints.metrics() | memory_metrics(parts.learner.device, parts.engine)
    measured |= machine | rollout_metrics(rolled, batch)
    for measure in parts.measures:
        measured |= measure(rolled, batch)
    run.log.step(step, measured)
    run.log.warn(step, describe_missing(rolled.rewards, parts.cfg.reward))
    run.log.write("decisions.jsonl", {"step": step} | list_decisions(rolled, batch))
    run.log.sampled(step, sample_lines(rolled, batch, parts.task.tokenizer.decode, parts.cfg.log.groups))


def evaluate_sets(run: Run, step: int) -> None:
    """Answer and grade every evaluation set with the weights that the engine holds, and log the scores."""
    parts, clock = run.parts, Clock()
    results = {s.name: evaluate(parts.engine, parts.task.tokenizer, s, parts.cfg.eval)
               for s in parts.task.sets}
    if results:
        run.log.evaluated(step, results, clock.metrics()["time/step"])


def is_due(every: int, step: int, last: int) -> bool:
    """Tell whether an action is due now that comes every so many steps (0: never) and after the last one."""
    return step == last or (every > 0 and step % every == 0)


def extra_state(run: Run, asked: Config) -> dict:
    """Return the content of a checkpoint's extra.pt."""
    return {
        "config": config.flatten(run.parts.cfg) | {REQUESTED: asked.rollout.slots},
        "history": run.parts.history.state(),
        "inputs": run.inputs,
    }


def prepare(cfg: Config, resume: Resume) -> Run:
    """Load everything, and go on from a checkpoint or open the run folder."""
    clock = Clock()
    folder = runfolder.require_free_folder(cfg, resume)
    task = load_task(cfg)
    files = runfolder.files_of(cfg.reward, task.tokenizer)
    weights = leaves.through("weights", cfg, Weights())
    log = runfolder.RunLog(folder if dist.is_first() else None)
    if folder.exists():
        log.lock()  # before models are loaded: another run may have only just begun there
    begun_with = task.inputs | weights.identify(task.source)
    inputs = leaves.through("inputs", cfg, begun_with | checkpoint.describe_code())
    checkpoint.require_same_ranks(config.flatten(cfg) | files | inputs | {"--resume": resume})
    path, saved = find_newest(resume, folder / "checkpoints")
    if path:
        runfolder.require_same_settings(path, saved["config"], cfg)
        log.require_logs(saved["step"], saved.get("logs", {}))
        runfolder.require_same_files(folder, files)
        method = dict.fromkeys(saved["inputs"].keys() & {checkpoint.METHOD}, "nothing")
        checkpoint.require_same_inputs(path, saved["inputs"], method | inputs)
    decided = resolve_auto(cfg, task.source, saved["config"])
    parts, bare_engine = assemble(decided, task, weights, saved["step"])
    learner, engine, history = parts.learner, parts.engine, parts.history
    roles = {"policy": (learner.policy, learner.optimizers)} | learner.roles
    checkpoints = Checkpoints(
        folder / "checkpoints", cfg.checkpoint.keep, roles, learner.device, log.seal)
    if path is None:
        ready = checks.before_run(cfg, checks.Ready(decided, learner, bare_engine, task))
        checks.require_checks(ready.checks)
        dist.barrier()  # every rank has looked at the folder before one writes into it
        noted = {"chosen": list_choices(cfg, decided), "inputs": begun_with}
        log.create(cfg, resume, learner.device, noted, files)
    else:
        checkpoints.load(path)
        history.restore(saved["history"])
        log.resume(saved["step"], cfg)
    engine.sync(learner.policy)
    log.unlogged["time/start"] = clock.metrics()["time/step"]
    return Run(parts, checkpoints, log, inputs)


def load_task(cfg: Config) -> data.Task:
    """Load the tokenizer and all problems, and render them as prompts. Collective. Raises ConfigError."""
    dist.init(find_device(cfg.device))
    source = find_model(cfg.model.path)
    tokenizer = load_tokenizer(cfg, source)
    sets = load_sets(cfg, tokenizer) if cfg.data.eval else []
    (problems, prompts), (graded, inputs) = once_a_node(partial(load_prompts, cfg, source, tokenizer, sets))
    # Problems beyond eval.limit are left out of training too.
    sets = [s.first(cfg.eval.limit) for s in sets]
    return leaves.through("task", cfg, data.Task(source, tokenizer, problems, prompts, sets, graded, inputs))


def load_prompts(cfg: Config, source: Path, tokenizer: Tokenizer, sets: list[EvalSet],
                 ) -> tuple[tuple[list, list], tuple[bool, dict[str, str]]]:
    """Load problems to train on and their prompts; whether all have answers, and the hashes of all inputs."""
    settings, gold = cfg.data, cfg.labels.reads_answers
    problems = data.load_problems(
        settings.train,
        settings.dir,
        True,
        settings.columns,
        cfg.reward.needs_answers and gold
    )
    if gold:  # votes read no answer
        problems = data.drop_overlap(problems, [p for s in sets for p in s.problems])
    problems = problems[:settings.limit]
    graded = not gold or all_have_answers(problems, settings.train, cfg.reward.needs_answers)
    if cfg.reward.custom_file:
        own_rewards().try_functions(cfg.reward, problems, *(s.problems for s in sets if s.reward))
    prompts = data.to_prompts(
        problems,
        tokenizer,
        settings.system_prompt,
        settings.max_prompt_tokens,
        settings.drop_longer
    )
    kept = {prompt.id for prompt in prompts}
    problems = [p for p in problems if p.id in kept]  # checks before a run compare both in order
    inputs = checkpoint.inputs_of(source, prompts, {s.name: s.prompts for s in sets})
    return (problems, prompts), (graded, inputs)


def assemble(cfg: Config, task: data.Task, weights: Weights, first: int) -> tuple[Parts, Engine]:
    """Load the models of a run, and make its parts, to which leaves add theirs. Returns the engine beside
    them as it is without leaves. Nothing in `cfg` is left to auto."""
    learner, bare_engine = load_models(cfg, task, weights)
    engine, _ = leaves.through("engine", cfg, (bare_engine, task.tokenizer))
    sampler = Sampler(engine, task.tokenizer, cfg.rollout, cfg.reward, cfg.seed, task.graded)
    easy_above = reward_midpoint(cfg.reward, cfg.rollout.differ_in)
    history = PromptHistory(task.prompts, cfg.prune.prompts, cfg.seed, easy_above)
    parts = Parts(cfg, task, weights, learner, engine, sampler, history, first)
    return leaves.through("parts", cfg, parts), bare_engine


def load_models(cfg: Config, task: data.Task, weights: Weights) -> tuple[Learner, Engine]:
    """Load the models, and start the engine, which waits for its first sync. Nothing in `cfg` is left to auto
    (choices.resolve_auto). Raises ConfigError."""
    longest = longest_sampled(cfg)
    check_positions(
        task.source,
        longest,
        "data.max_prompt_tokens and rollout.max_new_tokens or eval.max_new_tokens, or "
        "environment.max_context"
    )
    device = dist.init(find_device(cfg.device))
    learner = build_learner(cfg, task.source, device, weights)
    spec = leaves.through("spec", cfg, engine_spec(cfg, device, task.tokenizer, longest))
    return learner, start_engine(cfg.rollout.engine, replace(spec, sleeps=cfg.rollout.sleep == "always"))


def before_steps(run: Run) -> Parts:
    """Evaluate if that is due and was not done, and let leaves make their parts ready."""
    cfg, first = run.parts.cfg, run.parts.first
    done = dist.on_first(runfolder.evaluations, Path(cfg.out))  # without it, if a stop came in the middle
    if first not in done and (first == 0 or is_due(cfg.eval.every, first, cfg.steps)):
        evaluate_sets(run, first)
    return leaves.through("begin", cfg, run.parts)


def main() -> int:
    args = commands.of_train(__doc__)
    return exit_status(partial(run_command, args), lambda: args.config and how_to_go_on(
        Path(config.load(args.config, args.set).out)))


def run_command(args: argparse.Namespace) -> int | None:
    """Run the command line; returns the exit status."""
    if args.settings is not None:
        from leaves.page.show import describe_settings

        return print(describe_settings(args.settings))
    cfg = config.load(args.config, args.set)
    if args.show:
        from leaves.page.show import resolved

        return print(resolved(cfg))
    if args.fit or args.memory or args.gpus:
        from leaves.fit.fit import report

        return report(cfg, args)
    if not any(text.startswith("out=") for text in args.set):
        cfg = runfolder.own_folder(cfg, args.config)
    if args.check:
        task = load_task(cfg)
        decided = resolve_auto(cfg, task.source)
        parts, engine = assemble(decided, task, leaves.through("weights", cfg, Weights()), 0)
        ready = checks.before_run(cfg, checks.Ready(decided, parts.learner, engine, task))
        return checks.print_checks(ready.checks)
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and args.resume == "never":
        raise ConfigError("torchrun --max-restarts needs --resume auto: begin, or go on after a restart")
    if runfolder.is_done(cfg, args.resume):
        if os.environ.get("RANK", "0") == "0":
            print(f"{cfg.out} is finished: its {cfg.steps} steps are done, and nothing is left to do; set a "
                  "larger `steps` to go on")
        return None
    try:
        train(cfg, args.resume, Stop())
    except NotFinite as error:
        path = Path(cfg.out) / f"not_finite_step_{error.step:06d}.pt"
        if dist.is_first():
            save_plainly(error.records, path)
            print(f"error: {error}; the step's batch is in {path}; {how_to_go_on(path.parent)}",
                  file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
