"""Do the tests bite? Break the code in one place at a time and expect the named test file to go red.

    python tests/mutants.py             # all of them, in a copy of the repository
    python tests/mutants.py rollout     # those of one file
    .venv-vllm/bin/python tests/mutants.py   # those that need vLLM, after `make test-vllm`
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent

# (file, what stands there, the bug, the tests that must see it)
MUTANTS = [
    ("model", "torch.cat([-right, left]", "torch.cat([right, left]", "model"),
    ("model", "rotate(self.q_norm(q),", "rotate(q,", "model"),
    ("model", "bias=shape.out_bias", "bias=False", "model"),
    ("model", "blend * freq + (1 - blend) * freq / factor", "blend * freq / factor + (1 - blend) * freq", "model"),
    ("model", "scale = (grad / ctx.temperature)", "scale = grad", "model"),
    ("model", "grad_head_VD += grad_logits_CV.T", "grad_head_VD = grad_logits_CV.T", "model"),
    ("model", "is_causal=True, enable_gqa", "is_causal=False, enable_gqa", "model"),
    ("model", "if model.shape.tied:\n        tensors.pop", "if False:\n        tensors.pop", "model"),
    ("rollout", "<= self.used_S[:, None]", "< self.used_S[:, None]", "rollout"),
    ("rollout", "[prompts[i][-1] for i in samples]", "[prompts[i][0] for i in samples]", "rollout"),
    ("rollout", "logits_SV / (temperature or 1.0)", "logits_SV", "rollout"),
    ("rollout", "sorted_SV.cumsum(dim=-1) - sorted_SV >= top_p", "sorted_SV.cumsum(dim=-1) >= top_p", "rollout"),
    ("rollout", "torch.isin(self.token_S, eos)", "self.token_S == eos[0]", "rollout"),
    ("rollout", "self.used_S = self.used_S[slots]", "self.used_S = self.used_S[:len(slots)]", "rollout"),
    ("rollout", "mine.copy_(dist.full(theirs))", "pass", "rollout"),
    ("rollout", "uniforms(seeds[i],", "uniforms(seeds[0],", "rollout"),
    ("pack", "[end - 1 for end in starts[1:]]", "[end for end in starts[1:]]", "pack"),
    ("pack", "(fitting & -fitting).bit_length()", "fitting.bit_length()", "pack"),
    ("pack", "weight_C=per_token(weight_NG) * plan.counts", "weight_C=per_token(weight_NG)", "pack"),
    ("pack", "torch.cat([torch.arange(length) for length in lengths])", "torch.arange(sum(lengths))", "pack"),
    ("loss", "(adv_C > 0) & (ratio_C > 1 + high)", "(adv_C < 0) & (ratio_C > 1 + high)", "loss"),
    ("loss", "(adv_C < 0) & (ratio_C < 1 - low)", "(ratio_C < 1 - low)", "loss"),
    ("loss", '"sequence": len_NG * items', '"sequence": len_NG.double().mean() * items', "loss"),
    ("loss", "d_C.exp() - d_C - 1", "d_C.exp() + d_C - 1", "loss"),
    ("loss", "items.clamp(min=1), tokens.clamp(min=1)", "items, tokens", "loss"),
    ("advantage", "reward_NG.mean(dim=1", "reward_NG.mean(dim=0", "advantage"),
    ("advantage", "torch.where(flat(reward_NG)[:, None], 0.0, reward_NG -", "(reward_NG -", "advantage"),
    ("prune", "argsort(dim=1, descending=True", "argsort(dim=1, descending=False", "prune"),
    ("prune", "torch.where(keep_NG, 1 / prob_NG, 0.0)", "keep_NG.to(prob_NG)", "unbiased"),
    ("prune", "uniform_NG < prob_NG", "uniform_NG > prob_NG", "unbiased"),
    ("prune", "left_K * sorted_K >= rest_K", "left_K * sorted_K >= 2 * rest_K", "prune"),
    ("prune", "int(drop_prob * G + 1e-9)", "int(drop_prob * G)", "prune"),
    ("prune", "clamp(min=FLOOR * mean)", "clamp(min=0)", "prune"),
    ("prune", "torch.randperm(len(row), generator=generator)", "torch.arange(len(row))", "prune"),
    ("collect", 'dist.seed_for(cfg.seed, step, "prune")', 'dist.seed_for(cfg.seed, "prune")', "loop"),
    ("collect", "(cfg.loss.kl or cfg.loss.likelihood", "(cfg.loss.likelihood", "loop"),
    ("prune", "keep if scope == \"group\" else keep * len(adv_NG)", "keep", "prune"),
    ("reward", 'text.rpartition("####")', 'text.partition("####")', "reward"),
    ("reward", "if start > found[0]", "if found[0] < 0", "reward"),
    ("data", "range(place, place + count)", "range(place + 1, place + 1 + count)", "data"),
    ("data", '.split("\\n"), start=1', ".splitlines(), start=1", "data"),
    ("data", 'for name in ("config.json", "generation_config.json")', 'for name in ("config.json",)', "rollout"),
    ("config", "if key not in hints:", "if False:", "config"),
    ("checkpoint", "(optimizer.state[p] if optimizer else {})", "{}", "checkpoint"),
    ("checkpoint", "fresh.rename(folder / name)", "shutil.copytree(fresh, folder / name)", "checkpoint"),
    ("checkpoint", "dcp.load(state, checkpoint_id=path)", "pass", "checkpoint"),
    ("checkpoint", "if path.name <= name][:-keep]", "][:-keep]", "checkpoint"),
    ("checkpoint", "json.loads(listed.read_text()) == sizes(path)", "True", "checkpoint"),
    ("checkpoint", "named is None or path.name <= named", "True", "checkpoint"),
    ("checkpoint", "                copy.result()", "                pass", "checkpoint"),
    ("checkpoint", "written.result()", "pass", "checkpoint"),
    ("checkpoint", "shutil.rmtree(leftover) if leftover.is_dir()", "None if leftover.is_dir()", "checkpoint"),
    ("dist", "module.set_gradient_divide_factor(1.0)", "pass", "invariance"),
    ("dist", "reshard_after_forward=True", "reshard_after_forward=False", "loop"),
    ("dist", "param_dtype=dtype", "param_dtype=None", "loop"),
    ("dist", "part[:count] for part, count", "part for part, count", "exchange"),
    ("exchange", "dict.fromkeys(hands[target])", "hands[target]", "exchange"),
    ("exchange", "sum(lengths) <= limit", "sum(lengths) < limit", "exchange"),
    ("exchange", "owners[g] == source", "owners[g] >= source", "exchange"),
    ("runfolder", "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB", "train"),
    ("train", "empty_model(source, torch.promote_types(dtype, torch.float32))", "empty_model(source, dtype)", "loop"),
    ("train", "error.errno not in NOT_WRITABLE", "True", "train"),
    ("train", "checkpoints.wait_for_copies()", "pass", "train"),
    ("runfolder", 'line["step"] <= step', 'line["step"] < step', "train"),
    ("train", "engine.sync(learner.policy)\n            write_down", "pass\n            write_down", "train"),
    ("update", 'opt.lr * (step + 1) / opt.warmup_steps', 'opt.lr * step / opt.warmup_steps', "train"),
    ("update", 'group["lr"] = learning_rate(step - begun, cfg.optim, cfg.steps - begun)', "pass", "train"),
    ("update", "model.parameters(), clip_norm)", "model.parameters(), 1.0)", "train"),
    ("update", "len(batches) > 1 and cfg", "False and cfg", "train"),
    ("model", "if self.checkpoint_blocks and", "if False and", "model"),
    ("update", "range(cfg.update.epochs)", "range(1)", "loop"),
    ("update", "in minibatches(step, cfg, batch.offered)]", "in minibatches(step, cfg, batch.offered)[:1]]", "loop"),
    ("update", "batch.adv_NG[members]", "batch.adv_NG[:len(members)]", "loop"),
    ("train", "load_sharded(cfg, source, dtype, device).requires_grad_(False) if", "policy if", "loop"),
    ("update", "k3(logp_C, ref_C)", "k3(logp_C, before_C)", "loop"),
    ("loss", "settings.clip_high, settings.dual_clip),", "settings.clip_high, None),", "loop"),
    ("update", "first_pass=epoch == 0", "first_pass=True", "loop"),
    ("collect", "part_R.view(-1, G) for", "part_R.view(G, -1).T for", "loop"),
    ("data", "seed_for(seed, epoch, prompt_id, g,", "seed_for(seed, prompt_id, g,", "loop"),
    ("collect", "decode(sample.ids), request.turn", "decode([*request.turn.prompt.ids, *sample.ids]), request.turn",
     "loop"),
    ("update", "if dist.max_over_ranks(not finite) or", "if", "loop"),
    ("train", "if stopping or due(", "if due(", "train"),
    ("train", "monotonic() > self.since + 1", "True", "train"),
    ("pack", "zip(order[start:start + ranks], by_sum", "zip(order[start:start + ranks], hands", "pack"),
    ("collect", "pruning.prompts, cfg.seed, count)", "pruning.prompts, 0, count)", "loop"),
    ("metrics", 'total["k3"] / seen', 'total["k3"] / tokens', "loop"),
    ("metrics", "not s.finished", "s.finished", "metrics"),
    ("metrics", "dist.max_over_ranks(float(self.mismatch_max))", "float(self.mismatch_max)", "metrics"),
    ("runfolder", "first, last = evals[0], evals[-1]", "first, last = evals[-1], evals[-1]", "metrics"),
    ("model", ' or raw.get("rope_theta")', "", "model"),
    ("model", 'norm_eps=raw["rms_norm_eps"]', "norm_eps=1e-6", "model"),
    ("model", '(".json", ".jinja", ', '(".json", ', "model"),
    ("advantage", "(std_N1 + eps)", "std_N1", "advantage"),
    ("loss", "return pruned.weight_NG /", "return kept_NG /", "loss"),
    ("reward", "tags[-1]", "tags[0]", "reward"),
    ("data", "add_generation_prompt=generate, **self.special", "add_generation_prompt=generate", "data"),
    ("eval", 'dist.seed_for(seed, p.id, "eval")', 'dist.seed_for(seed, "eval")', "eval"),
    ("update", "if before_B[i] is None and unmoved:", "if True:", "invariance"),
    ("update", "cfg.loss.kl * (weight_C * k3_C).sum()", "cfg.loss.kl * k3_C.mean()", "invariance"),
    ("update", "row.predict_C, row.target_C,", "row.predict_C, row.target_C.flip(0),", "invariance"),
    ("data", "seed_for(seed, epoch, prompt_id, g,", "seed_for(seed, epoch, prompt_id,", "invariance"),
    ("dist", "zip(parts, counts, strict=True)]", "zip(parts[::-1], counts[::-1], strict=True)]", "exchange"),
    ("eval", "sum(r[\"correct\"] for r in responses)", "len(responses)", "eval"),
    ("loss", "gap_C.exp().clamp(max=cap)", "gap_C.exp()", "loss"),
    ("loss", "(ratio_S <= mask_ratio) & (ratio_S * mask_ratio >= 1)", "(ratio_S <= mask_ratio)", "loss"),
    ("loss", "(old_logp_C - engine_logp_C).detach()", "(old_logp_C - engine_logp_C)", "loss"),
    ("pack", "self.offsets, right=True) - 1", "self.offsets, right=False) - 1", "loop"),
    ("update", "weight_C = row.weight_C * correction_C", "weight_C = row.weight_C", "loop"),
    ("update", 'row.sampled_logp_C if cfg.loss.old_logp == "engine" else before_C', "before_C", "loop"),
    ("update", "unmoved=not norms", "unmoved=True", "loop"),
    ("metrics", "(gap_C.exp() - gap_C - 1)", "gap_C.square()", "loop"),
    ("metrics", "(compared * total[", "(tokens * total[", "loop"),
    ("train", "engine.sleep()", "pass", "loop"),
    ("preflight", "scale(policy, 2.0)", "pass", "preflight"),
    ("preflight", "fresh <= tolerance < stale", "True", "preflight"),
    ("preflight", "trained_C - scored_C", "scored_C - scored_C", "preflight"),
    ("preflight", "alone_C - scored_C", "scored_C - scored_C", "preflight"),
    ("preflight", "dist.rank() * COPIES + g)", "dist.rank() * COPIES)", "preflight"),
    ("preflight", "closing is None or closing in ids", "True", "preflight"),
    ("preflight", "max(ids) < policy.shape.vocab_size", "True", "preflight"),
    ("preflight", "if not accuracy(text, p.answer)", "if accuracy(text, p.answer) is None", "preflight"),
    ("preflight", "model.zero_grad()", "pass", "preflight"),
    ("data", "if not self.decode([i])", "if True", "data"),
    ("prune", "1 - drop_prob * small_NG", "1 - drop_prob * ~small_NG", "prune"),
    ("prune", "memory.size_K < memory.mean * SLACK", "memory.size_K < memory.mean / SLACK", "prune"),
    ("prune", "memory.size_K.isnan() | (memory.skipped_K", "(memory.skipped_K", "prune"),
    ("prune", "memory.skipped_K >= max_skips", "memory.skipped_K > max_skips", "prune"),
    ("prune", "int(drop_prob * len(order_K) + 1e-9)", "int(drop_prob * len(order_K)) + 1", "prune"),
    ("prune", "easy ** memory.easy_K, hard", "hard ** memory.easy_K, hard", "prune"),
    ("prune", ".clamp(min=0.01)", "", "prune"),
    ("prune", "target * 2 / 3", "target / 3", "prune"),
    ("prune", "if share >= limit", "if share <= limit", "prune"),
    ("prune", "1.25 * missing / (1 - flat)", "1.25 * missing * (1 - flat)", "prune"),
    ("prune", "wanted <= most", "False", "prune"),
    ("data", "if pruning.kind in REFILLING else 1 / prob", "", "data"),
    ("data", 'seed_for(seed, epoch, prompt.id, "prompt")', 'seed_for(seed, epoch, "prompt")', "data"),
    ("data", "self.place += missing", "self.place += count", "data"),
    ("data", "skipped=visit.skipped + 1", "skipped=1", "data"),
    ("data", "easy + 1 if is_easy else 0", "easy + 1", "data"),
    ("data", "times + 1)", "1)", "data"),
    ("data", "return flat_N & high_N, flat_N & ~high_N", "return flat_N & ~high_N, flat_N & high_N", "data"),
    ("prune", "offer.adv_NG.abs() * offer.weight_N1", "offer.adv_NG.abs()", "prune"),
    ("data", '"explore": self.explore,', '"explore": (0.5, 0.5),', "data"),
    ("data", "adv_NG.abs().mean(dim=1)", "adv_NG.mean(dim=1)", "data"),
    ("collect", "left_NG = weight_N1 *", "left_NG = torch.ones_like(weight_N1) *", "unbiased"),
    ("collect", "[i for i, turn in enumerate(rolled.turns) if turn.kept], len(rolled.turns)",
     "list(range(len(rolled.groups))), len(rolled.groups)", "unbiased"),
    ("collect", "pruned.prob_NG * prob_N1", "pruned.prob_NG", "collect"),
    ("collect", ".tolist()[:cfg.rollout.prompts_per_step]", ".tolist()", "collect"),
    ("collect", "slots, offered = list(range(len(groups))), len(groups)", "pass", "collect"),
    ("collect", "if missing == 0 or last or", "if missing == 0 or", "collect"),
    ("collect", " and rolled.turns[-1].epoch > 0", "", "collect"),
    ("collect", "1 - informative(newest, cfg)", "1 - informative(rolled, cfg)", "collect"),
    ("collect", "step < cfg.steps - cfg.prune", "step <= cfg.steps - cfg.prune", "collect"),
    ("collect", 'pruning.completions.kind if groups else "none"', "pruning.completions.kind", "collect"),
    ("collect", "len(batch.groups[n].prompt.ids) + ", "", "collect"),
    ("update", "if norm > 0:", "if True:", "collect"),
    ("update", "torch.randperm(offered, generator", "torch.randperm(len(cfg.out), generator", "collect"),
    ("loss", "torch.tensor(offered * len_NG.shape[1])", "torch.tensor(len_NG.numel())", "unbiased"),
    ("train", 'history.restore(saved["history"], prompts)', "pass", "train"),
    ("runfolder", ', "decisions.jsonl")', ")", "train"),
    ("metrics", "batch.turns, batch.slots,", "batch.turns, range(len(batch.turns)),", "collect"),
    ("pack", "bisect_right(longest, (room, 1))", "bisect_right(longest, (room, -10**9))", "pack"),
    ("pack", "next(iter(oldest))", "next(reversed(oldest))", "pack"),
    ("pack", "window - len(oldest)", "window + 1 - len(oldest)", "pack"),
    ("report", "min(run.spent[kind][-1] for run in runs)", "max(run.spent[kind][-1] for run in runs)", "report"),
    ("report", 'step["step"] <= e["step"]', 'step["step"] < e["step"]', "report"),
    ("report", "if group[0].settings == run.settings", "if group", "report"),
    ("advantage", "centred(reward_NG) * (G / (G - 1))", "centred(reward_NG)", "advantage"),
    ("advantage", "return adv_NG / (adv_NG.std(correction=0) + eps) if adv_NG.any() else adv_NG", "return adv_NG",
     "objectives"),
    ("advantage", "reward_NK.new_tensor(reward_NK.shape[1]).log()", "0", "advantage"),
    ("advantage", "same = segment_C[m:] == segment_C[:-m]", "same = segment_C[m:] >= 0", "advantage"),
    ("advantage", "lam_C[:-m] ** m * total_C[m:]", "lam_C[:-m] * total_C[m:]", "advantage"),
    ("advantage", "torch.where(last_C, end_S[segment_C], value_C.roll(-1))", "value_C.roll(-1)", "advantage"),
    ("advantage", "1 - 1 / (alpha * length_S)", "1 - alpha / length_S", "advantage"),
    ("advantage", ".clamp(min=lowest)", "", "advantage"),
    ("loss", '"constant": max_len * items, "sum": items}', '"constant": max_len * items, "sum": tokens}', "loss"),
    ("loss", "pruned.weight_NG * correct_NG /", "pruned.weight_NG /", "loss"),
    ("loss", "counted_NG = correct_NG & pruned.keep_NG if count", "counted_NG = correct_NG if count", "loss"),
    ("loss", "(counted_NG * len_NG).sum().clamp(min=1)", "(counted_NG * len_NG).sum()", "loss"),
    ("loss", "segment_sum(x_C, segment_C) / segment_C.bincount()", "segment_sum(x_C, segment_C) / len(x_C)", "loss"),
    ("loss", ".exp().clamp(1 - low, 1 + high)", ".exp().clamp(max=1 + high)", "loss"),
    ("loss", "(new_C - old_C) * move.adv_C.sign() > divergence", "(new_C - old_C).abs() > divergence", "loss"),
    ("loss", "(kl_C > divergence) & ((new_C - old_C) * move.adv_C > 0)", "kl_C > divergence", "loss"),
    ("loss", "((old_C, new_C), (1 - old_C, 1 - new_C))", "((new_C, old_C), (1 - new_C, 1 - old_C))", "loss"),
    ("loss", ".detach().exp().clamp(max=cap))", ".detach().exp())", "loss"),
    ("loss", "2 * beta * (adv_C - beta * ratio_S[segment_C])", "beta * (adv_C - beta * ratio_S[segment_C])", "loss"),
    ("loss", "(value_C - target_C).square()).sum() / 2", "(value_C - target_C).square()).sum()", "loss"),
    ("reward", "(longest - cache - tokens) / cache", "(longest - tokens) / cache", "reward"),
    ("reward", "(-weight, 0.0) if name in LENGTH", "(0.0, weight) if name in LENGTH", "reward"),
    ("pack", "joined([s.ids[s.start:] for s in samples])", "joined([s.ids[:s.fresh] for s in samples])", "window"),
    ("pack", "torch.arange(end - s.fresh, end)", "torch.arange(end - s.fresh + 1, end + 1)", "pack"),
    ("pack", "is None else likelihood_NG) * plan.counts", "is None else likelihood_NG)", "invariance"),
    ("model", "predict_C: Tensor) -> Tensor:\n        \"\"\"[C] values", "predict_C: Tensor) -> Tensor:\n        "
     "predict_C = predict_C + 1\n        \"\"\"[C] values", "critic"),
    ("model", "return self.low + (self.high - self.low) * x_C.sigmoid()", "return self.high * x_C.sigmoid()", "critic"),
    ("model", "return (self.low + self.high) / 2 + x_C", "return x_C", "critic"),
    ("update", "torch.cat([row.predict_C, row.offsets[1:] - 1])", "torch.cat([row.predict_C, row.offsets[1:] - 2])",
     "objectives"),
    ("update", "torch.where(row.pending_S, cut_S,", "torch.where(row.pending_S & False, cut_S,", "objectives"),
    ("update", 'value_C[last_S] if adv.bootstrap == "prev" else after_S', "value_C[last_S]", "objectives"),
    ("update", "learning_rate(step - begun, cfg.optim, cfg.steps - begun)", "learning_rate(step, cfg.optim, cfg.steps)",
     "critic"),
    ("update", "row.likelihood_C * correction_C) * logp_C", "0 * correction_C) * logp_C", "objectives"),
    ("critic", "return replace(sample, start=0) if", "return sample if", "window"),
    ("critic", "done_NG = ~pending(", "done_NG = 1 > 0 * pending(", "window"),
    ("critic", "/ tokens\n", "\n", "critic"),
    ("critic", "return value_C + gae(", "return gae(", "critic"),
    ("critic", "if len(part_K)]", "]", "critic"),
    ("critic", "count < cfg.critic.min_samples", "count < 1", "critic"),
    ("metrics", "1 - left / spread", "left / spread", "critic"),
    ("collect", "dist.seed_for(self.seed, self.begun.length) if self.begun else self.seed", "self.seed", "window"),
    ("collect", "(*self.turn.prompt.ids, *self.begun.ids) if", "self.turn.prompt.ids if", "window"),
    ("collect", "return min(roll.window or left, left)", "return roll.window or left", "window"),
    ("collect", "- len(begun)) // G)", ") // G)", "window"),
    ("collect", "dict.fromkeys(weights, 0.0) if sample.pending else", "", "window"),
    ("collect", "not piece.finished and done < cfg", "not piece.finished and done <= cfg", "window"),
    ("collect", "or cfg.loss.likelihood or", "or", "collect"),
    ("collect", 'or cfg.advantage.kind == "gae")', ")", "collect"),
    ("collect", "dtype=torch.bool).view(-1, G) | pending(groups, G)", "dtype=torch.bool).view(-1, G)", "window"),
    ("collect", 'rolled.reward_NG if cfg.rollout.differ_in == "reward"', "rolled.reward_NG if True", "collect"),
    ("collect", 'by_text if cfg.rollout.differ_in == "reward" else {"accuracy": 1.0}', "by_text", "collect"),
    ("update", "if not cfg.loss.kl:", "if ref_C is None:", "loop"),
    ("collect", "int(cfg.rollout.oversample * N)", "N", "collect"),
    ("collect", "if prompt.id not in known]", "]", "collect"),
    ("runfolder", "    rewrite(path, lines)\n    return lines", "    return lines", "collect"),
    ("data", '"pool": [(turn.epoch, turn.prompt.id, turn.copy,', '"pool": [(turn.epoch, turn.prompt.id, 0,', "data"),
    ("train", "begun = pretrained(cfg, step + 1, measured) if begun is None else begun", "pass", "critic"),
    ("train", "explained >= cfg.critic.pretrain_until", "False", "critic"),
    ("train", "for name, role in found.items() if role[0]}", 'for name, role in found.items() if name == "policy"}',
     "train"),
    ("sample", "finished, len(self.ids), pending)", "finished, 0, pending)", "window"),
    ("rollout", "self.step_S == self.limit_N[self.owner_S]", "self.step_S == self.ids_NM.shape[1]", "window"),
    ("rollout", "found[-1].append(i)", "found[-1].insert(0, i)", "window"),
    # In the environment of `make test-vllm` alone.
    ("rollout", "if not self.llm.reset_prefix_cache():", "if False:", "vllm"),
    ("rollout", "processed_logprobs", "raw_logprobs", "vllm"),
    ("rollout", "stop_token_ids=sorted(self.eos_ids)", "stop_token_ids=[min(self.eos_ids)]", "vllm"),
    ("rollout", "self.params(seed=seed,", "self.params(seed=0,", "vllm"),
    ("rollout", "if given != self.expected:", "if False:", "vllm"),
    ("rollout", "layers.dispatch_cpu_unquantized_gemm =", "layers.nobody_calls_this =", "vllm"),
    ("rollout", "random.setstate(python)", "pass", "vllm"),
    ("rollout", "np.random.set_state(array)", "pass", "vllm"),
    ("rollout", "os.environ.clear()", "pass", "vllm"),
]


def passes(folder: Path, tests: list[str]) -> bool:
    marked = ["-m", "vllm"] if tests[0].startswith("vllm") else []
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", *marked,
               *(f"tests/test_{name}.py" for name in tests)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=env, timeout=600)
    except subprocess.TimeoutExpired:
        return False  # a bug that hangs the suite is noticed
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.returncode == 0


def survives(folder: Path, file: str, old: str, new: str, tests: str) -> bool:
    path = folder / f"{file}.py"
    text = path.read_text()
    path.write_text(text.replace(old, new))
    try:
        return passes(folder, [tests])
    finally:
        path.write_text(text)


def main() -> None:
    with_vllm = importlib.util.find_spec("vllm") is not None
    here = [m for m in MUTANTS if m[3].startswith("vllm") == with_vllm]
    chosen = [m for m in here if len(sys.argv) < 2 or m[0] in sys.argv[1:]]
    for file, old, _, _ in MUTANTS:
        count = (ROOT / f"{file}.py").read_text().count(old)
        assert count == 1, f"{file}.py holds {old!r} {count} times"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "copy"
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".venv*", ".git", "runs", "__pycache__"))
        for tests in sorted({m[3] for m in chosen}):
            assert passes(folder, [tests]), f"test_{tests}.py is red without any bug"
        alive = []
        for i, mutant in enumerate(chosen, start=1):
            alive += [mutant] if survives(folder, *mutant) else []
            verdict = "SURVIVED" if mutant in alive else "caught"
            print(f"{i}/{len(chosen)} {mutant[0]}.py {mutant[2]!r}: {verdict}", flush=True)
    print(f"{len(chosen) - len(alive)} of {len(chosen)} bugs caught")
    sys.exit(bool(alive))


if __name__ == "__main__":
    main()
