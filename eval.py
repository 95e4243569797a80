"""Evaluate a model: sample, grade, count. Compare results, and grade them again.

    python eval.py --model DIR_or_name --data NAME_or_file[,...] [--data-dir DIR] [--out results.json]
    python eval.py --model DIR_or_name --protocol NAME          # as a paper does it; see PROTOCOLS
    python eval.py --model RUN/hf --config RUN/config.yaml      # as the run itself does it
    python eval.py --rescore results.json                       # grade the same responses again
    python eval.py --compare a.json b.json                      # paired: difference, interval, McNemar's test

train.py calls the same functions. With --out the responses are kept as they come, and an interrupted
evaluation goes on where it stopped.

Dimension key:  N problems.
"""

import argparse
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

import config
import verify
from config import Config, ConfigError
from data import Tokenizer, load_problems, to_prompts
from infra import dist
from infra.results import Store, differences, hash_files, read_result, require_same, sha256, write_result
from infra.runfolder import note
from infra.signals import exit_status
from infra.weights import check_positions, find_model
from memory import choose_backend, find_device, fit_engine
from model import load_model
from records import EngineSpec, Problem, Prompt
from rollout import Engine, start_engine
from verify.grade import grade, name_unreadable
from verify.statistics import majority_at, mcnemar, mean, paired_interval, pass_at, vote, wilson

# How the papers and their releases evaluate; `config` gives the system prompt and the longest prompt.
PROTOCOLS = {
    # CPPO (arXiv:2503.22342). Its GSM8K figures are of the last number, and of 1,312 of the 1,319 problems.
    "cppo_gsm8k": {"config": "grpo_gsm8k.yaml", "data": "gsm8k", "max_new_tokens": 1024},
    "cppo_math": {"config": "grpo_math.yaml", "data": "math500", "max_new_tokens": 1024},
    "cppo_amc_aime": {"config": "grpo_math.yaml", "data": "amc23,aime24", "n": 4, "temperature": 0.6,
                      "top_p": 0.95, "max_new_tokens": 3072},
    # DAPO (arXiv:2503.14476)
    "dapo": {"config": "dapo_math.yaml", "data": "aime24", "n": 32, "temperature": 1.0, "top_p": 0.7,
             "max_new_tokens": 20480},
}
DEFAULTS = {"max_prompt_tokens": 2048, "max_new_tokens": 1024, "n": 1, "temperature": 0.0, "top_p": 1.0,
            "engine": "auto", "slots": 256, "tensor_parallel": 1, "cache_gib": None, "system_prompt": None,
            "data_dir": None, "dtype": "auto", "attention": "auto"}
GRADED_BY = ("math-verify", "latex2sympy2_extended", "antlr4-python3-runtime", "sympy", "mpmath")
ROUNDS_OF_SLOTS = 4   # how often all decoding slots are filled between two writes of the responses


@dataclass(frozen=True, slots=True)
class Sampling:
    """The way answers are sampled: n to every problem, greedy at temperature 0."""

    max_new_tokens: int
    n: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Set:
    """Problems, and the prompts that they become, in the same order."""

    name: str
    problems: list[Problem]
    prompts: list[Prompt]


# ---- sampling and grading

def evaluate(engine: Engine, tokenizer: Tokenizer, held_out: Set, sampling: Sampling,
             progress: str | None = None) -> dict:
    """Sample and grade sampling.n answers to every problem, spread over the ranks; all get `summarise`."""
    return summarise(answer_problems(engine, tokenizer, held_out, sampling, progress))


def answer_problems(engine: Engine, tokenizer: Tokenizer, held_out: Set, sampling: Sampling,
                    progress: str | None, store: Store | None = None) -> list[dict]:
    """Sample and grade, and return every problem with its responses.

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
            note(label)
        responses = respond(engine, tokenizer, held_out, missing[start:start + chunk], sampling, label)
        stored |= {(response["id"], response["k"]): response for response in responses}
        if store:
            store.keep(held_out.name, responses)
    problems = []
    for p in held_out.problems:
        responses = [stored[p.id, k] for k in range(sampling.n)]
        problems.append({"id": p.id, "question": p.question, "gold": p.answer, "level": p.level,
                         "subject": p.subject, "responses": responses})
    return problems


def respond(engine: Engine, tokenizer: Tokenizer, held_out: Set, requests: list[tuple[int, int]],
            sampling: Sampling, progress: str | None) -> list[dict]:
    """Sample and grade the k-th answer to the i-th prompt for each (i, k) requested. All ranks return all.

    Each answer has a seed of its own, so neither the number of ranks nor the other requests change it, up to
    rounding.
    """
    local_requests = [(held_out.prompts[i], k) for i, k in dist.local_slice(requests)]
    seeds = [dist.seed_for(sampling.seed, prompt.id, k, "eval") for prompt, k in local_requests]
    samples = engine.generate([prompt.ids for prompt, _ in local_requests], seeds, sampling.max_new_tokens,
                              sampling.temperature, sampling.top_p, progress)
    texts = [tokenizer.decode(sample.ids) for sample in samples]
    grades = grade([(prompt.answer, text) for (prompt, _), text in zip(local_requests, texts, strict=True)])
    responses = []
    for (prompt, k), sample, text, graded in zip(local_requests, samples, texts, grades, strict=True):
        responses.append({"id": prompt.id, "k": k, "tokens": len(sample.ids), "finished": sample.finished,
                          "text": text} | graded)
    return dist.gather(responses)


def summarise(problems: list[dict], sizes: list[int] | None = None) -> dict:
    """Summarise n graded responses to each problem.

    accuracy is the mean over responses (avg@n) with its interval (low, high); lenient counts a response also
    where its last number is right, last_number only there; pass and majority are {k: value} for these sizes,
    or powers of 2 up to n, and for n, majority over blocks of k responses; length is in tokens; groups holds
    accuracy by level and by subject. Raises ConfigError for a size above n.
    """
    n = len(problems[0]["responses"])
    sizes = sorted({*(sizes or (2 ** i for i in range(n.bit_length()))), n})
    if not 1 <= sizes[0] <= sizes[-1] <= n:  # of a result that is graded again
        raise ConfigError(f"--k must hold numbers in 1..{n}, the answers to each problem (--n), not {sizes}")
    responses = [response for problem in problems for response in problem["responses"]]
    right_N = list(map(count_right, problems))
    value_N = [right / n for right in right_N]
    votes_N = [list(map(vote, problem["responses"])) for problem in problems]

    result = {"accuracy": mean(value_N), **wilson_interval(value_N, n), "n": n}
    for key in ("lenient", "last_number"):
        result[key] = mean(r[key] for r in responses)
    result["pass"], result["majority"] = {}, {}
    for k in sizes:
        result["pass"][str(k)] = mean(pass_at(k, right, n) for right in right_N)
        result["majority"][str(k)] = mean(majority_at(k, votes) for votes in votes_N)
    result["length"] = mean(r["tokens"] for r in responses)
    result["truncated"] = mean(not r["finished"] for r in responses)
    for verdict in ("unparsed", "timed_out"):
        result[verdict] = mean(r["verdict"] == verdict for r in responses)
    result["groups"] = grouped(problems, value_N, n)
    result["problems"] = problems
    return result


def count_right(problem: dict) -> int:
    return sum(response["verdict"] == "right" for response in problem["responses"])


def wilson_interval(value_N: list[float], n: int) -> dict:
    low, high = wilson(value_N, n)
    return {"low": low, "high": high, "count": len(value_N)}


def grouped(problems: list[dict], value_N: list[float], n: int) -> dict[str, dict]:
    """Compute accuracy by level and by subject, where the problems have them."""
    groups: dict[str, dict] = {}
    for kind in ("level", "subject"):
        labels = [problem.get(kind) for problem in problems]
        if not any(labels):
            continue
        by_label: dict[str, list[float]] = {}
        for label, value in zip(labels, value_N, strict=True):
            by_label.setdefault(label or "none", []).append(value)
        groups[kind] = {label: {"accuracy": mean(values), **wilson_interval(values, n)}
                        for label, values in sorted(by_label.items())}
    return groups


# ---- what identifies a result, and grading it again

def verifier_version() -> str:
    """Identify the verifier: its files, and the libraries that read and compute formulas for it."""
    code = hash_files(sorted(Path(verify.__file__).parent.glob("*.py")))
    libraries = [f"{name} {version(name)}" for name in GRADED_BY]
    return " ".join([code[:16], *libraries])


def head_of(args: argparse.Namespace, sampling: Sampling, spec: EngineSpec, tokenizer: Tokenizer,
            sets: list[Set]) -> dict:
    """Collect everything that identifies a result: model, data, prompts, sampling, verifier.

    A model is identified by the hash of its weights, configuration and tokenizer.
    """
    kinds = (".safetensors", ".json", ".jinja")
    files = [path for path in sorted(spec.folder.iterdir()) if path.suffix in kinds]
    return {
        "model": {"path": args.model, "files": hash_files(files)},
        "template": sha256(tokenizer.source), "system_prompt": args.system_prompt, "engine": args.engine,
        "dtype": str(spec.dtype), "sampling": asdict(sampling), "verifier": verifier_version(),
        "sets": {s.name: identify(s) for s in sets},
    }


def identify(held_out: Set) -> dict:
    data = [(p.id, p.question, p.answer) for p in held_out.problems]
    prompts = [prompt.ids for prompt in held_out.prompts]
    return {"count": len(data), "data": sha256(data), "prompts": sha256(prompts)}


def rescore(result: dict, sizes: list[int] | None = None) -> dict:
    """Grade the responses of a result again by the present verifier."""
    results = {}
    for name, old in result["results"].items():
        pairs = [(p["gold"], r["text"]) for p in old["problems"] for r in p["responses"]]
        grades = iter(grade(pairs))
        problems = []
        for problem in old["problems"]:
            problems.append(problem | {"responses": [r | next(grades) for r in problem["responses"]]})
        results[name] = summarise(problems, sizes or list(map(int, old["pass"])))
    return {"head": result["head"] | {"verifier": verifier_version()}, "results": results}


# ---- what people read

def results_table(results: dict[str, dict]) -> str:
    """Tabulate results by set, and below it accuracy by level and subject."""
    lines = [f"{'set':<16} {'problems':>8} {'n':>3} {'accuracy':>9} {'95% interval':<16} {'lenient':>8} "
             f"{'last number':>11} {'pass@n':>7} {'maj@n':>7} {'tokens':>8} {'truncated':>9} {'unparsed':>9}"]
    for name, r in results.items():
        n, bounds = str(r["n"]), f"[{r['low']:.1%}, {r['high']:.1%}]"
        lines.append(f"{name:<16} {r['count']:>8} {n:>3} {r['accuracy']:>9.1%} {bounds:<16} "
                     f"{r['lenient']:>8.1%} {r['last_number']:>11.1%} {r['pass'][n]:>7.1%} "
                     f"{r['majority'][n]:>7.1%} {r['length']:>8.1f} {r['truncated']:>9.1%} "
                     f"{r['unparsed']:>9.1%}")
    for name, r in results.items():
        for kind, groups in r["groups"].items():
            cells = [f"{label} {x['accuracy']:.1%} of {x['count']}" for label, x in groups.items()]
            lines.append(f"{name} by {kind}: {', '.join(cells)}")
    return "\n".join(lines)


def comparison_table(first: dict, second: dict) -> str:
    """Tabulate the accuracy of the second result less that of the first, on the sets that both have.

    Raises ConfigError without any, and where a set holds other problems in one of them.
    """
    lines = [f"{'set':<16} {'problems':>8} {'first':>7} {'second':>7} {'difference':>10} "
             f"{'95% interval':<18} McNemar's p"]
    for difference in differences(first["head"], second["head"]):
        print(f"the results differ: {difference}", file=sys.stderr)
    for name in first["results"]:
        if name not in second["results"]:
            continue
        if first["head"]["sets"][name]["data"] != second["head"]["sets"][name]["data"]:
            raise ConfigError(f"--compare: {name} holds other problems in the two results")
        lines.append(comparison_row(name, first["results"][name], second["results"][name]))
    if len(lines) == 1:
        raise ConfigError(f"--compare: the results have no set in common: {', '.join(first['results'])} and "
                          f"{', '.join(second['results'])}")
    return "\n".join(lines)


def comparison_row(name: str, a: dict, b: dict) -> str:
    """Write the row of one set."""
    difference_N = shares_right(b) - shares_right(a)
    low, high = paired_interval(difference_N)
    worse, better = int((difference_N < 0).sum()), int((difference_N > 0).sum())
    p_value = f"{mcnemar(worse, better):.3g}" if a["n"] == b["n"] == 1 else "-"
    bounds = f"[{low:+.1%}, {high:+.1%}]"
    return (f"{name:<16} {a['count']:>8} {a['accuracy']:>7.1%} {b['accuracy']:>7.1%} "
            f"{difference_N.mean():>+10.1%} {bounds:<18} {p_value}")


def shares_right(result: dict) -> np.ndarray:
    return np.array([count_right(problem) / result["n"] for problem in result["problems"]])


# ---- the command

def load_sets(names: str, folder: str | None, tokenizer: Tokenizer, system: str | None,
              max_prompt_tokens: int) -> list[Set]:
    """Load evaluation sets: "a.jsonl,gsm8k" -> [a, gsm8k]. Raises ConfigError."""
    sets: list[Set] = []
    for name in map(str.strip, names.split(",")):
        short = Path(name).stem
        if any(short == s.name for s in sets):
            raise ConfigError(f"evaluation set {short!r} is named twice in {names!r}")
        problems = load_problems(name, folder)
        name_unreadable(short, {p.id: p.answer for p in problems})
        sets.append(Set(short, problems, to_prompts(problems, tokenizer, system, max_prompt_tokens)))
    return sets


def whole_numbers(text: str) -> list[int]:
    return list(map(int, text.split(",")))


def parser() -> argparse.ArgumentParser:
    layout = argparse.RawDescriptionHelpFormatter
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    add = flags.add_argument
    add("--model", help="Hugging Face folder or hub name")
    add("--data", help="sets separated by commas")
    add("--data-dir", help="folder with the files of named sets")
    add("--config", help="a training config: its sets, prompt and sampling")
    add("--protocol", choices=PROTOCOLS, help="how a paper evaluates")
    add("--system-prompt", help="as in training (data.system_prompt)")
    add("--max-prompt-tokens", type=int, help="2048")
    add("--max-new-tokens", type=int, help="1024")
    add("--n", "--samples", type=int, help="answers to each problem (1); torchrun takes --n for its own")
    add("--k", type=whole_numbers, help="of pass@k and majority@k, separated by commas (1,2,4,...,n)")
    add("--temperature", type=float, help="0 is greedy (0)")
    add("--top-p", type=float, help="1")
    add("--seed", type=int, default=0, help="of the samples, at a temperature above 0")
    add("--engine", choices=["auto", "torch", "vllm"], help="as rollout.engine in training (auto)")
    add("--tensor-parallel", type=int, help="ranks that one vLLM engine is spread over (1)")
    add("--cache-gib", type=float, help="as rollout.cache_gib")
    add("--slots", type=int, help="sequences decoded at once (256)")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add("--out", type=Path, help="JSON with settings, scores and every response")
    add("--rescore", type=Path, help="a result: grade its responses again")
    add("--compare", type=Path, nargs=2, help="two results on the same problems")
    return flags


def arguments() -> argparse.Namespace:
    """Read the command line. What it leaves out comes from --protocol, then --config, then DEFAULTS."""
    args = parser().parse_args()
    settings = dict(DEFAULTS)
    if args.config:
        settings |= settings_of(config.load(args.config, []))
    if args.protocol:
        preset = dict(PROTOCOLS[args.protocol])
        cfg = config.load(preset.pop("config"), [])
        settings |= prompt_of(cfg) | preset
    for name, value in settings.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    return args


def prompt_of(cfg: Config) -> dict:
    return {"system_prompt": cfg.data.system_prompt, "max_prompt_tokens": cfg.data.max_prompt_tokens}


def settings_of(cfg: Config) -> dict:
    """Return how a training run evaluates, as arguments of this command."""
    settings = prompt_of(cfg) | {"data": cfg.data.eval, "data_dir": cfg.data.dir}
    settings |= {"dtype": cfg.model.dtype, "attention": cfg.model.attention}
    settings |= {name: getattr(cfg.eval, name) for name in ("max_new_tokens", "n", "temperature", "top_p")}
    return settings | {name: getattr(cfg.rollout, name)
                       for name in ("engine", "slots", "tensor_parallel", "cache_gib")}


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ConfigError for the first argument that is out of range."""
    for name, fine, allowed in (
            ("--model", args.model is not None, "given: a Hugging Face folder or a hub name"),
            ("--data", args.data is not None,
             "given: sets separated by commas, or a --protocol or --config that has some"),
            ("--temperature", args.temperature >= 0, "at least 0"),
            ("--temperature", args.engine == "torch" or not 0 < args.temperature < 0.01,
             "0 or at least 0.01 unless --engine torch: vLLM takes a lower one for 0.01"),
            ("--n", args.n >= 1, "at least 1"),
            ("--n", args.n == 1 or args.temperature > 0,
             "1 at --temperature 0: greedy answers are all the same"),
            ("--k", not args.k or 1 <= min(args.k) <= max(args.k) <= args.n,
             f"of numbers in 1..{args.n} (--n)"),
            ("--top-p", 0 < args.top_p <= 1, "in (0, 1]"),
            ("--max-new-tokens", args.max_new_tokens >= 1, "at least 1"),
            ("--slots", args.slots >= 1, "at least 1")):
        if not fine:
            raise ConfigError(f"{name} must be {allowed}")


def engine_spec(args: argparse.Namespace, device: torch.device, tokenizer: Tokenizer,
                sets: list[Set]) -> EngineSpec:
    """Describe the engine that samples these sets. Raises ConfigError if they are too long for the model."""
    folder = find_model(args.model)
    lengths = [len(prompt.ids) for s in sets for prompt in s.prompts]
    longest = max(lengths) + args.max_new_tokens
    check_positions(folder, longest, "the prompts and --max-new-tokens")
    auto = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = auto if args.dtype == "auto" else getattr(torch, args.dtype)
    backend = choose_backend(args.attention, device, dtype)
    return EngineSpec(folder, dtype, device, backend, tokenizer.eos_ids, args.slots, longest,
                      args.tensor_parallel, args.cache_gib)


def run(args: argparse.Namespace) -> dict:
    """Evaluate as the arguments say; responses that --out holds already are not sampled again."""
    check_arguments(args)
    device = dist.init(find_device(args.device))
    tokenizer = Tokenizer(find_model(args.model))
    sets = load_sets(args.data, args.data_dir, tokenizer, args.system_prompt, args.max_prompt_tokens)
    args.engine, spec = fit_engine(args.engine, engine_spec(args, device, tokenizer, sets))
    sampling = Sampling(args.max_new_tokens, args.n, args.temperature, args.top_p, args.seed)
    store = None
    if args.out:
        stored = read_result(args.out) if dist.rank() == 0 and args.out.is_file() else None
        head, stored = dist.gather([head_of(args, sampling, spec, tokenizer, sets), stored]
                                   if dist.rank() == 0 else [])
        if stored:
            require_same(args.out, stored["head"], head)
            print(f"{args.out} is complete; nothing is sampled again", file=sys.stderr)
            results = {name: summarise(old["problems"], args.k) for name, old in stored["results"].items()}
            return {"head": head, "results": results}
        store = Store(args.out, head, ROUNDS_OF_SLOTS * args.slots * dist.world_size())
    engine = start_engine(args.engine, spec)
    engine.sync(load_model(spec.folder, spec.dtype, torch.device("cpu")))
    results = {}
    for s in sets:
        progress = s.name if dist.rank() == 0 else None
        results[s.name] = summarise(answer_problems(engine, tokenizer, s, sampling, progress, store), args.k)
    if store and dist.rank() == 0:
        write_result(args.out, {"head": head, "results": results})
        store.remove()
    return {"results": results}


def show(args: argparse.Namespace) -> None:
    """Do what the arguments ask for and print the table."""
    if args.out and not args.out.parent.is_dir():
        raise ConfigError(f"--out: folder {args.out.parent} not found; create it first")
    if args.compare:
        print(comparison_table(*map(read_result, args.compare)))
        return
    result = rescore(read_result(args.rescore), args.k) if args.rescore else run(args)
    if args.rescore and args.out:
        write_result(args.out, result)
    if args.rescore or dist.rank() == 0:
        print(results_table(result["results"]), flush=True)


def main() -> int:
    return exit_status(lambda: show(arguments()), "the same command goes on from there, if it has --out")


if __name__ == "__main__":
    sys.exit(main())
