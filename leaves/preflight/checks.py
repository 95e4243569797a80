"""Check before a run what would spoil it, measured on the loaded models: `train.py --check` prints the table.

A fresh run makes the same checks silently before step 0, but for the comparison with transformers, and stops
if one fails. All ranks take part and come to the same verdicts. The policy ends as it was; the engine needs
another sync.

Dimension key:  C completion tokens of one row.
"""

import math
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from config import NEED_ANSWER, Config, Reward, Rollout
from data import Task, Tokenizer, render_problem
from history import sample_seed
from infra import dist
from infra.checks import Check
from infra.tokenizer import as_messages
from learner import Learner
from model import Decoder
from pack import Minibatch, Plan, build_row, layout
from records import Group, Problem, Prompt, Request, Row
from reward import COMPONENTS, list_components, score
from rollout import Engine
from verify.answer import strip_spaces
from verify.extract import extract
from verify.grade import grade

# Prompts that a rank tries, samples of each, and tokens of a sample.
PROBES, SAMPLES, NEW_TOKENS = 4, 4, 32
SOLUTIONS = 64  # gold solutions that the verifier is tried on
ENDING = 40     # characters of a prompt's end that are compared


def run_checks(cfg: Config, learner: Learner, engine: Engine, task: Task) -> list[Check]:
    """Run all checks, on the training prompts and their problems; choices.resolve_auto made `cfg`."""
    policy, capacity = learner.policy, learner.pack.capacity
    probes = probe_prompts(task.prompts, cfg.data.max_prompt_tokens)
    # Halving is exact in floating point, reaches every weight, and leaves a flatter, tamer model.
    scale_weights(policy, 0.5)
    nothing = stir_adapters(policy)
    engine.sync(policy)
    rows = pack_in_order(sample_probes(engine, probes, cfg.rollout, cfg.seed), learner, capacity)
    fresh_C = trainer_logp(learner, rows) - engine_logp(rows)
    engine.sleep()
    for p, before in nothing:
        p.data.copy_(before)
    scale_weights(policy, 2.0)
    stale_C = trainer_logp(learner, rows) - engine_logp(rows)
    engine.sync(policy)
    groups = sample_probes(engine, probes, cfg.rollout, cfg.seed)
    half = learner.dtype == torch.bfloat16 or cfg.model.products is not None
    log_probs = check_log_probs(groups, learner, half)
    return [
        check_sync(fresh_C, stale_C, tolerance=0.1 if half else 1e-3),
        *log_probs,
        check_seeds(groups),
        check_ends(groups, engine, task.tokenizer, policy),
        check_template(task.tokenizer, cfg.data.system_prompt),
        check_prompts(task, cfg.data.system_prompt),
        check_verifier(task.problems),
        check_rewards(cfg.reward, task),
    ]


# ---- log-probs of the engine and of the trainer

def probe_prompts(prompts: list[Prompt], max_tokens: int) -> list[Prompt]:
    """Choose a few prompts, and one as long as is allowed up to 512 tokens: only a long one shows stale
    cached prefixes."""
    ids = [i for prompt in prompts[:512] for i in prompt.ids][:min(max_tokens, 512)]
    return [*prompts[:PROBES - 1], Prompt("long", tuple(ids), "")]


def sample_probes(engine: Engine, probes: list[Prompt], settings: Rollout, seed: int) -> list[Group]:
    """Sample every probe a few times, as if each rank had the next few completions of its group."""
    first = dist.rank() * SAMPLES
    limit = min(NEW_TOKENS, settings.max_new_tokens)
    requests = [Request(prompt, sample_seed(seed, 0, prompt.id, g), limit)
                for prompt in probes for g in range(first, first + SAMPLES)]
    samples = iter(engine.generate(requests, settings.temperature))
    return [Group(prompt, tuple(islice(samples, SAMPLES))) for prompt in probes]


def pack_in_order(groups: list[Group], learner: Learner, capacity: int) -> list[Row]:
    """Pack all samples of the groups in order: a row takes the next ones while it has room, at least one."""
    ones = torch.ones(len(groups), len(groups[0].samples), dtype=torch.float64)
    minibatch = Minibatch(groups, ones.bool(), ones, ones, ones)
    bins = [[]]
    for member in ones.nonzero().tolist():
        queries, _ = layout(minibatch, [*bins[-1], member])
        if bins[-1] and sum(queries) > capacity:
            bins.append([])
        bins[-1].append(member)
    rows = [build_row(minibatch, Plan(members)) for members in bins]
    return [row.to(learner.device, learner.trained_dtype) for row in rows]


def engine_logp(rows: list[Row]) -> Tensor:
    """Return the engine's log-probs."""
    return torch.cat([row.sampled_logp_C for row in rows])


def pass_rows(learner: Learner, rows: list[Row]) -> Tensor:
    """Compute the log-probs of rows. Ranks have rows of their own, but must make equally many passes."""
    most = int(dist.max_over_ranks(len(rows)))
    idle = rows[:1] * (most - len(rows))
    passes = [learner.log_probs(learner.policy, row) for row in rows + idle]
    return torch.cat(passes[:len(rows)])


trainer_logp = torch.no_grad()(pass_rows)


@torch.no_grad()
def scale_weights(policy: Decoder, factor: float) -> None:
    for p in policy.parameters():
        p.mul_(factor)


@torch.no_grad()
def stir_adapters(policy: Decoder) -> list[tuple[Tensor, Tensor]]:
    """Give adapters (leaves/lora), which add nothing at first, something to add; return what was."""
    before = [(p, p.clone()) for name, p in policy.named_parameters() if name.endswith("lora_B")]
    for p, _ in before:
        p.add_(0.01)
    return before


def mean_and_max(gap_C: Tensor) -> tuple[float, float]:
    """Compute the mean and the maximum of |gap| over the tokens of all ranks."""
    gap_C = gap_C.abs()
    total = dist.sum_over_ranks({"sum": gap_C.double().sum().item(), "count": len(gap_C)})
    largest = dist.max_over_ranks(gap_C.max().item())
    return total["sum"] / total["count"], largest


# ---- the checks

def check_log_probs(groups: list[Group], learner: Learner, half: bool) -> list[Check]:
    """Check that the engine, a pass with gradient and sequences on their own give the same log-probs; `half`:
    up to the rounding of 16-bit numbers."""
    rows = pack_in_order(groups, learner, learner.pack.capacity)
    trained_C = pass_rows(learner, rows).detach()
    trainer_C = trainer_logp(learner, rows)
    unpacked_C = trainer_logp(learner, pack_in_order(groups, learner, capacity=0))
    return [
        check_gap("engine's log-probs", engine_logp(rows) - trainer_C, 0.1 if half else 1e-3,
                  "the engine samples from another policy than the one trained: look for another dtype, "
                  "attention (model.attention), rotary scaling or quantised weights; loss.tis_cap corrects a "
                  "small gap"),
        check_gap("ratio is 1 before the update", trained_C - trainer_C, 0.02 if half else 1e-5,
                  "a pass with gradient differs from one without: try other model.checkpoint_blocks or "
                  "model.attention"),
        check_gap("packed equals alone", unpacked_C - trainer_C, 0.1 if half else 1e-4,
                  "attention leaks between the sequences of a row: set model.attention=sdpa"),
    ]


def check_gap(name: str, gap_C: Tensor, tolerance: float, remedy: str) -> Check:
    mean, largest = mean_and_max(gap_C)
    figures = f"|log-prob difference| mean {mean:.1e}, max {largest:.1e} (mean at most {tolerance:g})"
    return Check(name, mean <= tolerance, figures, remedy)


def check_sync(fresh_C: Tensor, stale_C: Tensor, tolerance: float) -> Check:
    """Check that the engine follows when the policy changes, which is seen only where old and new differ."""
    fresh, _ = mean_and_max(fresh_C)
    stale, _ = mean_and_max(stale_C)
    figures = f"|log-prob difference| mean {fresh:.1e} to the policy synced, {stale:.1e} to the one before"
    return Check("engine follows a sync", fresh <= tolerance < stale, figures,
                 "the engine answers from other weights than it was given: a tied head or a cached prefix "
                 "left stale, or another version of vllm; "
                 f"the first must be at most {tolerance:g} and the second above")


def check_seeds(groups: list[Group]) -> Check:
    """Check that samples of different seeds are not equal more often than chance makes them.

    Each sample is paired with its counterpart on the next rank, or with the rank's own next sample. Under
    independence the second of a pair equals the first with the first's probability, so the chance of these
    equal pairs is at most the product of those probabilities times the number of ways to choose the pairs.
    """
    samples = [(n, g, dist.rank(), sample.ids, sum(sample.logp))
               for n, group in enumerate(groups) for g, sample in enumerate(group.samples)]
    ordered = sorted(dist.gather(samples))
    pairs = list(zip(ordered[::2], ordered[1::2], strict=True))
    equal = [logp for (*_, ids, logp), (*_, paired_ids, _) in pairs if ids == paired_ids]
    log_chance = sum(equal) + math.log(math.comb(len(pairs), len(equal)))
    chance = math.exp(min(log_chance, 0))
    return Check("distinct samples", log_chance > math.log(1e-6),
                 f"{len(equal)} of {len(pairs)} pairs of seeds gave equal samples, by a chance of "
                 f"{chance:.1g}; ranks: {dist.world_size()}",
                 "the engine does not use the seeds it is given, or two ranks use the same")


def check_ends(groups: list[Group], engine: Engine, tokenizer: Tokenizer, policy: Decoder) -> Check:
    """Check that the EOS ids of the model's files are in the vocabulary, end every sample and are what the
    template writes."""
    ids, closing, stops = tokenizer.eos_ids, tokenizer.closing_token(), tokenizer.stops
    name_token = tokenizer.rust.id_to_token
    named = ", ".join(f"{i} {name_token(i)!r}" for i in sorted(ids))
    closes = "no token of its own" if closing is None else repr(name_token(closing))
    figures = f"{named}; the template closes an answer with {closes}"
    if stops:
        figures += f"; so do {', '.join(map(repr, stops.texts))}"
    agree = engine.eos_ids == ids and max(ids) < policy.shape.vocab_size
    if closing is not None:
        agree &= closing in ids
    for group in groups:
        for sample in group.samples:
            stopped = bool(stops) and stops.reached([list(sample.ids)])[0]
            ended = sample.ids[-1] in ids or stopped
            agree &= sample.finished == ended and not ids & set(sample.ids[:-1])
    return Check("ends of an answer", dist.max_over_ranks(not agree) == 0, figures,
                 "name every closing token in generation_config.json's eos_token_id, within the model's "
                 "vocabulary; one that is missing is never learnt as an end")


def check_template(tokenizer: Tokenizer, system: str | None) -> Check:
    """Check that the chat template ends a prompt with the opening of an answer."""
    messages = as_messages("1 + 1?", system)
    without = tokenizer.conversation(messages, False)
    text = tokenizer.conversation(messages, True)
    opening = text.removeprefix(without)
    opens = text.startswith(without) and opening != ""
    return Check("chat template opens the answer", opens, repr(opening),
                 "the template ignores add_generation_prompt, so the model would continue the question; "
                 "take the template of an instruct model")


def check_prompts(task: Task, system: str | None) -> Check:
    """Check that what is sampled from ends as the rendered text ends."""
    problem, ids = task.problems[0], task.prompts[0].ids
    # Tokenizers may change white space at the ends of a text.
    end = strip_spaces(render_problem(problem, task.tokenizer, system))[-ENDING:]
    sampled = strip_spaces(task.tokenizer.decode(ids, special=True))[-ENDING:]
    figures = f"{len(ids)} tokens that end in {end!r}"
    return Check("whole prompts are sampled from", sampled == end, figures,
                 f"the tokens of {problem.id} end in {sampled!r}: the tokenizer loses or changes text; take "
                 "the one that belongs to the model")


def check_rewards(settings: Reward, task: Task) -> Check:
    """Check that a good completion reaches the rewards as it was written, and that one can have the best
    value of each built-in component with a weight."""
    tokenizer = task.tokenizer
    built_in = replace(settings, custom=None, custom_file=None)
    tried = [*islice((problem for problem in task.problems if problem.answer), SOLUTIONS)]
    missing = {name for name in built_in.weights if tried or name not in NEED_ANSWER}
    lost = ""
    for problem in tried or task.problems[:1]:
        for text in forge(problem.answer, tokenizer.opened):
            ids, = tokenizer.encode([text])
            read = tokenizer.read(ids)
            if strip_spaces(read) != strip_spaces(tokenizer.opened + text):
                lost = lost or text
            row, = score([(read, problem, 1)], 2 * (settings.overlong_tokens or 1), built_in, task.graded)
            values = zip(list_components(built_in, task.graded), row, strict=True)
            missing -= {name for name, value in values if name in missing and value == best(name, settings)}
        if not missing:
            break
    figures = f"{', '.join(sorted(missing)) or 'no component'} out of reach"
    if lost:
        figures += f"; decoding changes {lost[:ENDING]!r}"
    return Check("good answers are rewarded", not missing and not lost, figures,
                 "no completion can be rewarded: the tokenizer cannot write or read the marks, or the gold "
                 "answers are of another kind; choose another component of reward, or another tokenizer")


def best(name: str, settings: Reward) -> float:
    """Return the value of a component that its weight rewards most."""
    _, low, high = COMPONENTS[name]
    return high if settings.weights[name] > 0 else low


def forge(gold: str, opened: str) -> list[str]:
    """Write completions with the marks that built-in rewards look for, right ones and a wrong one."""
    thought = "<think>\nIt is so.\n</think>\n"
    texts = [f"{thought}<answer>{gold}</answer>", f"So \\boxed{{{gold}}}.", "So \\boxed{?}."]
    return [text.removeprefix(opened.strip()) if opened else text for text in texts]


def compare_with_transformers(cfg: Config, task: Task) -> list[Check]:
    """Check that prompts of the model's own template are those of transformers, if that is installed."""
    data, tokenizer = cfg.data, task.tokenizer
    if tokenizer.template is None or data.date:
        return []
    try:
        from transformers import AutoTokenizer  # slow to import, and no requirement of a run
    except ImportError:
        return []
    problem = task.problems[0]
    messages = as_messages(problem.messages or problem.question, data.system_prompt)
    theirs = AutoTokenizer.from_pretrained(task.source).apply_chat_template(
        messages, chat_template=tokenizer.own_template, add_generation_prompt=True, return_dict=False,
        **tokenizer.arguments)
    return [Check("prompts equal transformers'", tuple(theirs) == task.prompts[0].ids,
                  f"{len(theirs)} tokens there, {len(task.prompts[0].ids)} here",
                  "the folder asks for something that is read otherwise there; compare both, and report it")]


def check_verifier(problems: list[Problem]) -> Check:
    """Check that the verifier accepts gold solutions, or boxed gold answers if no solution marks one; only
    problems that have an answer are tried."""
    tried = [*islice((problem for problem in problems if problem.answer), SOLUTIONS)]
    pairs = []
    for problem in tried:
        marked = extract(problem.solution) is not None
        pairs.append((problem.answer, problem.solution if marked else f"\\boxed{{{problem.answer}}}"))
    grades = grade(pairs)
    wrong = [p.id for p, graded in zip(tried, grades, strict=True) if graded["verdict"] != "right"]
    figures = f"{len(tried) - len(wrong)} of {len(tried)} gold solutions"
    if wrong:
        figures += f"; not {wrong[0]}"
    return Check("verifier accepts the gold", not wrong, figures,
                 "the answer of that line is not what its solution marks, or has a form that reward.py "
                 "cannot read; mend or remove the line")
