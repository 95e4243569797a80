"""What must hold before a run is worth its hours, measured on the loaded models: `train.py --check` prints the table.

A fresh run goes through the same checks silently before step 0 and stops at the first table with a failure. All ranks
take part and come to the same verdicts. The policy ends as it began, and the engine in sync with it.

Dimension key:  C completion tokens of one row.
"""

import math
import os
import resource
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import dist
from config import Config, ConfigError
from data import Tokenizer
from model import Decoder
from pack import Row, build
from reward import accuracy, extract
from rollout import Engine
from sample import Group, Problem, Prompt, Sample
from update import Learner

PROBES, COPIES, NEW_TOKENS = 4, 4, 32  # prompts, samples of each and tokens per sample that a rank tries
SOLUTIONS = 64  # gold solutions that the verifier is tried on


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    passed: bool
    found: str    # the numbers
    remedy: str   # what to do where it failed


def run(learner: Learner, engine: Engine, tokenizer: Tokenizer, problems: list[Problem],
        prompts: list[Prompt]) -> list[Check]:
    """All checks, on the training prompts and the problems behind them."""
    cfg, policy = learner.cfg, learner.policy
    probes = probe_prompts(prompts, cfg.data.max_prompt_tokens)
    # Halving is exact in floating point, reaches every weight, and leaves a flatter, tamer model.
    scale(policy, 0.5)
    engine.sync(policy)
    halved = whole_row(sample(engine, probes, cfg), policy)
    fresh_C = gap(learner, halved)
    engine.sleep()
    used, total = peak_memory(learner)
    scale(policy, 2.0)
    stale_C = gap(learner, halved)
    engine.sync(policy)
    groups = sample(engine, probes, cfg)
    row = whole_row(groups, policy)
    trained_C = learner.log_probs(policy, row).detach()
    with torch.no_grad():
        scored_C = learner.log_probs(policy, row)
        alone_C = torch.cat([learner.log_probs(policy, whole_row([replace(group, samples=(one,))], policy))
                             for group in groups for one in group.samples])
    half = learner.dtype == torch.bfloat16
    return [
        after_sync(fresh_C, stale_C, tolerance=0.1 if half else 1e-3),
        close("engine's log-probs", row.sampled_logp_C - scored_C, 0.1 if half else 1e-3,
              "the engine samples from another policy than the one trained: look for another dtype, attention "
              "(model.attention), rotary scaling or quantised weights; loss.tis_cap corrects a small gap"),
        close("ratio is 1 before the update", trained_C - scored_C, 0.02 if half else 1e-5,
              "a pass with gradient differs from one without: try other model.checkpoint_blocks or model.attention"),
        close("packed equals alone", alone_C - scored_C, 0.1 if half else 1e-4,
              "attention leaks between the sequences of a row: set model.attention=sdpa"),
        distinct(groups),
        ends(engine, tokenizer, policy),
        template(tokenizer, cfg.data.system_prompt),
        verifier(problems),
        memory(used, total),
    ]


def require(checks: list[Check]) -> None:
    """Raises ConfigError with what failed and what to do about it."""
    failed = [c for c in checks if not c.passed]
    if failed:
        raise ConfigError(f"{len(failed)} of {len(checks)} checks before the run failed (train.py --check shows all):"
                          + "".join(f"\n  {c.name}: {c.found}\n    {c.remedy}" for c in failed))


def table(checks: list[Check]) -> str:
    return "\n".join(f"{'pass' if c.passed else 'FAIL':<5} {c.name:<30} {c.found}"
                     + ("" if c.passed else f"\n{'':<6}{c.remedy}") for c in checks)


def probe_prompts(prompts: list[Prompt], max_tokens: int) -> list[Prompt]:
    """A few prompts, and one as long as is allowed up to 512 tokens: only a long one shows stale cached prefixes."""
    ids = [i for prompt in prompts[:512] for i in prompt.ids][:min(max_tokens, 512)]
    return [*prompts[:PROBES - 1], Prompt("long", tuple(ids), "")]


def sample(engine: Engine, probes: list[Prompt], cfg: Config) -> list[Group]:
    """A few samples of every probe, with seeds that differ between ranks."""
    requests = [(prompt, dist.seed_for(cfg.seed, dist.rank(), prompt.id, g, "check"))
                for prompt in probes for g in range(COPIES)]
    samples = engine.generate([prompt.ids for prompt, _ in requests], [seed for _, seed in requests],
                              min(NEW_TOKENS, cfg.rollout.max_new_tokens), cfg.rollout.temperature)
    return [Group(prompt, tuple(samples[n * COPIES:(n + 1) * COPIES])) for n, prompt in enumerate(probes)]


def whole_row(groups: list[Group], policy: Decoder) -> Row:
    """All samples of the groups in one row, in order."""
    ones = torch.ones(len(groups), len(groups[0].samples), dtype=torch.float64)
    weight = policy.embed_tokens.weight
    return build(groups, ones, ones, ones.nonzero().tolist()).to(weight.device, weight.dtype)


@torch.no_grad()
def scale(policy: Decoder, factor: float) -> None:
    for p in policy.parameters():
        p.mul_(factor)


@torch.no_grad()
def gap(learner: Learner, row: Row) -> Tensor:
    """log pi_trainer - log pi_engine, [C]."""
    return learner.log_probs(learner.policy, row) - row.sampled_logp_C


def mean_and_max(gap_C: Tensor) -> tuple[float, float]:
    """Of |gap| over the tokens of all ranks."""
    total = dist.sum_over_ranks({"sum": gap_C.abs().double().sum().item(), "count": len(gap_C)})
    return total["sum"] / total["count"], dist.max_over_ranks(gap_C.abs().max().item())


def close(name: str, gap_C: Tensor, tolerance: float, remedy: str) -> Check:
    mean, largest = mean_and_max(gap_C)
    return Check(name, mean <= tolerance, f"|log-prob difference| mean {mean:.1e}, max {largest:.1e} "
                                          f"(mean at most {tolerance:g})", remedy)


def after_sync(fresh_C: Tensor, stale_C: Tensor, tolerance: float) -> Check:
    """The engine must follow when the policy changes; that it did is seen only where old and new differ."""
    fresh, stale = mean_and_max(fresh_C)[0], mean_and_max(stale_C)[0]
    return Check("engine follows a sync", fresh <= tolerance < stale,
                 f"|log-prob difference| mean {fresh:.1e} to the policy synced, {stale:.1e} to the one before",
                 "the engine answers from other weights than it was given: a tied head or a cached prefix left stale, "
                 f"or another version of vllm; the first must be at most {tolerance:g} and the second above")


def distinct(groups: list[Group]) -> Check:
    """Samples of different seeds may be equal by chance; a shared seed makes more of them equal than chance would.

    Each is paired with its like on the next rank, or with the rank's own next. Under independence the second of a pair
    equals the first with the first's probability, so the chance of these equal pairs is at most their product times
    the number of ways to choose them.
    """
    found = sorted(dist.gather([(n, g, dist.rank(), s.ids, sum(s.logp))
                                for n, group in enumerate(groups) for g, s in enumerate(group.samples)]))
    pairs = list(zip(found[::2], found[1::2], strict=True))
    equal = [logp for (*_, ids, logp), (*_, other, _) in pairs if ids == other]
    log_chance = sum(equal) + math.log(math.comb(len(pairs), len(equal)))
    return Check("distinct samples", log_chance > math.log(1e-6),
                 f"{len(equal)} of {len(pairs)} pairs of seeds gave equal samples, by a chance of "
                 f"{math.exp(min(log_chance, 0)):.1g}; ranks: {dist.world_size()}",
                 "the engine does not use the seeds it is given, or two ranks use the same")


def ends(engine: Engine, tokenizer: Tokenizer, policy: Decoder) -> Check:
    """Every id that ends an answer is one of the engine's and of the vocabulary; so is the one the template writes."""
    ids, closing = tokenizer.eos_ids, tokenizer.closing_token()
    named = ", ".join(f"{i} {tokenizer.rust.id_to_token(i)!r}" for i in sorted(ids))
    found = f"{named}; the template closes an answer with " + (
        "no token of its own" if closing is None else repr(tokenizer.rust.id_to_token(closing)))
    passed = engine.eos_ids == ids and max(ids) < policy.shape.vocab_size and (closing is None or closing in ids)
    return Check("ends of an answer", passed, found,
                 "name every closing token in generation_config.json's eos_token_id, within the model's vocabulary; "
                 "one that is missing is never learnt as an end")


def template(tokenizer: Tokenizer, system: str | None) -> Check:
    question = [{"role": "user", "content": "1 + 1?"}]
    messages = ([{"role": "system", "content": system}] if system else []) + question
    without, text = tokenizer.conversation(messages, False), tokenizer.conversation(messages, True)
    opening = text.removeprefix(without)
    return Check("chat template opens the answer", text.startswith(without) and opening != "", repr(opening),
                 "the template ignores add_generation_prompt, so the model would continue the question; take the "
                 "template of an instruct model")


def verifier(problems: list[Problem]) -> Check:
    """Gold solutions, or gold answers in a box where the data has no solution that marks one, must earn the reward."""
    tried = problems[:SOLUTIONS]
    texts = [p.solution if extract(p.solution) is not None else f"\\boxed{{{p.answer}}}" for p in tried]
    wrong = [p.id for p, text in zip(tried, texts, strict=True) if not accuracy(text, p.answer)]
    found = f"{len(tried) - len(wrong)} of {len(tried)} gold solutions" + (f"; not {wrong[0]}" if wrong else "")
    return Check("verifier accepts the gold", not wrong, found,
                 "the answer of that line is not what its solution marks, or has a form that reward.py cannot read; "
                 "mend or remove the line")


def peak_memory(learner: Learner) -> tuple[float, float]:
    """(bytes in use at the peak of the largest row that training may run, bytes there are), of the fullest rank.

    Adam's moments come with the first step and are added. What does not fit counts as infinite.
    """
    cfg, policy, device = learner.cfg, learner.policy, learner.device
    longest = cfg.data.max_prompt_tokens + cfg.rollout.max_new_tokens
    lengths = [longest] * (cfg.pack.capacity // longest) + [cfg.pack.capacity % longest]
    groups = [Group(Prompt("", (0,), ""), (Sample((0,) * (n - 1), (0.0,) * (n - 1), True),)) for n in lengths if n > 1]
    failed = False
    try:
        (learner.log_probs(policy, whole_row(groups, policy)) * 0).sum().backward()
    except torch.OutOfMemoryError:
        failed = True
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        used = total - free  # the allocator keeps what it took, so this is the peak
    else:
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    policy.zero_grad()
    moments = sum(2 * p.numel() * p.element_size() for p in policy.parameters())
    return dist.max_over_ranks(math.inf if failed else used + moments), -dist.max_over_ranks(-total)


def memory(used: float, total: float) -> Check:
    numbers = f"{used / 2**30:.1f} of {total / 2**30:.1f} GiB at the peak of a full row"
    return Check("memory", used <= total, "out of memory" if used == math.inf else numbers,
                 "lower pack.capacity, model.logp_chunk or rollout.slots, or set model.checkpoint_blocks=true")
