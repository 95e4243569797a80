"""Evaluate a model: sample, grade, count. Compare results, and grade them again.

    python eval.py --model DIR_or_name --data NAME_or_file[,...] [--data-dir DIR] [--out results.json]
    python eval.py --model DIR_or_name --config eval/dapo.yaml  # as a paper does it: configs/eval/
    python eval.py --model RUN/hf --config RUN/config.yaml      # as the run itself does it; or a checkpoint
    python eval.py --model DIR [DIR ...] --suite competitions   # frozen: a line to cite, LaTeX, paired table
    python eval.py --rescore results.json                       # grade the same responses again
    python eval.py --rescore results.json --also math-verify    # and math-verify's verdicts beside ours
    python eval.py --compare a.json b.json                      # paired: difference, interval, McNemar's test

--set changes settings as in training: eval.n, eval.temperature, eval.max_new_tokens, rollout.slots, ...
train.py calls the same functions. With --out the responses are kept as they come, and an interrupted
evaluation continues from them.

Dimension key:  N problems.
"""

from infra import terminal

if __name__ == "__main__":  # before the imports that take seconds
    terminal.of_eval(__doc__)

import argparse
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch

import config
import verify
from config import Config, ConfigError, Data, Reward
from data import Task, load_problems, to_prompts
from infra import dist
from infra.checkpoint import original_model, policy_files
from infra.device import choose_backend, find_device, fit_engine, rounds_products
from infra.digests import hash_files, sha256
from infra.lines import blame_file, write_json
from infra.models import load_policy
from infra.results import Results, Store, list_models, read_result, require_place, require_same_head
from infra.rows import all_have_answers
from infra.runfolder import Texts, changed_files, print_progress
from infra.signals import exit_status
from infra.tokenizer import Tokenizer
from infra.weights import check_positions, find_model, read_shape
from page.evaluations import comparison_table, count_right, mean_reward, results_table, suite_lines
from records import EngineSpec, Problem, Prompt, Request, Rewards, frozen, plain
from reward import list_components, own_rewards, reward_range, score
from rollout import Engine, start_engine
from settings import leaves
from settings.paths import user_path
from verify.compare_math_verify import judge_by_math_verify
from verify.grade import grade, name_unreadable
from verify.statistics import bounded_interval, detectable, majority_at, mean, pass_at, vote, wilson

GRADED_BY = ("math-verify", "latex2sympy2_extended", "antlr4-python3-runtime", "sympy", "mpmath")
# Settings that a suite leaves open, of the machine.
MACHINE = ("rollout.engine=", "rollout.slots=", "rollout.tensor_parallel=", "rollout.cache_gib=",
           "model.dtype=", "model.products=", "model.attention=", "device=", "data.dir=")
ROUNDS_BETWEEN_WRITES = 4   # how often all decoding slots are filled between two writes of the responses


@frozen
class Sampling:
    """The way answers are sampled: n to every problem, greedy at temperature 0."""

    max_new_tokens: int
    n: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


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
        return reward_range(self.reward.weights) if self.reward else None

    def first(self, limit: int | None) -> "EvalSet":
        """Keep the first so many problems; None: all."""
        return replace(self, problems=self.problems[:limit], prompts=self.prompts[:limit])


# ---- sampling and judging

def evaluate(engine: Engine, tokenizer: Tokenizer, held_out: EvalSet, sampling: Sampling,
             progress: str | None = None) -> dict:
    """Sample and judge sampling.n answers to every problem, spread over the ranks; all get `summarise`."""
    problems = answer_problems(engine, tokenizer, held_out, sampling, progress)
    return summarise(problems, bounds=held_out.bounds)


def answer_problems(engine: Engine, tokenizer: Tokenizer, held_out: EvalSet, sampling: Sampling,
                    progress: str | None, store: Store | None = None) -> list[dict]:
    """Sample and judge, and return every problem with its responses.

    Responses that a `store` holds are not sampled again; new ones are written to it as they come.
    """
    stored = store.responses_of(held_out.name) if store else {}
    requests = [(i, k) for i in range(len(held_out.prompts)) for k in range(sampling.n)]
    missing = [(i, k) for i, k in requests if (held_out.problems[i].id, k) not in stored]
    chunk = store.chunk if store else len(requests)
    for start in range(0, len(missing), chunk):
        before = len(requests) - len(missing) + start
        in_pieces = before > 0 or chunk < len(missing)
        label = f"{progress} from {before}/{len(requests)}" if progress and in_pieces else progress
        if label:
            print_progress(label)
        asked = missing[start:start + chunk]
        responses = sample_responses(engine, tokenizer, held_out, asked, sampling, label)
        stored |= {(response["id"], response["k"]): response for response in responses}
        if store:
            store.keep(held_out.name, responses)
    problems = []
    for p in held_out.problems:
        responses = [stored[p.id, k] for k in range(sampling.n)]
        problems.append({"id": p.id, "question": p.question, "gold": p.answer, "level": p.level,
                         "subject": p.subject, "responses": responses})
    return problems


def sample_responses(engine: Engine, tokenizer: Tokenizer, held_out: EvalSet, requests: list[tuple[int, int]],
                     sampling: Sampling, progress: str | None) -> list[dict]:
    """Sample and judge the k-th answer to the i-th prompt for each (i, k) requested. All ranks return all.

    Each answer has a seed of its own, so neither the number of ranks nor the other requests change it, up to
    rounding.
    """
    local = [(held_out.prompts[i], k) for i, k in dist.local_slice(requests)]
    asked = [Request(prompt, dist.seed_for(sampling.seed, prompt.id, k, "eval"), sampling.max_new_tokens)
             for prompt, k in local]
    samples = engine.generate(asked, sampling.temperature, sampling.top_p, progress)
    texts = [tokenizer.read(sample.ids[:sample.end]) for sample in samples]
    answers = [(text, prompt, sample.own)
               for (prompt, _), sample, text in zip(local, samples, texts, strict=True)]
    judged = grade_responses(answers, held_out, sampling.max_new_tokens)
    responses = []
    for (prompt, k), sample, text, verdict in zip(local, samples, texts, judged, strict=True):
        responses.append({"id": prompt.id, "k": k, "tokens": sample.own, "finished": sample.finished,
                          "text": text} | verdict)
    return dist.gather(responses)


def grade_responses(answers: list[tuple[str, Prompt, int]], held_out: EvalSet, longest: int) -> list[dict]:
    """Grade answers (text, prompt, tokens) if the set has gold ones, and score them by its reward."""
    judged = [{} for _ in answers]
    if held_out.graded:
        judged = grade([(prompt.answer, text) for text, prompt, _ in answers])
    if held_out.reward is None:
        return judged
    names, weights = list_components(held_out.reward, held_out.graded), held_out.reward.weights
    values = torch.tensor(score(answers, longest, held_out.reward, held_out.graded), dtype=torch.float64)
    components = dict(zip(names, values.view(-1, len(names)).T, strict=True))
    tokens = torch.tensor([count for _, _, count in answers])
    for i, total in enumerate(Rewards(components, weights, tokens).total_NG):
        counted = {name: plain(components[name][i]) for name in weights}
        judged[i] |= {"reward": plain(total), "components": counted}
    return judged


def summarise(problems: list[dict], sizes: list[int] | None = None,
              bounds: tuple[float, float] | None = None) -> dict:
    """Summarise n responses to each problem: accuracies if they are graded, rewards if `bounds` are given.

    A problem without any reward is left out of the mean reward. length is in tokens; groups holds accuracies,
    or else rewards, by level and by subject. Raises ConfigError for a k of pass@k (`sizes`) above n.
    """
    n = len(problems[0]["responses"])
    responses = [response for problem in problems for response in problem["responses"]]
    result = {"n": n, "groups": {}, "length": mean(r["tokens"] for r in responses),
              "truncated": mean(not r["finished"] for r in responses)}
    scored = [p for p in problems if bounds and mean_reward(p) is not None]
    if scored:
        value_N, figures = list(map(mean_reward, scored)), partial(reward_figures, bounds=bounds)
        result |= figures(value_N) | {"reward_range": bounds}
        result["groups"] = summarise_groups(scored, value_N, figures)
    if "verdict" in responses[0]:
        value_N, figures = [count_right(p) / n for p in problems], partial(accuracy_figures, n=n)
        result |= figures(value_N) | summarise_verdicts(problems, responses, sizes)
        result["groups"] = summarise_groups(problems, value_N, figures)
    return result | {"count": len(problems), "problems": problems}


def summarise_verdicts(problems: list[dict], responses: list[dict], sizes: list[int] | None) -> dict:
    """Summarise the graded responses to problems, for these sizes k, or the powers of 2 up to n, and for n.

    last_number counts a response with a right last number, lenient also one with a right marked answer. pass
    and majority are {k: value}, majority over blocks of k responses.
    """
    n = len(problems[0]["responses"])
    require_sizes(sizes, n)
    sizes = sorted({*(sizes or (2 ** i for i in range(n.bit_length()))), n})
    right_N = list(map(count_right, problems))
    votes_N = [list(map(vote, problem["responses"])) for problem in problems]
    result = {key: mean(r[key] for r in responses) for key in ("lenient", "last_number")}
    result["pass"], result["majority"] = {}, {}
    for k in sizes:
        result["pass"][str(k)] = mean(pass_at(k, right, n) for right in right_N)
        result["majority"][str(k)] = mean(majority_at(k, votes) for votes in votes_N)
    for verdict in ("unparsed", "timed_out"):
        result[verdict] = mean(r["verdict"] == verdict for r in responses)
    return result


def require_sizes(sizes: list[int] | None, n: int) -> None:
    """Raise ConfigError for a k of pass@k that n answers to each problem do not allow."""
    if sizes and not 1 <= min(sizes) <= max(sizes) <= n:
        raise ConfigError(f"--k must hold numbers in 1..{n}, the answers to each problem (eval.n), not "
                          f"{sizes}")


def accuracy_figures(value_N: list[float], n: int) -> dict:
    """Compute the accuracy, the mean over n responses to each problem (avg@n), with its interval."""
    low, high = wilson(value_N, n)
    return {"accuracy": mean(value_N), "low": low, "high": high, "count": len(value_N)}


def reward_figures(value_N: list[float], bounds: tuple[float, float]) -> dict:
    """Compute the mean reward with its interval."""
    low, high = bounded_interval(value_N, *bounds)
    return {"reward": mean(value_N), "reward_low": low, "reward_high": high, "count": len(value_N)}


def summarise_groups(problems: list[dict], value_N: list[float], figures: Callable) -> dict[str, dict]:
    """Compute figures by level and by subject, if the problems have them."""
    groups = {}
    for kind in ("level", "subject"):
        labels = [problem.get(kind) for problem in problems]
        if not any(labels):
            continue
        by_label = {}
        for label, value in zip(labels, value_N, strict=True):
            by_label.setdefault(label or "none", []).append(value)
        groups[kind] = {label: figures(values) for label, values in sorted(by_label.items())}
    return groups


# ---- the head of a result, and grading a result again

def verifier_version() -> str:
    """Identify the verifier: its files, and the libraries that read and compute formulas for it."""
    code = hash_files(sorted(Path(verify.__file__).parent.glob("*.py")))
    libraries = [f"{name} {version(name)}" for name in GRADED_BY]
    return " ".join([code[:16], *libraries])


def describe_result(cfg: Config, sampling: Sampling, spec: EngineSpec, tokenizer: Tokenizer,
                    sets: list[EvalSet]) -> dict:
    """Collect the settings and hashes that identify a result: model, data, prompts, sampling, verifier.

    A model is identified by the hash of its weights, configuration and tokenizer.
    """
    kinds = (".safetensors", ".json", ".jinja")
    files = [path for path in sorted(spec.folder.iterdir()) if path.suffix in kinds]
    files += policy_files(cfg.model.path)  # of a checkpoint
    return {
        "model": {"path": cfg.model.path, "files": hash_files(files)},
        "template": sha256(tokenizer.source),
        "system_prompt": cfg.data.system_prompt,
        "engine": f"{cfg.rollout.engine} {cfg.rollout.quantization}".removesuffix(" none"),
        "dtype": str(spec.dtype),
        "sampling": asdict(sampling),
        "verifier": verifier_version(),
        "stop": cfg.rollout.stop,
        "reward": reward_head(cfg.reward),
        "sets": {s.name: identify_set(s) for s in sets},
    } | leaves.through("head", cfg, {})


def reward_head(reward: Reward) -> dict | None:
    """Identify the reward that answers are scored with; None if only accuracy is measured."""
    if reward.accuracy:
        return None
    own = own_rewards(reward)
    source = own and own.read_source(reward)
    return reward.weights | {"overlong_tokens": reward.overlong_tokens,
                             "custom_file": source and hash_files(source.files)}


def identify_set(held_out: EvalSet) -> dict:
    """Identify a set by its problems and prompts, and by all columns if a reward may read them."""
    data = [(p.id, p.question, p.answer, *p.messages, *[p.row] * bool(held_out.reward))
            for p in held_out.problems]
    prompts = [prompt.ids for prompt in held_out.prompts]
    return {"count": len(data), "data": sha256(data), "prompts": sha256(prompts)}


def summarise_result(result: dict, sizes: list[int] | None = None) -> dict:
    """Summarise the responses of a result anew."""
    results = {name: summarise(old["problems"], sizes, old.get("reward_range"))
               for name, old in result["results"].items()}
    return {"head": result["head"], "results": results}


def summarise_file(path: Path, sizes: list[int] | None = None) -> dict:
    """Read a result and summarise its responses. Raises ConfigError for a damaged file."""
    result = read_result(path)
    with blame_file(path):
        return summarise_result(result, sizes)


def rescore(result: dict, sizes: list[int] | None = None) -> dict:
    """Grade the responses of a result again by the present verifier. Rewards stay as they are."""
    result = deepcopy(result)
    for old in result["results"].values():
        responses = [(p["gold"], response) for p in old["problems"] for response in p["responses"]]
        if "verdict" in responses[0][1]:
            for (_, response), found in zip(responses, grade([(gold, r["text"]) for gold, r in responses]),
                                            strict=True):
                response |= found
    result["head"]["verifier"] = verifier_version()
    return summarise_result(result, sizes)


def add_math_verify(results: Results) -> Results:
    """Add math-verify's verdict to every response of a graded set, and the accuracy by it to the set."""
    results = deepcopy(results)
    for result in results.values():
        responses = [(p["gold"], response) for p in result["problems"] for response in p["responses"]]
        if "verdict" not in responses[0][1]:
            continue
        judged = judge_by_math_verify([(gold, response["text"]) for gold, response in responses])
        for (_, response), (right, read) in zip(responses, judged, strict=True):
            response["math_verify"] = {"right": right, "read": read}
        result["math_verify"] = mean(right for right, _ in judged)
    return results


# ---- the command

def load_sets(data: Data, tokenizer: Tokenizer, reward: Reward) -> list[EvalSet]:
    """Load evaluation sets: "a.jsonl,gsm8k" -> [a, gsm8k]. Raises ConfigError."""
    sets = []
    for name in map(str.strip, data.eval.split(",")):
        short = Path(name).stem
        if any(short == s.name for s in sets):
            raise ConfigError(f"evaluation set {short!r} is named twice in {data.eval!r}")
        problems = load_problems(name, data.dir, False, data.columns, reward.needs_answers)
        graded = all_have_answers(problems, short)
        if graded:
            name_unreadable(short, {p.id: p.answer for p in problems}, reward.needs_answers)
        prompts = to_prompts(problems, tokenizer, data.system_prompt, data.max_prompt_tokens)
        sets.append(EvalSet(short, problems, prompts, None if reward.accuracy else reward, graded))
    return sets


def files_of(reward: Reward, tokenizer: Tokenizer) -> Texts:
    """Return the texts of the user's files that a run depends on, as they were read (runfolder.COPIES)."""
    own = own_rewards(reward)
    source = own and own.read_source(reward)
    files = {"reward.custom_file": source and source.text} | dict(source.helpers if source else {})
    return files | tokenizer.own_files


def engine_spec(cfg: Config, device: torch.device, tokenizer: Tokenizer, longest: int) -> EngineSpec:
    """Describe an engine for sequences of so many tokens, which is awake all the time."""
    auto = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = auto if cfg.model.dtype == "auto" else getattr(torch, cfg.model.dtype)
    backend = choose_backend(cfg.model.attention, device, dtype)
    return EngineSpec(
        tokenizer.folder,
        dtype,
        device,
        backend,
        tokenizer.eos_ids,
        cfg.rollout.slots,
        longest,
        cfg.rollout.tensor_parallel,
        cfg.rollout.cache_gib,
        tokenizer.stops,
        quantization=cfg.rollout.quantization,
        rounds=rounds_products(cfg.model, device))


class Engines:
    """Start the engine of each model; a model that differs in its weights only gets the one before it."""

    def __init__(self):
        self.kind, self.engine = None, None

    def start(self, name: str, spec: EngineSpec, model: str) -> Engine:
        """Raises ConfigError for a second engine of vLLM's, which can have one in a process."""
        kind = name, read_shape(spec.folder), replace(spec, folder=None)
        if self.kind not in (None, kind) and name == "vllm":
            raise ConfigError(f"--model: {model} has another shape than the model before it, and vLLM has "
                              "one engine per process; evaluate it by a command of its own")
        if self.kind != kind:
            self.kind, self.engine = kind, start_engine(name, spec)
        return self.engine


def name_changed_files(run: Path, texts: Texts) -> None:
    """Print which files of the user's are not the ones that the run of a folder began with."""
    for setting, copy in changed_files(run, texts).items():
        if copy.is_file():
            print(f"the file of {setting} has changed since the run began: it was {copy}", file=sys.stderr)


def evaluate_model(cfg: Config, args: argparse.Namespace, out: Path | None, engines: Engines) -> dict:
    """Evaluate the model of a config; responses that `out` holds already are not sampled again."""
    device = dist.init(find_device(cfg.device))
    folder = find_model(original_model(cfg.model.path))
    tokenizer = leaves.through("tokenizer", cfg, Tokenizer(folder, cfg.data, cfg.rollout.stop or ()))
    sets = [s.first(cfg.eval.limit) for s in load_sets(cfg.data, tokenizer, cfg.reward)]
    if own := own_rewards(cfg.reward):
        own.try_functions(cfg.reward, *(s.problems for s in sets if s.reward))
    leaves.through("task", cfg, Task(folder, tokenizer, sets=sets))
    texts = files_of(cfg.reward, tokenizer)
    for name in args.config:
        name_changed_files(user_path(name).parent, texts)
    lengths = [len(prompt.ids) for s in sets for prompt in s.prompts]
    longest = cfg.own_longest or max(lengths) + cfg.eval.max_new_tokens
    check_positions(folder, longest, "the prompts and eval.max_new_tokens (or environment.max_context)")
    engine_name, spec = fit_engine(cfg.rollout.engine, engine_spec(cfg, device, tokenizer, longest))
    cfg = config.with_value(cfg, "rollout.engine", engine_name)
    sampling = Sampling(cfg.eval.max_new_tokens, cfg.eval.n, cfg.eval.temperature, cfg.eval.top_p, args.seed)
    store = head = None
    if args.suite and dist.rank() == 0:
        print_detectable(sets, sampling.n)
    if out or args.suite:
        stored, head = dist.on_first(lambda: (
            read_result(out) if out and out.is_file() else None,
            describe_result(cfg, sampling, spec, tokenizer, sets),
        ))
    if out:
        if stored:
            require_same_head(out, stored["head"], head)
            print(f"{out} is complete; nothing is sampled again", file=sys.stderr)
            return summarise_result(stored | {"head": head}, args.k)
        store = Store(out, head, ROUNDS_BETWEEN_WRITES * cfg.rollout.slots * dist.world_size())
    engine = engines.start(engine_name, spec, cfg.model.path)
    engine, _ = leaves.through("engine", cfg, (engine, tokenizer))
    engine.sync(load_policy(cfg.model.path, spec.folder, spec.dtype))
    results = {}
    for s in sets:
        progress = s.name if dist.rank() == 0 else None
        problems = answer_problems(engine, tokenizer, s, sampling, progress, store)
        results[s.name] = summarise(problems, args.k, s.bounds)
    if store and dist.rank() == 0:
        write_json(out, {"head": head, "results": results})
        store.remove()
    return {"head": head, "results": results}


def print_detectable(sets: list[EvalSet], n: int) -> None:
    """Say before sampling which difference of two models each set can show."""
    for s in sets:
        count = len(s.problems)
        print(f"{s.name}: {count} problems x {n} answers show a difference of two models from about "
              f"{100 * detectable(count, n):.0f} points on")


def suite_config(args: argparse.Namespace) -> str:
    """Name the config of a suite. Raises ConfigError for what would change its prompts or sampling."""
    changed = [text for text in args.set if not text.startswith(MACHINE)]
    if args.data or args.config or changed:
        raise ConfigError(f"--suite {args.suite} is frozen: leave out --data and --config, and --set only "
                          f"{', '.join(MACHINE)}")
    return f"eval/suite_{args.suite}.yaml"


def evaluate_models(args: argparse.Namespace) -> None:
    """Evaluate every model of the command line and print its table."""
    args.config = [suite_config(args)] if args.suite else args.config or ["eval/default.yaml"]
    cfg = config.load(args.config, args.set)
    if args.data is not None:
        cfg = config.with_value(cfg, "data.eval", args.data)
    if args.data_dir is not None:
        cfg = config.with_value(cfg, "data.dir", args.data_dir)
    if not args.model:
        raise ConfigError("--model must be given: a Hugging Face folder, a checkpoint or a hub name")
    if not cfg.data.eval:
        raise ConfigError("--data must be given: sets separated by commas, or a --config that has some")
    require_sizes(args.k, cfg.eval.n)
    files, engines = list_models(args.model, args.out), Engines()
    results = {}
    for path, out in files:
        result = evaluate_model(config.with_value(cfg, "model.path", path), args, out, engines)
        if dist.rank() == 0:
            above = [path] if len(files) > 1 else []
            print_result(result, args, *above)
            results[path] = result
    if args.suite and dist.rank() == 0:
        print(*suite_lines(args.suite, results), sep="\n")


def print_result(result: dict, args: argparse.Namespace, *above: str) -> None:
    """Print the table of a result."""
    results = add_math_verify(result["results"]) if args.also else result["results"]
    print(*above, results_table(results), sep="\n", flush=True)


def evaluate_or_compare(args: argparse.Namespace) -> None:
    """Run the command line."""
    if args.compare:
        results = [summarise_file(path) for path in args.compare]
        with blame_file(" or ".join(map(str, args.compare))):
            print(comparison_table(*results))
    elif args.rescore:
        require_place(args.out)
        result = rescore(summarise_file(args.rescore, args.k), args.k)
        if args.out:
            write_json(args.out, result)
        print_result(result, args)
    else:
        evaluate_models(args)


def main() -> int:
    run_it = partial(evaluate_or_compare, terminal.of_eval(__doc__))
    return exit_status(run_it, lambda: "the same command goes on from there, if it has --out")


if __name__ == "__main__":
    sys.exit(main())
