"""The command line of eval.py: its arguments, and what stands in for those that are left out."""

import argparse

import config
from config import Config, ConfigError, Data, Reward
from settings.loader import convert, parse
from settings.paths import find_path, user_path
from settings.rules import PLAIN_PROMPT, asks

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
            "data_dir": None, "limit": None, "dtype": "auto", "attention": "auto", "columns": None,
            "chat_template": None, "prompt": None, "template": None, "stop": None, "reward": Reward()}


def with_new_lines(text: str) -> str:
    """Write out each \\n, since few can type a new line into a shell."""
    return text.replace("\\n", "\n")


def whole_numbers(text: str) -> list[int]:
    return list(map(int, text.split(",")))


def pairs(text: str, option: str) -> dict[str, str]:
    """Read "a=b,c=d"."""
    split = [pair.partition("=") for pair in text.split(",")]
    if not all(equals for _, equals, _ in split):
        raise ConfigError(f"{option} {text!r} must have the form name=value,name=value")
    return {name: value for name, _, value in split}


def parser(description: str) -> argparse.ArgumentParser:
    layout = argparse.RawDescriptionHelpFormatter
    flags = argparse.ArgumentParser(description=description, formatter_class=layout)
    add = flags.add_argument
    add("--model", nargs="+", help="Hugging Face folders, checkpoints, patterns of these, or a hub name")
    add("--data", help="sets separated by commas")
    add("--data-dir", help="folder with the files of named sets")
    add("--limit", type=int, help="only the first so many problems of each set")
    add("--config", help="a training config: its sets, prompt and sampling")
    add("--protocol", choices=PROTOCOLS, help="how a paper evaluates")
    add("--columns", help="other names of columns: question=prompt,answer=label (data.columns)")
    add("--system-prompt", help="as in training (data.system_prompt)")
    add("--chat-template", type=find_path,
        help="a jinja file in place of the model's own (data.chat_template)")
    add("--template", help="arguments of the template: enable_thinking=false (data.template)")
    add("--prompt", type=with_new_lines,
        help="in place of any template: 'Question: {question}\\nAnswer:' (data.prompt)")
    add("--stop", nargs="+", type=with_new_lines, help="texts that end an answer (rollout.stop)")
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
    add("--out", type=user_path, help="JSON with settings, scores and responses; of several models a folder")
    add("--rescore", type=user_path, help="a result: grade its responses again")
    add("--also", choices=["math-verify"], help="its verdicts too, and where they differ from ours")
    add("--compare", type=user_path, nargs=2, help="two results on the same problems")
    return flags


def arguments(description: str = "") -> argparse.Namespace:
    """Read the command line. What it leaves out comes from --protocol, then --config, then DEFAULTS."""
    args = parser(description).parse_args()
    settings = dict(DEFAULTS)
    if args.config:
        settings |= settings_of(config.load(args.config, []))
    if args.protocol:
        preset = dict(PROTOCOLS[args.protocol])
        cfg = config.load(preset.pop("config"), [])
        settings |= prompt_of(cfg) | preset
    if args.prompt is not None:  # in place of what a config has
        settings |= {"system_prompt": None, "chat_template": None, "template": None}
    if args.chat_template is not None:
        settings["prompt"] = None
    if args.columns is not None:
        args.columns = convert(pairs(args.columns, "--columns"), dict[config.Column, str], "--columns")
    if args.template is not None:
        values = pairs(args.template, "--template")
        args.template = {name: parse(value, "--template") for name, value in values.items()}
    for name, value in settings.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    return args


def prompt_of(cfg: Config) -> dict:
    names = ("system_prompt", "max_prompt_tokens", "chat_template", "prompt", "template")
    return {name: getattr(cfg.data, name) for name in names} | {"stop": cfg.rollout.stop}


def settings_of(cfg: Config) -> dict:
    """Return how a training run evaluates, as arguments of this command."""
    settings = prompt_of(cfg) | {"data": cfg.data.eval, "data_dir": cfg.data.dir, "reward": cfg.reward,
                                 "columns": cfg.data.columns}
    settings |= {"dtype": cfg.model.dtype, "attention": cfg.model.attention}
    settings |= {name: getattr(cfg.eval, name)
                 for name in ("limit", "max_new_tokens", "n", "temperature", "top_p")}
    return settings | {name: getattr(cfg.rollout, name)
                       for name in ("engine", "slots", "tensor_parallel", "cache_gib")}


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ConfigError for the first argument that is out of range."""
    for name, fine, allowed in (
            ("--model", args.model != "", "given: a Hugging Face folder or a hub name"),
            ("--data", args.data is not None,
             "given: sets separated by commas, or a --protocol or --config that has some"),
            ("--prompt", args.prompt is None or asks(args.prompt), PLAIN_PROMPT),
            ("--prompt", not (args.prompt and (args.system_prompt or args.chat_template or args.template)),
             "given without --system-prompt, --chat-template and --template"),
            ("--stop", all(args.stop or [" "]), "of texts that are not empty"),
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
            ("--limit", args.limit is None or args.limit >= 1, "at least 1"),
            ("--slots", args.slots >= 1, "at least 1")):
        if not fine:
            raise ConfigError(f"{name} must be {allowed}")


def data_of(args: argparse.Namespace) -> Data:
    """Put what is asked, and how, into the section that training has for it."""
    names = ("system_prompt", "max_prompt_tokens", "chat_template", "prompt", "template", "columns")
    return Data(train="", eval=args.data, dir=args.data_dir, **{name: getattr(args, name) for name in names})
