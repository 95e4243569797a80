"""Check before a run what would spoil it, measured on the loaded models: `train.py --check` prints the table.

A fresh run makes the same checks silently before step 0 and stops where one fails. All ranks take part and
come to the same verdicts. The policy ends as it was; the engine needs another sync.

Dimension key:  C completion tokens of one row.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from config import Config, ConfigError, Rollout
from data import Task, Tokenizer
from history import sample_seed
from infra import dist
from infra.signals import LESS_MEMORY
from learner import Learner, roles
from model import Decoder
from pack import Minibatch, Plan, build_row, layout
from preflight import counts, memory
from records import Group, Problem, Prompt, Row, Sample
from rollout import Engine
from verify.extract import extract
from verify.grade import grade

PROBES, COPIES, NEW_TOKENS = 4, 4, 32  # prompts, samples of each and tokens per sample that a rank tries
SOLUTIONS = 64  # gold solutions that the verifier is tried on


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    passed: bool
    figures: str  # what was measured
    remedy: str   # what to do where it failed


def run_checks(cfg: Config, learner: Learner, engine: Engine, task: Task) -> list[Check]:
    """Run all checks, on the training prompts and the problems behind them; memory.decide made `cfg`."""
    policy = learner.policy
    probes = probe_prompts(task.prompts, cfg.data.max_prompt_tokens)
    # Halving is exact in floating point, reaches every weight, and leaves a flatter, tamer model.
    scale(policy, 0.5)
    nothing = stir(policy)
    engine.sync(policy)
    rows = in_rows(sample_probes(engine, probes, cfg.rollout, cfg.seed), learner, learner.pack.capacity)
    fresh_C = trainer_logp(learner, rows) - engine_logp(rows)
    engine.sleep()
    update_peak = peak_of_update(cfg, learner)
    for p, before in nothing:
        p.data.copy_(before)
    scale(policy, 2.0)
    stale_C = trainer_logp(learner, rows) - engine_logp(rows)
    engine.sync(policy)
    groups = sample_probes(engine, probes, cfg.rollout, cfg.seed)
    rows = in_rows(groups, learner, learner.pack.capacity)
    trained_C = torch.cat([logp_C.detach() for logp_C in passes(learner, rows)])
    trainer_C = trainer_logp(learner, rows)
    unpacked_C = trainer_logp(learner, in_rows(groups, learner, capacity=0))
    rollout_peak = peak_of_rollout(cfg, learner)
    half = learner.dtype == torch.bfloat16
    return [
        after_sync(fresh_C, stale_C, tolerance=0.1 if half else 1e-3),
        check_gap("engine's log-probs", engine_logp(rows) - trainer_C, 0.1 if half else 1e-3,
                  "the engine samples from another policy than the one trained: look for another dtype, "
                  "attention (model.attention), rotary scaling or quantised weights; loss.tis_cap corrects a "
                  "small gap"),
        check_gap("ratio is 1 before the update", trained_C - trainer_C, 0.02 if half else 1e-5,
                  "a pass with gradient differs from one without: try other model.checkpoint_blocks or "
                  "model.attention"),
        check_gap("packed equals alone", unpacked_C - trainer_C, 0.1 if half else 1e-4,
                  "attention leaks between the sequences of a row: set model.attention=sdpa"),
        distinct(groups),
        eos_agree(groups, engine, task.tokenizer, policy),
        template(task.tokenizer, cfg.data.system_prompt),
        verifier(task.problems),
        fits(memory.fullest(update_peak, learner.device), memory.fullest(rollout_peak, learner.device),
             memory.total_bytes(learner.device),
             counts.update_bytes(cfg, policy.shape, dist.world_size())),
    ]


def require(checks: list[Check]) -> None:
    """Raise ConfigError with what failed and what to do about it."""
    failed = [c for c in checks if not c.passed]
    if failed:
        what = "".join(f"\n  {c.name}: {c.figures}\n    {c.remedy}" for c in failed)
        raise ConfigError(f"{len(failed)} of {len(checks)} checks before the run failed "
                          f"(train.py --check shows all):{what}")


def report(cfg: Config, learner: Learner, engine: Engine, task: Task) -> int:
    """Print the table of all checks; returns the exit status, 2 where one failed."""
    checks = run_checks(cfg, learner, engine, task)
    if dist.rank() == 0:
        print(checks_table(checks), flush=True)
    return 0 if all(check.passed for check in checks) else 2


def checks_table(checks: list[Check]) -> str:
    return "\n".join(f"{'pass' if c.passed else 'FAIL':<5} {c.name:<30} {c.figures}"
                     + ("" if c.passed else f"\n{'':<6}{c.remedy}") for c in checks)


def probe_prompts(prompts: list[Prompt], max_tokens: int) -> list[Prompt]:
    """Choose a few prompts, and one as long as is allowed up to 512 tokens: only a long one shows stale
    cached prefixes."""
    ids = [i for prompt in prompts[:512] for i in prompt.ids][:min(max_tokens, 512)]
    return [*prompts[:PROBES - 1], Prompt("long", tuple(ids), "")]


def sample_probes(engine: Engine, probes: list[Prompt], settings: Rollout, seed: int) -> list[Group]:
    """Sample every probe a few times, as if each rank had the next few completions of its group."""
    requests = [(prompt, sample_seed(seed, 0, prompt.id, dist.rank() * COPIES + g))
                for prompt in probes for g in range(COPIES)]
    samples = engine.generate([prompt.ids for prompt, _ in requests], [seed for _, seed in requests],
                              min(NEW_TOKENS, settings.max_new_tokens), settings.temperature)
    return [Group(prompt, tuple(samples[n * COPIES:(n + 1) * COPIES])) for n, prompt in enumerate(probes)]


def in_rows(groups: list[Group], learner: Learner, capacity: int) -> list[Row]:
    """Pack all samples of the groups in order: a row takes the next ones while it has room, at least one."""
    ones = torch.ones(len(groups), len(groups[0].samples), dtype=torch.float64)
    minibatch = Minibatch.plain(groups, ones.bool(), ones, ones)
    bins = [[]]
    for member in ones.nonzero().tolist():
        if bins[-1] and sum(layout(minibatch, [*bins[-1], member])[0]) > capacity:
            bins.append([])
        bins[-1].append(member)
    dtype = dist.dtype_of_trained(learner.policy)
    return [build_row(minibatch, Plan(members)).to(learner.device, dtype) for members in bins]


def engine_logp(rows: list[Row]) -> Tensor:
    """Return the engine's log-probs."""
    return torch.cat([row.sampled_logp_C for row in rows])


@torch.no_grad()
def trainer_logp(learner: Learner, rows: list[Row]) -> Tensor:
    """Compute the trainer's log-probs."""
    return torch.cat(passes(learner, rows))


def passes(learner: Learner, rows: list[Row]) -> list[Tensor]:
    """Compute the log-probs of each row. Ranks have rows of their own, but must make equally many passes."""
    idle = int(dist.max_over_ranks(len(rows))) - len(rows)
    return [learner.log_probs(learner.policy, row) for row in [*rows, *rows[:1] * idle]][:len(rows)]


@torch.no_grad()
def scale(policy: Decoder, factor: float) -> None:
    for p in policy.parameters():
        p.mul_(factor)


@torch.no_grad()
def stir(policy: Decoder) -> list[tuple[Tensor, Tensor]]:
    """Give adapters (lora.py), which add nothing at first, something to add; return what was."""
    before = [(p, p.clone()) for name, p in policy.named_parameters() if name.endswith("lora_B")]
    for p, _ in before:
        p.add_(0.01)
    return before


def mean_and_max(gap_C: Tensor) -> tuple[float, float]:
    """Compute the mean and the maximum of |gap| over the tokens of all ranks."""
    total = dist.sum_over_ranks({"sum": gap_C.abs().double().sum().item(), "count": len(gap_C)})
    return total["sum"] / total["count"], dist.max_over_ranks(gap_C.abs().max().item())


def check_gap(name: str, gap_C: Tensor, tolerance: float, remedy: str) -> Check:
    mean, largest = mean_and_max(gap_C)
    return Check(name, mean <= tolerance, f"|log-prob difference| mean {mean:.1e}, max {largest:.1e} "
                                          f"(mean at most {tolerance:g})", remedy)


def after_sync(fresh_C: Tensor, stale_C: Tensor, tolerance: float) -> Check:
    """Check that the engine follows when the policy changes, which is seen only where old and new differ."""
    fresh, stale = mean_and_max(fresh_C)[0], mean_and_max(stale_C)[0]
    return Check("engine follows a sync", fresh <= tolerance < stale,
                 f"|log-prob difference| mean {fresh:.1e} to the policy synced, "
                 f"{stale:.1e} to the one before",
                 "the engine answers from other weights than it was given: a tied head or a cached prefix "
                 "left stale, or another version of vllm; "
                 f"the first must be at most {tolerance:g} and the second above")


def distinct(groups: list[Group]) -> Check:
    """Check that samples of different seeds are not equal more often than chance makes them.

    Each sample is paired with its counterpart on the next rank, or with the rank's own next sample. Under
    independence the second of a pair equals the first with the first's probability, so the chance of these
    equal pairs is at most the product of those probabilities times the number of ways to choose the pairs.
    """
    samples = [(n, g, dist.rank(), s.ids, sum(s.logp))
               for n, group in enumerate(groups) for g, s in enumerate(group.samples)]
    ordered = sorted(dist.gather(samples))
    pairs = list(zip(ordered[::2], ordered[1::2], strict=True))
    equal = [logp for (*_, ids, logp), (*_, paired_ids, _) in pairs if ids == paired_ids]
    log_chance = sum(equal) + math.log(math.comb(len(pairs), len(equal)))
    return Check("distinct samples", log_chance > math.log(1e-6),
                 f"{len(equal)} of {len(pairs)} pairs of seeds gave equal samples, by a chance of "
                 f"{math.exp(min(log_chance, 0)):.1g}; ranks: {dist.world_size()}",
                 "the engine does not use the seeds it is given, or two ranks use the same")


def eos_agree(groups: list[Group], engine: Engine, tokenizer: Tokenizer, policy: Decoder) -> Check:
    """Check that the EOS ids of the model's files are in the vocabulary, end every sample and are what the
    template writes."""
    ids, closing = tokenizer.eos_ids, tokenizer.closing_token()
    named = ", ".join(f"{i} {tokenizer.rust.id_to_token(i)!r}" for i in sorted(ids))
    figures = f"{named}; the template closes an answer with " + (
        "no token of its own" if closing is None else repr(tokenizer.rust.id_to_token(closing)))
    samples = [s for group in groups for s in group.samples]
    reached = [False] * len(samples)
    if tokenizer.stops:
        figures += f"; so do {', '.join(map(repr, tokenizer.stops.texts))}"
        reached = tokenizer.stops.reached([list(s.ids) for s in samples])
    stops = all(s.finished == (s.ids[-1] in ids or stopped) and not ids & set(s.ids[:-1])
                for s, stopped in zip(samples, reached, strict=True))
    in_vocabulary = max(ids) < policy.shape.vocab_size and (closing is None or closing in ids)
    agree = engine.eos_ids == ids and in_vocabulary
    passed = dist.max_over_ranks(float(not (agree and stops))) == 0
    return Check("ends of an answer", passed, figures,
                 "name every closing token in generation_config.json's eos_token_id, within the model's "
                 "vocabulary; one that is missing is never learnt as an end")


def template(tokenizer: Tokenizer, system: str | None) -> Check:
    question = [{"role": "user", "content": "1 + 1?"}]
    messages = ([{"role": "system", "content": system}] if system else []) + question
    without, text = tokenizer.conversation(messages, False), tokenizer.conversation(messages, True)
    opening = text.removeprefix(without)
    return Check("chat template opens the answer", text.startswith(without) and opening != "", repr(opening),
                 "the template ignores add_generation_prompt, so the model would continue the question; "
                 "take the template of an instruct model")


def verifier(problems: list[Problem]) -> Check:
    """Check that the verifier accepts gold solutions, or boxed gold answers where no solution marks one; only
    problems that have an answer are tried."""
    tried = [p for p in problems if p.answer][:SOLUTIONS]
    texts = [p.solution if extract(p.solution) is not None else f"\\boxed{{{p.answer}}}" for p in tried]
    grades = grade([(p.answer, text) for p, text in zip(tried, texts, strict=True)])
    wrong = [p.id for p, graded in zip(tried, grades, strict=True) if graded["verdict"] != "right"]
    accepted = f"{len(tried) - len(wrong)} of {len(tried)} gold solutions"
    return Check("verifier accepts the gold", not wrong, accepted + (f"; not {wrong[0]}" if wrong else ""),
                 "the answer of that line is not what its solution marks, or has a form that reward.py "
                 "cannot read; mend or remove the line")


def peak_of_update(cfg: Config, learner: Learner) -> float:
    """Measure the bytes in use at the peak of a full row of training, of groups of counts.planned_lengths.

    Raises ConfigError where memory runs out: the other ranks would wait in vain for this one.
    """
    models = [model for model, _ in roles(learner).values()]
    (prompt, completion), G = counts.planned_lengths(cfg), cfg.rollout.group_size
    sample, capacity = Sample((0,) * completion, (0.0,) * completion, True), learner.pack.capacity
    group = Group(Prompt("", (0,) * prompt, ""), (sample,) * G)
    row = in_rows([group] * (capacity // (prompt + G * completion) + 1), learner, capacity)[0]
    try:
        (learner.log_probs(learner.policy, row) * 0).sum().backward()
        learner.policy.zero_grad()  # training never holds both gradients
        if learner.critic:
            (learner.critic.values(learner, row)[0] * 0).sum().backward()
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"out of memory on a full row of {capacity} tokens; {LESS_MEMORY}") from error
    finally:
        for model in models:
            model.zero_grad()
    # On the CPU the copy that a checkpoint is written from lies in the same memory: weights and two moments.
    trained = [p for model in models for p in model.parameters() if p.requires_grad]
    weights = sum(dist.local(p).nbytes for p in trained)
    copies = 0 if learner.device.type == "cuda" else 3 * weights
    return memory.in_use(learner.device) + copies


def lengthen_rows(asked: Config, cfg: Config, learner: Learner) -> tuple[Config, Learner]:
    """Make the rows of pack.capacity=auto as long on CUDA as memory is measured to have room for.

    More is counted than an update takes. So a full row of the capacity that was counted is measured beside
    what lies there, and rows may grow by what the count was over. Returns both as they then are.
    """
    device, shape, ranks = learner.device, learner.policy.shape, dist.world_size()
    if asked.pack.capacity != "auto" or device.type != "cuda":
        return cfg, learner
    torch.cuda.empty_cache()  # what models were loaded with, rows could take as well
    held = memory.fullest(memory.in_use(device), device)

    def counted(tokens: int) -> float:
        longer = memory.with_rows(cfg, cfg.model.checkpoint_blocks, tokens)
        return counts.update_bytes(longer, shape, ranks) - counts.held_bytes(longer, shape, ranks)

    first, most = cfg.pack.capacity, counts.row_range(cfg, ranks)[1]
    real = memory.fullest(peak_of_update(cfg, learner), device) - held
    real = max(real, counted(first) / memory.OVERCOUNTED)  # less has never been seen
    room = memory.FILLED * memory.total_bytes(device) - held
    sizes = [*range(first, most, memory.GRAIN), most]
    fitting = bisect_right(sizes, room * counted(first) / real, key=counted)
    torch.cuda.empty_cache()  # the checks before the run measure a row of the new capacity
    longer = memory.with_rows(cfg, cfg.model.checkpoint_blocks, sizes[max(1, fitting) - 1])
    if dist.rank() == 0:
        print(f"measured here: pack.capacity={longer.pack.capacity}", flush=True)
    return longer, replace(learner, pack=longer.pack)


def peak_of_rollout(cfg: Config, learner: Learner) -> float:
    """Estimate the bytes in use while the engine, which is awake now, samples at full length."""
    needed = 0  # vLLM has all that it samples with already
    if cfg.rollout.engine == "torch":
        needed = counts.sampling_bytes(learner.policy.shape, learner.dtype.itemsize, cfg.rollout.slots,
                                       counts.longest(cfg), tensor_parallel=0)
    if learner.device.type == "cuda":
        torch.cuda.empty_cache()  # what torch still holds of the update, the cache takes first
    return memory.in_use(learner.device) + needed


def fits(update: float, rollout: float, total: float, counted_update: float) -> Check:
    gib = [f"{x / 2**30:.1f}" for x in (update, counted_update, rollout, total)]
    return Check("memory", max(update, rollout) <= total,
                 f"update {gib[0]} (counted {gib[1]} a rank), "
                 f"rollout {gib[2]} of {gib[3]} GiB at their peaks",
                 LESS_MEMORY)
