"""Evaluation in one file: sample, grade, count; intervals, comparisons, files that can be graded again.

    python eval.py --model DIR_or_name --data NAME_or_file[,...] [--data-dir DIR] [--out results.json]
    python eval.py --model DIR_or_name --protocol NAME          # as a paper does it; see PROTOCOLS
    python eval.py --model RUN/hf --config RUN/config.yaml      # as the run itself does it
    python eval.py --rescore results.json                       # grade the same responses again
    python eval.py --compare a.json b.json                      # paired: difference with interval, McNemar's test

train.py calls the same functions. With --out the responses are kept as they come, and an interrupted evaluation goes on
where it stopped.
"""

import argparse
import hashlib
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

import config
import dist
from answer import LONGEST, normalise, number
from config import ConfigError
from data import Tokenizer, load_problems, name_unreadable, to_prompts
from model import check_positions, choose_backend, find_model, load_model
from reward import grade
from rollout import Engine, start_engine
from runfolder import read, rewrite
from sample import Problem, Prompt

# What the papers and their releases do; `config` gives the system prompt and the longest prompt.
PROTOCOLS = {
    # CPPO (arXiv:2503.22342). Its GSM8K figures are of the last number, and of 1,312 of the 1,319 problems.
    "cppo_gsm8k": {"config": "grpo_gsm8k.yaml", "data": "gsm8k", "max_new_tokens": 1024},
    "cppo_math": {"config": "grpo_math.yaml", "data": "math500", "max_new_tokens": 1024},
    "cppo_amc_aime": {"config": "grpo_math.yaml", "data": "amc23,aime24", "n": 4, "temperature": 0.6, "top_p": 0.95,
                      "max_new_tokens": 3072},
    # DAPO (arXiv:2503.14476)
    "dapo": {"config": "dapo_math.yaml", "data": "aime24", "n": 32, "temperature": 1.0, "top_p": 0.7,
             "max_new_tokens": 20480},
}
ROUNDS_OF_SLOTS = 4   # how often the slots are filled between two writes of the responses
RESAMPLES = 10_000
RIGHT = "\n"          # a vote for the gold answer, which no spelling is


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are drawn: n to every problem, greedy at temperature 0."""

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


# ---- statistics

def wilson(value_N: Iterable[float], n: int = 1, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval (95% at z = 1.96) for the mean of N problems' shares of right answers, of n each.

    The spread of the shares tells how many independent answers they are worth, at most N x n, and z becomes Student's
    quantile (the first terms of its expansion), since the spread is estimated. With n = 1 it is Wilson's own interval.
    """
    value_N = np.asarray(value_N, dtype=np.float64)
    N, share = len(value_N), value_N.mean()
    spread = value_N.var(ddof=1) if n > 1 and N > 1 else 0.0
    count = min(N * share * (1 - share) / spread, N * n) if spread > 0 else N
    z *= 1 + (z * z + 1) / (4 * (N - 1)) if n > 1 and N > 1 else 1
    centre = (share + z * z / count / 2) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + (z / count) ** 2 / 4) / (1 + z * z / count)
    return max(0.0, centre - half), min(1.0, centre + half)


def pass_at(k: int, right: int, n: int) -> float:
    """Chance that one of k answers is right, from n of which `right` are; unbiased (arXiv:2107.03374, eq. 1)."""
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def vote(response: dict) -> str | None:
    """All right answers are one; others are one where their number or spelling is the same, so that wrong answers may
    lose votes to spelling. No answer is no vote."""
    if response["verdict"] == "right":
        return RIGHT
    spelled = normalise((response["answer"] or "")[:LONGEST])
    return str((number(spelled) or [spelled])[0]) or None


def majority(votes: list[str | None]) -> float:
    """Whether the most frequent answer is right; of several equally frequent ones the share that is."""
    counts = Counter(filter(None, votes))
    most = [vote for vote, count in counts.items() if count == max(counts.values())]
    return (RIGHT in most) / len(most) if most else 0.0


def majority_at(k: int, votes: list[str | None]) -> float:
    """The same of k votes, over as many blocks of k as there are."""
    return mean(majority(votes[i:i + k]) for i in range(0, len(votes) - k + 1, k))


def mcnemar(only_first: int, only_second: int) -> float:
    """p-value of McNemar's exact test: chance of a split as uneven, were both equally good."""
    count = only_first + only_second
    tail = sum(math.comb(count, i) for i in range(min(only_first, only_second) + 1))
    return min(1.0, 2 * tail / 2 ** count)


def paired_interval(difference_N: np.ndarray) -> tuple[float, float]:
    """95% interval of a mean difference, by a bootstrap over problems with a fixed seed."""
    draw = np.random.default_rng(0)
    means = [difference_N[draw.integers(0, len(difference_N), len(difference_N))].mean() for _ in range(RESAMPLES)]
    return tuple(np.percentile(means, (2.5, 97.5)).tolist())


# ---- sampling and grading

def evaluate(engine: Engine, tokenizer: Tokenizer, held_out: Set, sampling: Sampling, progress: str | None = None,
             store: "Store | None" = None, sizes: list[int] | None = None) -> dict:
    """Sample and grade sampling.n answers to every problem, shared out over the ranks; all return the same `scores`.
    With a `store`, what it holds is not sampled again, and what is new is kept in it as it comes."""
    known = store.responses.setdefault(held_out.name, {}) if store else {}
    wanted = [(i, k) for i in range(len(held_out.prompts)) for k in range(sampling.n)]
    rest = [(i, k) for i, k in wanted if (held_out.problems[i].id, k) not in known]
    chunk = store.chunk if store else len(wanted)
    for start in range(0, len(rest), chunk):
        done = len(wanted) - len(rest) + start
        label = progress and progress + (f" from {done}/{len(wanted)}" if done or chunk < len(rest) else "")
        responses = respond(engine, tokenizer, held_out, rest[start:start + chunk], sampling, label)
        known |= {(r["id"], r["k"]): r for r in responses}
        if store:
            store.write(held_out.name, responses)
    return scores([{"id": p.id, "gold": p.answer, "level": p.level, "subject": p.subject,
                    "responses": [known[p.id, k] for k in range(sampling.n)]} for p in held_out.problems], sizes)


def respond(engine: Engine, tokenizer: Tokenizer, held_out: Set, wanted: list[tuple[int, int]], sampling: Sampling,
            progress: str | None) -> list[dict]:
    """The k-th answers to the i-th prompts, graded, on all ranks. Each has a seed of its own, so neither the number of
    ranks nor what is sampled beside it changes it, up to rounding."""
    share = [(held_out.prompts[i], k) for i, k in dist.mine(wanted)]
    seeds = [dist.seed_for(sampling.seed, prompt.id, k, "eval") for prompt, k in share]
    samples = engine.generate([prompt.ids for prompt, _ in share], seeds, sampling.max_new_tokens,
                              sampling.temperature, sampling.top_p, progress)
    texts = [tokenizer.decode(sample.ids) for sample in samples]
    grades = grade([(prompt.answer, text) for (prompt, _), text in zip(share, texts, strict=True)])
    return dist.gather([
        {"id": prompt.id, "k": k, "tokens": len(sample.ids), "finished": sample.finished, "text": text} | graded
        for (prompt, k), text, sample, graded in zip(share, texts, samples, grades, strict=True)])


def scores(problems: list[dict], sizes: list[int] | None = None) -> dict:
    """What n graded responses to each problem come to.

    accuracy is the mean over responses (avg@n) with its interval (low, high); lenient counts a response also where its
    last number is right, last_number only there; pass and majority are {k: value} for these sizes, or powers of 2 up
    to n, and for n, majority over blocks of k responses; length is in tokens; groups holds accuracy by level and by
    subject. Raises ConfigError for a size above n.
    """
    n, responses = len(problems[0]["responses"]), [r for p in problems for r in p["responses"]]
    right_NK = [[r["verdict"] == "right" for r in p["responses"]] for p in problems]
    vote_NK = [list(map(vote, p["responses"])) for p in problems]
    value_N = [sum(right_K) / n for right_K in right_NK]
    sizes = sorted({*(sizes or (2 ** i for i in range(n.bit_length()))), n})
    if not 1 <= sizes[0] <= sizes[-1] <= n:  # of a file that is graded again
        raise ConfigError(f"--k must hold numbers in 1..{n}, the answers to each problem (--n), not {sizes}")
    return {
        "accuracy": mean(value_N), **interval(value_N, n), "n": n,
        **{key: mean(r[key] for r in responses) for key in ("lenient", "last_number")},
        "pass": {str(k): mean(pass_at(k, sum(right_K), n) for right_K in right_NK) for k in sizes},
        "majority": {str(k): mean(majority_at(k, votes) for votes in vote_NK) for k in sizes},
        "length": mean(r["tokens"] for r in responses),
        "truncated": mean(not r["finished"] for r in responses),
        **{key: mean(r["verdict"] == key for r in responses) for key in ("unparsed", "timed_out")},
        "groups": {kind: groups([p.get(kind) for p in problems], value_N, n) for kind in ("level", "subject")
                   if any(p.get(kind) for p in problems)},
        "problems": problems,
    }


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.fsum(values) / len(values)


def interval(value_N: list[float], n: int) -> dict:
    low, high = wilson(value_N, n)
    return {"low": low, "high": high, "count": len(value_N)}


def groups(labels: list[str | None], value_N: list[float], n: int) -> dict[str, dict]:
    found: dict[str, list[float]] = {}
    for label, value in zip(labels, value_N, strict=True):
        found.setdefault(label or "none", []).append(value)
    return {label: {"accuracy": mean(values), **interval(values, n)} for label, values in sorted(found.items())}


# ---- files

class Store:
    """The responses of an evaluation with --out as they come, in a file beside it; its first line tells the
    settings."""

    def __init__(self, out: Path, head: dict, chunk: int):
        self.path, self.chunk = out.with_name(f"{out.name}.partial"), chunk
        self.responses: dict[str, dict[tuple[str, int], dict]] = {}
        (first, *lines), = dist.gather([self.begun(head)] if dist.rank() == 0 else [])
        require_same(self.path, first, head)
        for line in lines:
            self.responses.setdefault(line["set"], {})[line["response"]["id"], line["response"]["k"]] = line["response"]

    def begun(self, head: dict) -> list[dict]:
        """The lines there are; a last one that was being written is cut off, and its responses sampled again."""
        lines = read(self.path) or [head]
        rewrite(self.path, lines)
        return lines

    def write(self, name: str, responses: list[dict]) -> None:
        if dist.rank() == 0:
            with self.path.open("a") as file:
                file.write("".join(json.dumps({"set": name, "response": r}) + "\n" for r in responses))


def require_same(path: Path, old: dict, new: dict) -> None:
    """Raises ConfigError where a file's responses are those of other settings."""
    difference = next(differences(old, json.loads(json.dumps(new))), None)
    if difference:
        raise ConfigError(f"{path} holds responses of other settings: {difference}; give another --out, remove it "
                          "to begin again, or where only the verifier differs --rescore it")


def differences(old: object, new: object, path: str = "") -> Iterable[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*new, *(k for k in old if k not in new)]:
            yield from differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif old != new:
        yield f"{path} was {old!r} and is {new!r}"


def sha256(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verifier_version() -> str:
    """Changes whenever a grade might."""
    code = [file_hash(Path(__file__).parent / f"{name}.py") for name in ("algebra", "answer", "extract", "reward")]
    libraries = [f"{name} {version(name)}" for name in ("math-verify", "latex2sympy2_extended", "sympy")]
    return " ".join([sha256(code)[:16], *libraries])


def head_of(args: argparse.Namespace, sampling: Sampling, folder: Path, dtype: torch.dtype, tokenizer: Tokenizer,
            sets: list[Set]) -> dict:
    """What a result is a result of. The hash of a model is one of its weights, configuration and tokenizer."""
    files = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".json", ".jinja"))
    return {
        "model": {"path": args.model, "files": sha256([(path.name, file_hash(path)) for path in files])},
        "template": sha256(tokenizer.source), "system_prompt": args.system_prompt, "engine": args.engine,
        "dtype": str(dtype), "sampling": asdict(sampling), "verifier": verifier_version(),
        "sets": {s.name: {"count": len(s.problems),
                          "data": sha256([(p.id, p.question, p.answer) for p in s.problems]),
                          "prompts": sha256([p.ids for p in s.prompts])} for s in sets},
    }


def read_result(path: Path) -> dict:
    if not path.is_file():
        raise ConfigError(f"result file {path} not found")
    try:
        found = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(found, dict) or not {"head", "results"} <= found.keys() or "sets" not in found["head"]:
        raise ConfigError(f"{path} is not a result of eval.py --out")
    return found


def write_result(path: Path, result: dict) -> None:
    """Whole or not at all."""
    fresh = path.with_name(f"{path.name}.unfinished")
    fresh.write_text(json.dumps(result, indent=1) + "\n")
    fresh.replace(path)


def rescore(result: dict, sizes: list[int] | None = None) -> dict:
    """The same responses, graded by the verifier of now."""
    results = {}
    for name, old in result["results"].items():
        grades = iter(grade([(p["gold"], r["text"]) for p in old["problems"] for r in p["responses"]]))
        results[name] = scores([p | {"responses": [r | next(grades) for r in p["responses"]]} for p in old["problems"]],
                               sizes or list(map(int, old["pass"])))
    return {"head": result["head"] | {"verifier": verifier_version()}, "results": results}


# ---- what people read

def table(results: dict[str, dict]) -> str:
    lines = [f"{'set':<16} {'problems':>8} {'n':>3} {'accuracy':>9} {'95% interval':<16} {'lenient':>8} "
             f"{'last number':>11} {'pass@n':>7} {'maj@n':>7} {'tokens':>8} {'truncated':>9} {'unparsed':>9}"]
    for name, r in results.items():
        n, bounds = str(r["n"]), f"[{r['low']:.1%}, {r['high']:.1%}]"
        lines.append(f"{name:<16} {r['count']:>8} {n:>3} {r['accuracy']:>9.1%} {bounds:<16} {r['lenient']:>8.1%} "
                     f"{r['last_number']:>11.1%} {r['pass'][n]:>7.1%} {r['majority'][n]:>7.1%} {r['length']:>8.1f} "
                     f"{r['truncated']:>9.1%} {r['unparsed']:>9.1%}")
    for name, r in results.items():
        for kind, found in r["groups"].items():
            lines.append(f"{name} by {kind}: " + ", ".join(f"{label} {x['accuracy']:.1%} of {x['count']}"
                                                            for label, x in found.items()))
    return "\n".join(lines)


def compared(first: dict, second: dict) -> str:
    """Accuracy of the second less that of the first on the problems that both have. Raises ConfigError without any."""
    lines = [f"{'set':<16} {'problems':>8} {'first':>7} {'second':>7} {'difference':>10} {'95% interval':<18} "
             "McNemar's p"]
    for difference in differences(first["head"], second["head"]):
        print(f"the results differ: {difference}", file=sys.stderr)
    for name in (name for name in first["results"] if name in second["results"]):
        if first["head"]["sets"][name]["data"] != second["head"]["sets"][name]["data"]:
            raise ConfigError(f"--compare: {name} holds other problems in the two results")
        a, b = first["results"][name], second["results"][name]
        value_2N = np.array([[mean(r["verdict"] == "right" for r in p["responses"]) for p in x["problems"]]
                             for x in (a, b)])
        difference_N = value_2N[1] - value_2N[0]
        low, high = paired_interval(difference_N)
        worse, better = int((difference_N < 0).sum()), int((difference_N > 0).sum())
        p = f"{mcnemar(worse, better):.3g}" if a["n"] == b["n"] == 1 else "-"
        bounds = f"[{low:+.1%}, {high:+.1%}]"
        lines.append(f"{name:<16} {a['count']:>8} {a['accuracy']:>7.1%} {b['accuracy']:>7.1%} "
                     f"{difference_N.mean():>+10.1%} {bounds:<18} {p}")
    if len(lines) == 1:
        raise ConfigError(f"--compare: the results have no set in common: {', '.join(first['results'])} and "
                          f"{', '.join(second['results'])}")
    return "\n".join(lines)


# ---- the command

def load_sets(names: str, folder: str | None, tokenizer: Tokenizer, system: str | None,
              max_prompt_tokens: int) -> list[Set]:
    """Evaluation sets: "a.jsonl,gsm8k" -> [a, gsm8k]. Raises ConfigError."""
    sets: list[Set] = []
    for name in map(str.strip, names.split(",")):
        short = Path(name).stem
        if any(short == s.name for s in sets):
            raise ConfigError(f"evaluation set {short!r} is named twice in {names!r}")
        problems = load_problems(name, folder)
        name_unreadable(short, problems)
        sets.append(Set(short, problems, to_prompts(problems, tokenizer, system, max_prompt_tokens)))
    return sets


def whole_numbers(text: str) -> list[int]:
    return list(map(int, text.split(",")))


def arguments() -> argparse.Namespace:
    """What was given; what was not comes from --protocol, then from --config, then from here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face folder or hub name")
    parser.add_argument("--data", help="sets separated by commas")
    parser.add_argument("--data-dir", help="folder with the files of named sets")
    parser.add_argument("--config", help="a training config: its sets, prompt and sampling")
    parser.add_argument("--protocol", choices=PROTOCOLS, help="how a paper evaluates")
    parser.add_argument("--system-prompt", help="as in training (data.system_prompt)")
    parser.add_argument("--max-prompt-tokens", type=int, help="2048")
    parser.add_argument("--max-new-tokens", type=int, help="1024")
    parser.add_argument("--n", "--samples", type=int,
                        help="answers to each problem (1); torchrun takes the short form for its own")
    parser.add_argument("--k", type=whole_numbers, help="of pass@k and majority@k, separated by commas (1,2,4,...,n)")
    parser.add_argument("--temperature", type=float, help="0 is greedy (0)")
    parser.add_argument("--top-p", type=float, help="1")
    parser.add_argument("--seed", type=int, default=0, help="of the samples, at a temperature above 0")
    parser.add_argument("--engine", choices=["torch", "vllm"], help="as rollout.engine in training (torch)")
    parser.add_argument("--tensor-parallel", type=int, help="ranks that one vLLM engine is spread over (1)")
    parser.add_argument("--cache-gib", type=float, help="as rollout.cache_gib")
    parser.add_argument("--slots", type=int, help="sequences decoded at once (256)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--out", type=Path, help="JSON with settings, scores and every response")
    parser.add_argument("--rescore", type=Path, help="a result: grade its responses again")
    parser.add_argument("--compare", type=Path, nargs=2, help="two results on the same problems")
    args = parser.parse_args()
    preset = dict(PROTOCOLS.get(args.protocol, {}))
    filled = {"max_prompt_tokens": 2048, "max_new_tokens": 1024, "n": 1, "temperature": 0.0, "top_p": 1.0,
              "engine": "torch", "slots": 256, "dtype": "auto", "attention": "auto", "tensor_parallel": 1,
              "cache_gib": None, "system_prompt": None, "data_dir": None}
    if args.config:
        cfg = config.load(args.config, [])
        filled |= {"data": cfg.data.eval, "data_dir": cfg.data.dir, "dtype": cfg.model.dtype,
                   "attention": cfg.model.attention}
        filled |= {key: getattr(cfg.eval, key) for key in ("max_new_tokens", "n", "temperature", "top_p")}
        filled |= {key: getattr(cfg.rollout, key) for key in ("engine", "slots", "tensor_parallel", "cache_gib")}
    if args.config or preset:
        cfg = config.load(preset.pop("config", args.config), [])
        filled |= {"system_prompt": cfg.data.system_prompt, "max_prompt_tokens": cfg.data.max_prompt_tokens}
    for key, value in (filled | preset).items():
        if getattr(args, key, None) is None:
            setattr(args, key, value)
    return args


def check_arguments(args: argparse.Namespace) -> None:
    for name, fine, allowed in (
            ("--model", args.model is not None, "given: a Hugging Face folder or a hub name"),
            ("--data", args.data is not None,
             "given: sets separated by commas, or a --protocol or --config that has some"),
            ("--temperature", args.temperature >= 0, "at least 0"),
            ("--temperature", args.engine == "torch" or not 0 < args.temperature < 0.01,
             "0 or at least 0.01 with vLLM, which takes a lower one for 0.01"),
            ("--n", args.n >= 1, "at least 1"),
            ("--n", args.n == 1 or args.temperature > 0, "1 at --temperature 0: greedy answers are all the same"),
            ("--k", not args.k or 1 <= min(args.k) <= max(args.k) <= args.n, f"of numbers in 1..{args.n} (--n)"),
            ("--top-p", 0 < args.top_p <= 1, "in (0, 1]"),
            ("--max-new-tokens", args.max_new_tokens >= 1, "at least 1"),
            ("--slots", args.slots >= 1, "at least 1")):
        if not fine:
            raise ConfigError(f"{name} must be {allowed}")


def run(args: argparse.Namespace) -> dict:
    """Evaluate as the arguments say; what --out holds already is not sampled again."""
    check_arguments(args)
    device = dist.init(args.device)
    folder = find_model(args.model)
    tokenizer = Tokenizer(folder)
    sets = load_sets(args.data, args.data_dir, tokenizer, args.system_prompt, args.max_prompt_tokens)
    longest = max(len(p.ids) for s in sets for p in s.prompts) + args.max_new_tokens
    check_positions(folder, longest, "the prompts and --max-new-tokens")
    sampling = Sampling(args.max_new_tokens, args.n, args.temperature, args.top_p, args.seed)
    auto = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = auto if args.dtype == "auto" else getattr(torch, args.dtype)
    store = None
    if args.out:
        head, found = dist.gather([head_of(args, sampling, folder, dtype, tokenizer, sets),
                                   read_result(args.out) if args.out.is_file() else None] if dist.rank() == 0 else [])
        if found:
            require_same(args.out, found["head"], head)
            print(f"{args.out} is complete; nothing is sampled again", file=sys.stderr)
            return {"head": head, "results": {name: scores(r["problems"], args.k)
                                              for name, r in found["results"].items()}}
        store = Store(args.out, head, ROUNDS_OF_SLOTS * args.slots * dist.world_size())
    engine = start_engine(args.engine, folder, dtype, device, choose_backend(args.attention, device, dtype),
                          tokenizer.eos_ids, args.slots, longest, args.tensor_parallel, args.cache_gib)
    engine.sync(load_model(folder, dtype, torch.device("cpu")))
    results = {s.name: evaluate(engine, tokenizer, s, sampling, s.name if dist.rank() == 0 else None, store, args.k)
               for s in sets}
    if store and dist.rank() == 0:
        write_result(args.out, {"head": head, "results": results})
        store.path.unlink()
    return {"results": results}


def show(args: argparse.Namespace) -> None:
    if args.out and not args.out.parent.is_dir():
        raise ConfigError(f"--out: folder {args.out.parent} not found; create it first")
    if args.compare:
        print(compared(*map(read_result, args.compare)))
        return
    result = rescore(read_result(args.rescore), args.k) if args.rescore else run(args)
    if args.rescore and args.out:
        write_result(args.out, result)
    if args.rescore or dist.rank() == 0:
        print(table(result["results"]), flush=True)


def main() -> int:
    try:
        show(arguments())
        return 0
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where it stopped, if it has --out", file=sys.stderr)
        return 130
    finally:
        dist.close()


if __name__ == "__main__":
    sys.exit(main())
