"""Evaluation in one file: accuracy on one or several sets, with intervals. train.py calls the same function.

    python eval.py --model DIR_or_name --data NAME_or_file[,...] [--data-dir DIR] [--out results.json]
"""

import argparse
import json
import math
import sys
from pathlib import Path

import torch

import dist
from config import ConfigError
from data import Tokenizer, load_problems, to_prompts
from model import check_positions, choose_backend, find_model, load_model
from reward import accuracy
from rollout import Engine, start_engine
from sample import Prompt, Sample


def wilson(correct: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval for a proportion (95% at z = 1.96); right also near 0 and 1 and for small counts."""
    share, spread = correct / count, z * z / count
    centre = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / count + spread / (4 * count)) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


def evaluate(engine: Engine, tokenizer: Tokenizer, prompts: list[Prompt], max_new_tokens: int,
             temperature: float = 0.0, top_p: float = 1.0, seed: int = 0, progress: str | None = None) -> dict:
    """One answer to every prompt, greedy at temperature 0, shared out over the ranks; all return the same result.

    Returns accuracy with its 95% Wilson interval (low, high), count, mean length in tokens, share truncated, and
    `responses`: id, gold, text, tokens, finished and correct of each problem in order.
    """
    share = dist.mine(prompts)
    seeds = [dist.seed_for(seed, p.id, "eval") for p in share]
    samples = engine.generate([p.ids for p in share], seeds, max_new_tokens, temperature, top_p, progress)
    responses = dist.gather([judge(p, s, tokenizer) for p, s in zip(share, samples, strict=True)])
    count, correct = len(responses), sum(r["correct"] for r in responses)
    low, high = wilson(correct, count)
    return {
        "accuracy": correct / count, "low": low, "high": high, "count": count,
        "length": sum(r["tokens"] for r in responses) / count,
        "truncated": sum(not r["finished"] for r in responses) / count,
        "responses": responses,
    }


def judge(prompt: Prompt, sample: Sample, tokenizer: Tokenizer) -> dict:
    text = tokenizer.decode(sample.ids)
    return {"id": prompt.id, "gold": prompt.answer, "text": text, "tokens": len(sample.ids),
            "finished": sample.finished, "correct": bool(accuracy(text, prompt.answer))}


def load_sets(names: str, folder: str | None, tokenizer: Tokenizer, system: str | None,
              max_prompt_tokens: int) -> dict[str, list[Prompt]]:
    """Evaluation sets by short name: "a.jsonl,gsm8k" -> {"a": [...], "gsm8k": [...]}. Raises ConfigError."""
    sets: dict[str, list[Prompt]] = {}
    for name in map(str.strip, names.split(",")):
        short = Path(name).stem
        if short in sets:
            raise ConfigError(f"evaluation set {short!r} is named twice in {names!r}")
        sets[short] = to_prompts(load_problems(name, folder), tokenizer, system, max_prompt_tokens)
    return sets


def row(name: str, result: dict) -> str:
    return (f"{name:<16} {result['accuracy']:>8.1%}  [{result['low']:.1%}, {result['high']:.1%}]  "
            f"{result['count']:>5} problems  {result['length']:>7.1f} tokens  {result['truncated']:>6.1%} truncated")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder or hub name")
    parser.add_argument("--data", required=True, help="sets separated by commas")
    parser.add_argument("--data-dir", help="folder with the files of named sets")
    parser.add_argument("--system-prompt", help="as in training (data.system_prompt)")
    parser.add_argument("--max-prompt-tokens", type=int, default=2048)
    parser.add_argument("--max-new-tokens", type=int, default=1024)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="of the samples, at a temperature above 0")
    parser.add_argument("--engine", choices=["torch", "vllm"], default="torch", help="as rollout.engine in training")
    parser.add_argument("--slots", type=int, default=256, help="sequences decoded at once")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--out", type=Path, help="JSON with settings, scores and every response")
    args = parser.parse_args()
    device = dist.init(args.device)
    folder = find_model(args.model)
    tokenizer = Tokenizer(folder)
    for name, fine, allowed in (("--temperature", args.temperature >= 0, "at least 0"),
                                ("--top-p", 0 < args.top_p <= 1, "in (0, 1]"),
                                ("--max-new-tokens", args.max_new_tokens >= 1, "at least 1"),
                                ("--slots", args.slots >= 1, "at least 1")):
        if not fine:
            raise ConfigError(f"{name} must be {allowed}")
    if args.out and not args.out.parent.is_dir():
        raise ConfigError(f"--out: folder {args.out.parent} not found; create it first")
    sets = load_sets(args.data, args.data_dir, tokenizer, args.system_prompt, args.max_prompt_tokens)
    longest = max(len(p.ids) for prompts in sets.values() for p in prompts) + args.max_new_tokens
    check_positions(folder, longest, "the prompts and --max-new-tokens")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    engine = start_engine(args.engine, folder, dtype, device, choose_backend("auto", device, dtype),
                          tokenizer.eos_ids, args.slots, longest)
    engine.sync(load_model(folder, dtype, torch.device("cpu")))
    results = {}
    for name, prompts in sets.items():
        results[name] = evaluate(engine, tokenizer, prompts, args.max_new_tokens, args.temperature,
                                 args.top_p, args.seed, progress=name if dist.rank() == 0 else None)
        if dist.rank() == 0:
            print(row(name, results[name]), flush=True)
    if args.out and dist.rank() == 0:
        settings = {key: str(value) for key, value in vars(args).items() if value is not None}
        args.out.write_text(json.dumps({"settings": settings, "results": results}, indent=1) + "\n")
    dist.close()


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
