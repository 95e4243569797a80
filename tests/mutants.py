"""Do the tests of the mathematics bite? Break the code in one place at a time, and expect the named tests to go red.

    python tests/mutants.py             # all of them, in a copy of the repository
    python tests/mutants.py prune       # those of one file, by its path: leaves/critic/join
    python tests/mutants.py prune:keep  # of these, those that break a place with "keep" in it
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent

# file -> what stands there, the bug, and the tests that must see it: "nat" is test_nat.py in any folder of tests/
BUGS = {
    "advantage": [
        ("reward_NG.nanmean(dim=1, keepdim=True)", "reward_NG.nanmean(dim=0, keepdim=True)", "advantage"),
        ("(std_N1 + eps)", "std_N1", "advantage"),
        ("count_N1.to(reward_NG.dtype) / (count_N1 - 1).clamp(min=1)", "1", "advantage"),
        ("std(correction=correction) + eps", "std(correction=0) + eps", "advantage"),
        ("scale = adv_NG[~none_NG].std(", "scale = adv_NG.std(", "unbiased"),
        ("(count_N1 - correction).clamp(min=1)", "count_N1.clamp(min=1)", "advantage")],
    "prune": [
        ("argsort(dim=1, descending=True", "argsort(dim=1, descending=False", "prune"),
        ("torch.where(keep_NG, 1 / prob_NG, 0.0)", "keep_NG.to(prob_NG)", "unbiased"),
        ("uniform_NG < prob_NG", "uniform_NG > prob_NG", "unbiased"),
        ("places_K * sorted_K >= tail_K", "places_K * sorted_K >= 2 * tail_K", "prune"),
        ("(drop_prob * candidates_N1.double() + 1e-9)", "(drop_prob * candidates_N1.double())", "prune"),
        ("clamp(min=SIZE_FLOOR * mean)", "clamp(min=0)", "prune"),
        ("return n, positive_NG[n][g], candidates", "return n, candidates", "prune"),
        (".clamp(min=LEAST_SURPRISE)", "", "prune"),
        ("dtype=torch.float64)[s.scored]", "dtype=torch.float64)", "prune"),
        ("keep * len(adv_NG) // len(of_part)", "keep", "prune"),
        ("1 - drop_prob * small_NG", "1 - drop_prob * ~small_NG", "prune"),
        ("memory.skipped_K >= max_skips", "memory.skipped_K > max_skips", "prune"),
        ("easy ** easy_K, hard", "hard ** easy_K, hard", "prune"),
        ("size_S.clamp(min=floor * size_S.mean())", "size_S", "prune"),
        ("share * len(size_S)", "share * len(size_K)", "prune"),
        ("for i in (m, *range(m)) if m else ():", "for i in range(m) if m else ():", "prune"),
        ("order[len(order) - m + i:]", "order[i:m]", "prune"),
        ("x_NG[groups].masked_fill(~keep_NG, torch.nan)", "x_NG[groups]", "prune"),
        ("before_N = sorted_N.cumsum(0) - sorted_N", "before_N = sorted_N.cumsum(0)", "prune"),
        ("1 / prob_L[prob_L > point]", "torch.ones_like(prob_L[prob_L > point])", "nat"),
        ("torch.arange(length, 0, -1", "torch.arange(length - 1, -1, -1", "nat"),
        ("adv_NG.nan_to_num().abs() * candidates.weight_N1", "adv_NG.nan_to_num().abs()", "prune"),
        ("return floored_NG.masked_fill(none_NG, 0.0)", "return floored_NG", "unbiased"),
        (".masked_fill(adv_NG.isnan(), 0.0)", "", "unbiased")],
    "loss": [
        ("(adv_C > 0) & (ratio_C > 1", "(adv_C < 0) & (ratio_C > 1", "loss"),
        ('"sequence": len_NG.clamp(min=1) * items', '"sequence": len_NG.double().mean() * items', "loss"),
        ("d_C.exp() - d_C - 1", "d_C.exp() + d_C - 1", "loss"),
        ("return pruned.weight_NG /", "return kept_NG /", "loss"),
        ("loss.kl * (weight_C * ratio_C * k3_C).sum()", "loss.kl * (ratio_C * k3_C).mean()", "invariance"),
        ("gap_C.exp().clamp(max=cap)", "gap_C.exp()", "objectives"),
        ("(ratio_S <= mask_ratio) & (ratio_S * mask_ratio >= 1)", "(ratio_S <= mask_ratio)", "loop"),
        ("else offered * len_NG.shape[1] -", "else len_NG.numel() -", "unbiased"),
        ("(logp_C - old_C).exp() if loss.kl_corrected else 1", "1", "objectives"),
        ("row.bonus_C * factor_C * entropy_C", "row.bonus_C * entropy_C.detach()", "objectives"),
        ("counted_NG = correct_NG & pruned.keep_NG if denominator", "counted_NG = correct_NG if denominator", "loss"),
        ("ratio_C.clamp(1 - settings.low, 1 +", "ratio_C.clamp(0, 1 +", "loss"),
        ('moved_C.abs() if settings.sides == "both" else', "moved_C.abs() if True else", "loss"),
        ("(kl_C > settings.divergence) & ((new_C - old_C) * logps.adv_C > 0)", "kl_C > settings.divergence", "loss"),
        ("pull_C + row.likelihood_C * factor_C", "pull_C", "objectives"),
        ("weight_C = row.weight_C * factor_C", "weight_C = row.weight_C", "loop"),
        ("row.segment_C, loss.tis_cap, loss.mask_ratio)", "row.segment_C, None, None)", "objectives")],
    "pack": [
        ("x_NG[n_C, g_C] * factor_C", "x_NG[n_C, g_C] * plan.counts", "nat"),
        ("capacity - group.prompt):", "capacity):", "pack"), ("rows, high = shorter, middle", "high = middle", "pack"),
        ("completion if n == before else keys[-1]", "keys[-1]", "pack"),
        ("        before[0] = prompt_start + len(prompt) - 1\n", "", "pack"),
        ("before[0] = prompt_start + len(prompt) - 1", "before[0] = prompt_start + len(prompt)", "objectives"),
        ("prompt_start, group = end, n", "prompt_start, group = 0, n", "pack"),
        ("np.arange(start - 1, end - 1)", "np.arange(start, end)", "pack")],
    "update": [
        ("factors = weigh(rows, [given.old_logp_C for given in prepared], entropy, learner.loss)",
         "factors = [None] * len(rows)", "objectives"),
        ("factor_C, = weigh([row], [logp_C.detach()], [entropy_C], learner.loss)", "factor_C = None", "objectives"),
        ("if prepared.old_logp_C is None and unmoved:", "if True:", "invariance"),
        ("len_NG = lengths(groups,",
         "len_NG = lengths(cut_completions(groups, [batch.tokens[n] for n in members]),", "nat"),
        ("learner.seed, step, batch.offered,", "learner.seed, step, len(batch.groups),", "loop"),
        ('pruned, "token", loss.denominator, learner',
         "pruned, loss.normalize, loss.denominator, learner", "objectives"),
        (" * ~batch.reward_NG[members].isnan()", "", "unbiased"),
        ("taken % len(minibatches)", "taken % len(parts)", "unbiased"),
        ("extra and later", "False", "unbiased")],
    "collect": [
        ('dist.seed_for(seed, epoch, "epoch") if epoch', "seed if epoch", "collect"),
        ('dist.seed_for(seed, "tokens")', "seed", "nat"),
        ("torch.where(pruned.keep_NG, own_NG, adv_NG)", "own_NG", "prune"),
        ("drawn.weight_NG * weight_N1 * scored_NG", "drawn.weight_NG * scored_NG", "unbiased"),
        ("drawn.prob_NG * prob_N1", "drawn.prob_NG", "collect")],
    "learner": [
        ("rate * group.get(\"lr_scale\", 1.0)", "rate", "loop"),
        ("    model.zero_grad()\n    return norm", "    return norm", "loop")],
    "records": [
        ("in self.weights.items() if weight]", "in self.weights.items()]", "unbiased"),
        ("total_NG.round(decimals=12)", "total_NG", "advantage")],
    "history": [
        ("1.0 if self.adapts else 1 / prob", "1.0", "data"),
        ('seed_for(self.seed, epoch, prompt.id, "prompt")', 'seed_for(self.seed, epoch, "prompt")', "data"),
        ("adv_NG.abs().nanmean(dim=1)", "adv_NG.nanmean(dim=1)", "data")],
    "leaves/preferences/join": [
        ("[:, :, None] > reward_NG", "[:, :, None] >= reward_NG", "preference"),
        ("pull_NGG.sum(dim=2) - pull_NGG.sum(dim=1)", "pull_NGG.sum(dim=2)", "preference"),
        ("(-beta / count_N1 *", "(-beta *", "objectives")],
    "leaves/critic/join": [
        ("keep_NG * weight_N1", "keep_NG * 1.0", "critic"),
        ("(value_C - target_C).square()).sum() / 2", "(value_C - target_C).square()).sum()", "critic"),
        ("[row.predict_C, last_S]", "[row.predict_C, last_S - 1]", "objectives"),
        ('if settings.bootstrap == "prev" else after_S', "", "objectives"),
        ("return value_C + gae(", "return gae(", "critic")],
    "leaves/windows/join": [
        ("return places[places >= first]", "return places", "window"),
        ("draw.age >= self.settings.max_age", "draw.age > self.settings.max_age", "flight"),
        ("sampling.prompts_per_step - skipped", "sampling.prompts_per_step", "flight"),
        ("replace(piece, fresh_from=piece.length, ", "replace(piece, ", "flight"),
        ("draw.age + 1 + i // N", "draw.age + i // N", "flight")],
    "leaves/environment/join": [
        ("sum(to - start for start, to in self.replies)", "0", "replies"),
        ("own[start:to] = False", "own[start:to] = True", "replies"),
        ("(length + start, length + to)", "(start, to)", "replies"), ("if reply[1] < first.length", "", "replies"),
        ('len(piece.replies), "turn")', '0, "turn")', "environment"),
        ("- len(request.tokens_before)", "- len(request.tokens_before) + 1", "environment"),
        ("last = len(whole.replies) + 1 >=", "last = len(whole.replies) >=", "environment"),
        ("replies=((0, len(ids)),)", "replies=((1, len(ids)),)", "environment"),
        ("dist.max_over_ranks(len(going_on)) if self.lock_step else going_on", "going_on", "environment"),
        ("finished=False, cut=True", "cut=True", "environment")],
    "leaves/critic/gae": [
        ("same_segment = segment_C[m:] == segment_C[:-m]", "same_segment = segment_C[m:] >= 0", "gae"),
        ("lam_C[:-m] ** m * total_C[m:]", "lam_C[:-m] * total_C[m:]", "gae"),
        ("torch.where(last_C, end_S[segment_C], value_C.roll(-1))", "value_C.roll(-1)", "gae")]}
MUTANTS = [(file, *bug) for file, bugs in BUGS.items() for bug in bugs]


def passes(folder: Path, tests: str) -> bool:
    path, = folder.rglob(f"test_{tests}.py")  # in verify/tests too
    marks = "not (gpu or vllm or peers or page or house)"  # the slow ones too
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-n", "0", "-m", marks, str(path)]
    try:
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600,
                             env=os.environ | {"OMP_NUM_THREADS": "1"})
    except subprocess.TimeoutExpired:
        return False  # a bug that hangs the tests is noticed
    assert run.returncode in (0, 1), run.stdout + run.stderr
    return run.returncode == 0


def survives(folder: Path, file: str, old: str, new: str, tests: str) -> bool:
    path = folder / f"{file}.py"
    text = path.read_text()
    path.write_text(text.replace(old, new))
    try:
        return passes(folder, tests)
    finally:
        path.write_text(text)


def asked_for(mutant: tuple[str, str, str, str], text: str) -> bool:
    file, _, part = text.partition(":")
    return mutant[0] == file and part in mutant[1]


def main() -> None:
    chosen = [m for m in MUTANTS if len(sys.argv) < 2 or any(asked_for(m, text) for text in sys.argv[1:])]
    for file, old, _, _ in MUTANTS:
        count = (ROOT / f"{file}.py").read_text().count(old)
        assert count == 1, f"{file}.py holds {old!r} {count} times"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "copy"
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".venv*", ".git", "runs", "__pycache__"))
        for tests in sorted({m[3] for m in chosen}):
            assert passes(folder, tests), f"test_{tests}.py is red without any bug"
        alive = []
        for i, mutant in enumerate(chosen, start=1):
            alive += [mutant] if survives(folder, *mutant) else []
            verdict = "SURVIVED" if mutant in alive else "caught"
            print(f"{i}/{len(chosen)} {mutant[0]}.py {mutant[2]!r}: {verdict}", flush=True)
    print(f"{len(chosen) - len(alive)} of {len(chosen)} bugs caught")
    sys.exit(bool(alive))


if __name__ == "__main__":
    main()
