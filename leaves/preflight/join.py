"""Check before a run what would spoil it, measured on the loaded models: `train.py --check` prints the table.

A fresh run makes the same checks silently before step 0, and stops if one fails. All ranks take part and
come to the same verdicts. The policy ends as it was; the engine needs another sync.

Dimension key:  C completion tokens of this rank's rows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from collect import Sampler
from config import NEED_ANSWER, Config, Reward
from data import Task, Tokenizer
from infra import dist
from infra.checks import Check, Ready
from infra.tokenizer import as_messages
from learner import Learner
from model import Decoder
from pack import Minibatch
from records import Problem, PromptDraw, Row, Sample
from reward import COMPONENTS, list_components, score
from verify.extract import extract
from verify.grade import grade

# Prompts that are tried, samples of each, and tokens of a sample.
PROBES, SAMPLES, NEW_TOKENS = 4, 4, 32
SOLUTIONS = 64  # gold solutions that the verifier is tried on


def before_run(_: Config, ready: Ready) -> Ready:
    """Add all checks, on the training prompts and their problems."""
    cfg, policy, task = ready.cfg, ready.learner.policy, ready.task
    half = ready.learner.dtype == torch.bfloat16
    with changed(policy):
        before, _ = compare_log_probs(ready)
        ready.engine.sleep()
    after, ratio = compare_log_probs(ready)
    most, most_ratio = (0.1, 0.02) if half else (1e-3, 1e-5)
    gap = "|log-prob difference| mean"
    checks = (
        Check("engine's log-probs", max(before, after) <= most,
              f"{gap} {after:.1e}, with other weights {before:.1e} (at most {most:g})",
              "the engine samples from another policy than the one trained: look for weights or a cached "
              "prefix left stale by a sync, another dtype or version of vllm, attention that leaks between "
              "the sequences of a row (model.attention=sdpa), rotary scaling or quantised weights; "
              "loss.tis_cap corrects a small gap"),
        Check("ratio is 1 before the update", ratio <= most_ratio,
              f"{gap} {ratio:.1e} (at most {most_ratio:g})",
              "a pass with gradient differs from one without: try other model.checkpoint_blocks or "
              "model.attention"),
        check_ends(task.tokenizer, policy.shape.vocab_size),
        check_template(task.tokenizer, cfg.data.system_prompt),
        check_verifier(task.problems),
        check_rewards(cfg.reward, task)
    )
    return replace(ready, checks=ready.checks + checks)


# ---- log-probs of the engine and of the trainer

@contextmanager
@torch.no_grad()
def changed(policy: Decoder) -> Iterator[None]:
    """Change the policy for a while. Halving is exact in floating point, reaches every weight, and leaves a
    flatter, tamer model; adapters (leaves/lora), which add nothing at first, get something to add."""
    adapters = {p: p.clone() for name, p in policy.named_parameters() if name.endswith("lora_B")}
    for p in policy.parameters():
        p.mul_(0.5)
    for p in adapters:
        p.add_(0.01)
    yield
    for p in policy.parameters():
        p.mul_(2.0)
    for p, before in adapters.items():
        p.copy_(before)


def compare_log_probs(ready: Ready) -> tuple[float, float]:
    """Sample the longest prompts from the policy: only they show stale cached prefixes. Returns the mean
    difference of the trainer's log-probs without gradient to the engine's, and to those with gradient."""
    cfg, learner, task = ready.cfg, ready.learner, ready.task
    ready.engine.sync(learner.policy)
    probes = sorted(task.prompts, key=lambda prompt: len(prompt.ids))[-PROBES:]
    G = max(SAMPLES, dist.world_size())  # so that no rank is without any
    limit = min(NEW_TOKENS, cfg.rollout.max_new_tokens)
    sampling = replace(cfg.rollout, group_size=G, max_new_tokens=limit)
    sampler = Sampler(ready.engine, task.tokenizer, sampling, cfg.reward, cfg.seed)
    groups = sampler.rollout([PromptDraw(prompt, epoch=0) for prompt in probes])
    ones_NG = torch.ones(len(groups), len(groups[0].samples), dtype=torch.float64)
    rows = learner.rows(Minibatch(groups, ones_NG.bool(), ones_NG, ones_NG, ones_NG))
    with torch.no_grad():
        trainer_C = pass_rows(learner, rows)
    engine_C = torch.cat([row.sampled_logp_C for row in rows])
    return mean_gap(engine_C, trainer_C), mean_gap(pass_rows(learner, rows).detach(), trainer_C)


def pass_rows(learner: Learner, rows: list[Row]) -> Tensor:
    return torch.cat([learner.log_probs(learner.policy, row) for row in rows])


def mean_gap(one_C: Tensor, other_C: Tensor) -> float:
    """Compute the mean |difference| over the tokens of all ranks."""
    gap_C = (one_C - other_C).abs().double()
    total = dist.sum_over_ranks({"sum": gap_C.sum(), "count": len(gap_C)})
    return total["sum"] / total["count"]


# ---- the other checks

def check_ends(tokenizer: Tokenizer, vocab_size: int) -> Check:
    """Check that the EOS ids of the model's files are in the vocabulary, and what the template writes."""
    ids, closing, name_token = tokenizer.eos_ids, tokenizer.closing_token(), tokenizer.rust.id_to_token
    named = ", ".join(f"{i} {name_token(i)!r}" for i in sorted(ids))
    closes = "no token of its own" if closing is None else repr(name_token(closing))
    return Check("ends of an answer", max(ids) < vocab_size and closing in (None, *ids),
                 f"{named}; the template closes an answer with {closes}",
                 "name every closing token in generation_config.json's eos_token_id, within the model's "
                 "vocabulary; one that is missing is never learnt as an end")


def check_template(tokenizer: Tokenizer, system: str | None) -> Check:
    """Check that the chat template ends a prompt with the opening of an answer."""
    messages = as_messages("1 + 1?", system)
    without, text = (tokenizer.conversation(messages, opens) for opens in (False, True))
    opening = text.removeprefix(without)
    return Check("chat template opens the answer", text.startswith(without) and opening != "", repr(opening),
                 "the template ignores add_generation_prompt, so the model would continue the question; "
                 "take the template of an instruct model")


def check_verifier(problems: list[Problem]) -> Check:
    """Check that the verifier accepts gold solutions, or boxed gold answers if no solution marks one."""
    tried = with_answers(problems)
    texts = [p.solution if extract(p.solution) is not None else f"\\boxed{{{p.answer}}}" for p in tried]
    grades = grade([(p.answer, text) for p, text in zip(tried, texts, strict=True)])
    wrong = [p.id for p, graded in zip(tried, grades, strict=True) if graded["verdict"] != "right"]
    figures = f"{len(tried) - len(wrong)} of {len(tried)} gold solutions"
    if wrong:
        figures += f"; not {wrong[0]}"
    return Check("verifier accepts the gold", not wrong, figures,
                 "the answer of that line is not what its solution marks, or has a form that reward.py "
                 "cannot read; mend or remove the line")


def with_answers(problems: list[Problem]) -> list[Problem]:
    """Return the first problems that have an answer."""
    return [problem for problem in problems if problem.answer][:SOLUTIONS]


def check_rewards(settings: Reward, task: Task) -> Check:
    """Check that some completion, as the tokenizer writes and reads it, has the best value of each built-in
    component with a weight."""
    tokenizer, built_in = task.tokenizer, replace(settings, custom=None, custom_file=None)
    answered = with_answers(task.problems)
    missing = {name for name in built_in.weights if answered or name not in NEED_ANSWER}
    best = {name: COMPONENTS[name][2 if built_in.weights[name] > 0 else 1] for name in missing}
    for problem in answered or task.problems[:1]:
        forged = tokenizer.encode(forge(problem.answer, tokenizer.opened))
        samples = [Sample(ids, [0.0] * len(ids), finished=True) for ids in forged]
        rows = score([(tokenizer.read(sample), problem, 1) for sample in samples],
                     2 * (settings.overlong_tokens or 1), built_in, task.graded)
        reached = dict(zip(list_components(built_in, task.graded), zip(*rows, strict=True), strict=True))
        missing -= {name for name in missing if best[name] in reached[name]}
        if not missing:
            break
    return Check("good answers are rewarded", not missing,
                 f"{', '.join(sorted(missing)) or 'no component'} out of reach",
                 "no completion can be rewarded: the tokenizer cannot write or read the marks, or the gold "
                 "answers are of another kind; choose another component of reward, or another tokenizer")


def forge(gold: str, opened: str) -> list[str]:
    """Write completions with the marks that built-in rewards look for, right ones and a wrong one."""
    thought = "<think>\nIt is so.\n</think>\n"
    texts = [f"{thought}<answer>{gold}</answer>", f"So \\boxed{{{gold}}}.", "So \\boxed{?}."]
    return [text.removeprefix(opened.strip()) for text in texts]
