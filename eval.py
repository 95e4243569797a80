"""Evaluate a model: load, sample, grade, summarise, print.

    python eval.py --model DIR_or_name --data NAME_or_file[,...] [--data-dir DIR] [--out results.json]
    python eval.py --model DIR_or_name --config eval/dapo.yaml  # as a paper does it: configs/eval/
    python eval.py --model RUN/hf --config RUN/config.yaml      # as the run itself does it; or a checkpoint

--set changes settings as in training: eval.n, eval.temperature, eval.max_new_tokens, rollout.slots, ...
train.py calls the same functions. With --out the responses are kept in portions, and an interrupted
evaluation continues from them. Files of results are in infra/results.py. `make eval.pyz` puts all that this
needs into one file.
"""

from infra import terminal

if __name__ == "__main__":  # before the imports that take seconds
    terminal.of_eval(__doc__)

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import config
from config import Config, Eval, Reward
from data import Task, load_problems, to_prompts
from infra import dist
from infra.device import engine_spec, find_device, fit_engine
from infra.figures import results_table, summarise
from infra.rows import all_have_answers
from infra.signals import exit_status
from infra.tokenizer import Tokenizer, load_tokenizer
from infra.weights import check_positions, find_model, read_shape
from records import EngineSpec, Problem, Prompt, Request, Rewards, frozen, plain
from rollout import Engine, start_engine
from settings import leaves
from settings.loader import ConfigError
from settings.paths import matching, user_path
from verify.grade import grade

ROUNDS_BETWEEN_WRITES = 4   # how often all decoding slots are filled between two writes of the responses


@frozen
class EvalSet:
    """The problems of an evaluation set, their prompts in the same order, and the reward."""

    name: str
    problems: list[Problem]
    prompts: list[Prompt]
    reward: Reward | None = None  # of training, unless it rewards accuracy
    graded: bool = True           # every problem has a gold answer

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Return the lowest and the highest possible reward."""
        if self.reward is None:
            return None
        from reward import reward_range

        return reward_range(self.reward.weights)

    def first(self, limit: int | None) -> "EvalSet":
        """Keep the first so many problems; None: all."""
        return replace(self, problems=self.problems[:limit], prompts=self.prompts[:limit])


# ---- load

def load_sets(cfg: Config, tokenizer: Tokenizer) -> list[EvalSet]:
    """Load evaluation sets: "a.jsonl,gsm8k" -> [a, gsm8k]. Raises ConfigError."""
    data, reward, sets = cfg.data, cfg.reward, []
    for name in map(str.strip, data.eval.split(",")):
        short = Path(name).stem
        if any(short == s.name for s in sets):
            raise ConfigError(f"evaluation set {short!r} is named twice in {data.eval!r}")
        problems = load_problems(name, data.dir, False, data.columns, reward.needs_answers)
        graded = all_have_answers(problems, short, reward.needs_answers)
        prompts = to_prompts(problems, tokenizer, data.system_prompt, data.max_prompt_tokens)
        sets.append(EvalSet(short, problems, prompts, None if reward.accuracy else reward, graded))
    return sets


# ---- sample and grade

def evaluate(engine: Engine, tokenizer: Tokenizer, held_out: EvalSet, settings: Eval, seed: int = 0,
             store: Any = None) -> dict:
    """Sample and judge settings.n answers to every problem, spread over the ranks; all get `summarise`.

    Each answer has a seed of its own, so neither the number of ranks nor the other requests change it, up to
    rounding.

    Responses that a `store` holds (infra/results.py) are not sampled again; new ones are written to it as
    they come.
    """
    stored = store.responses[held_out.name] if store else {}
    requests = [(prompt, k) for prompt in held_out.prompts for k in range(settings.n)]
    missing = [(k, Request(prompt, dist.seed_for(seed, prompt.id, k, "eval"), settings.max_new_tokens))
               for prompt, k in requests if (prompt.id, k) not in stored]
    chunk = store.chunk if store else len(requests)
    for start in range(0, len(missing), chunk):
        label = None
        if dist.is_first():
            label = f"eval {held_out.name} from {len(requests) - len(missing) + start}/{len(requests)}"
            terminal.print_progress(label)
        asked = missing[start:start + chunk]
        responses = sample_responses(engine, tokenizer, held_out, asked, settings, label)
        stored |= {(response["id"], response["k"]): response for response in responses}
        if store:
            store.keep(held_out.name, responses)
    problems = [{"id": p.id, "question": p.question, "gold": p.answer, "level": p.level, "subject": p.subject,
                 "responses": [stored[p.id, k] for k in range(settings.n)]} for p in held_out.problems]
    return summarise(problems, held_out.bounds)


def sample_responses(engine: Engine, tokenizer: Tokenizer, held_out: EvalSet,
                     requests: list[tuple[int, Request]], settings: Eval, progress: str | None
                     ) -> list[dict]:
    """Sample and judge the k-th answer to a prompt for each (k, its request). All ranks return all."""
    local = dist.local_slice(requests)
    asked = [request for _, request in local]
    samples = engine.generate(asked, settings.temperature, settings.top_p, progress)
    answers = [(tokenizer.read(sample), request.prompt, sample.own)
               for request, sample in zip(asked, samples, strict=True)]
    judged = grade_responses(answers, held_out, settings.max_new_tokens)
    return dist.gather([
        {"id": prompt.id, "k": k, "tokens": tokens, "finished": sample.finished, "text": turns[-1]} | verdict
        | ({"turns": turns} if len(turns) > 1 else {})
        for (turns, prompt, tokens), (k, _), sample, verdict
        in zip(answers, local, samples, judged, strict=True)])


def grade_responses(answers: list[tuple[Sequence[str], Prompt, int]], held_out: EvalSet,
                    longest: int) -> list[dict]:
    """Grade answers (turns, prompt, tokens) if the set has gold ones, and score them by its reward."""
    judged = [{} for _ in answers]
    if held_out.graded:
        judged = grade([(prompt.answer, turns[-1]) for turns, prompt, _ in answers])
    if held_out.reward is None:
        return judged
    from reward import list_components, score

    names, weights = list_components(held_out.reward, held_out.graded), held_out.reward.weights
    values = torch.tensor(score(answers, longest, held_out.reward, held_out.graded), dtype=torch.float64)
    components = dict(zip(names, values.view(-1, len(names)).T, strict=True))
    tokens = torch.tensor([count for _, _, count in answers])
    for i, total in enumerate(Rewards(components, weights, tokens).total_NG):
        counted = {name: plain(components[name][i]) for name in weights}
        judged[i] |= {"reward": plain(total), "components": counted}
    return judged


# ---- the command

def find_loader(cfg: Config) -> tuple[Tokenizer, Callable]:
    """Load the tokenizer of a model, or of the one that a checkpoint's run began with, and find the function
    that loads a policy, of a folder and a dtype."""
    from infra.checkpoint import original_model
    from policy import weights_of

    path = cfg.model.path
    return load_tokenizer(cfg, find_model(original_model(path))), partial(weights_of(path).policy, path)


def name_changed_files(cfg: Config, names: list[str], tokenizer: Tokenizer) -> None:
    """Print which files of the user's are not the ones that a run began with, if a config is a run's."""
    for run in (user_path(name).parent for name in names):
        if (run / "env.json").is_file():
            from infra.runfolder import changed_files, files_of

            for setting, copy in changed_files(run, files_of(cfg.reward, tokenizer)).items():
                if copy.is_file():
                    terminal.to_stderr(
                        f"the file of {setting} has changed since the run began: it was {copy}")


def start_or_keep(started: list, name: str, spec: EngineSpec, model: str) -> Engine:
    """Return the engine that was `started`, with its kind, for the model before, if this one has other
    weights only; else start one. Raises ConfigError for a second one of vLLM's."""
    kind = name, read_shape(spec.folder), replace(spec, folder=None)
    if not started or started[0] != kind:
        if started and name == "vllm":
            raise ConfigError(f"--model: {model} has another shape than the model before it, and vLLM has "
                              "one engine per process; evaluate it by a command of its own")
        started[:] = kind, start_engine(name, spec)
    return started[1]


def evaluate_model(cfg: Config, args: argparse.Namespace, out: Path | None, started: list) -> dict:
    """Evaluate the model of a config; responses that `out` holds already are not sampled again."""
    device = dist.init(find_device(cfg.device))
    tokenizer, load_policy = find_loader(cfg)
    sets = [s.first(cfg.eval.limit) for s in load_sets(cfg, tokenizer)]
    if cfg.reward.custom_file:
        from reward import own_rewards

        own_rewards().try_functions(cfg.reward, *(s.problems for s in sets if s.reward))
    leaves.through("task", cfg, Task(tokenizer.folder, tokenizer, sets=sets))
    name_changed_files(cfg, args.config, tokenizer)
    longest = cfg.own_longest or cfg.eval.max_new_tokens + max(
        len(prompt.ids) for s in sets for prompt in s.prompts)
    check_positions(
        tokenizer.folder, longest, "the prompts and eval.max_new_tokens (or environment.max_context)")
    engine_name, spec = fit_engine(cfg.rollout.engine, engine_spec(cfg, device, tokenizer, longest))
    cfg = config.with_value(cfg, "rollout.engine", engine_name)
    head = store = None
    if out:
        from infra import results

        head = dist.on_first(results.describe_result, cfg, args.seed, spec, tokenizer, sets)
        if finished := results.read_finished(out, head):
            return finished
        store = results.Store(out, head, ROUNDS_BETWEEN_WRITES * spec.slots * dist.world_size())
    engine = start_or_keep(started, engine_name, spec, cfg.model.path)
    engine, _ = leaves.through("engine", cfg, (engine, tokenizer))
    engine.sync(load_policy(spec.folder, spec.dtype))
    result = {"head": head, "results": {
        s.name: evaluate(engine, tokenizer, s, cfg.eval, args.seed, store) for s in sets}}
    if store:
        store.finish(result)
    return result


def evaluate_models(args: argparse.Namespace) -> None:
    """Evaluate every model of the command line and print its table."""
    args.config = args.config or ["eval/default.yaml"]
    terminal.name_unread(args.set)
    cfg = config.load(args.config, args.set)
    if not args.model:
        raise ConfigError("--model must be given: a Hugging Face folder, a checkpoint or a hub name")
    if not cfg.data.eval:
        raise ConfigError("--data must be given: sets separated by commas, or a --config that has some")
    models = list(dict.fromkeys(path for text in args.model for path in matching(text, "--model")))
    outs = [None] * len(models)
    if args.out:
        from infra.results import place_results

        outs = place_results(models, args.out)
    started = []
    for model, out in zip(map(str, models), outs, strict=True):
        result = evaluate_model(config.with_value(cfg, "model.path", model), args, out, started)
        if dist.is_first():
            print(*[model] * (len(models) > 1), results_table(result["results"]), sep="\n", flush=True)


def main() -> int:
    return exit_status(partial(evaluate_models, terminal.of_eval(__doc__)),
                       lambda: "the same command goes on from there, if it has --out")


if __name__ == "__main__":
    sys.exit(main())
