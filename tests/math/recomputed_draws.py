"""Compute the entries of pruners and of asynchrony a second time, as recomputed.py does the others: numpy alone."""
import itertools

import numpy as np
from recomputed import estimate, loo, look, stats, take, trust


def inclusion(size, count):
    p, free = np.zeros(len(size)), [*np.flatnonzero(size > 1e-12)]
    while len(free) > count and (sure := [i for i in free if count * size[i] >= size[free].sum() * (1 - 1e-14)]):
        p[first := max(sure, key=lambda i: size[i])], count = 1, count - 1
        free.remove(first)
    p[free] = 1 if len(free) <= count else count * size[free] / size[free].sum()
    return p
def comb(p, order):
    line = np.array([i for i in order if p[i] < 1], int)
    ends = np.cumsum(p[line])
    for a, b in itertools.pairwise(sorted({0.0, 1.0, *np.round(ends % 1, 14)})):
        hit = line[np.diff(np.ceil(ends - 1e-11 - (a + b) / 2), prepend=0.0) > 0]
        yield b - a, ((p >= 1) | np.isin(range(len(p)), hit)) / np.where(p > 0, p, 1)
def pps(a, i, whole, size):
    tokens = [(0,), (1, 0), (1, 1, 0), (1, 1, 1)]  # of completions; the end lies behind the token
    order = sorted(range(a.size), key=lambda x: (x // 3, a.flat[x] > 0, [-b for b in tokens[i.flat[x]]]))
    if whole:
        return [(c, x.reshape(a.shape)) for c, x in comb(inclusion(size.ravel(), 4), order)]
    both = [[*comb(inclusion(size[n], 2), [x - 3 * n for x in order if x // 3 == n])] for n in (0, 1)]
    return [(c * d, np.stack([x, y])) for c, x in both[0] for d, y in both[1]]
def largest(x, count):
    return np.argsort(np.argsort(-np.abs(x), axis=-1, kind="stable"), axis=-1) < count
def pods(r):
    order = [*np.argsort(-r, kind="stable")]
    ends = [order[:2], order[1:], [order[0], order[2]]]  # the first of the largest variance is kept
    return np.isin(range(3), max(ends, key=lambda e: round(r[e].var(), 9)))
def variance_share(r):
    v, low = r.var(1, ddof=1), r.var(1, ddof=1).argmin()
    kept = (v > 1e-9) & ((np.arange(2) != (low if v[0] != v[1] else 1)) | (v.max() < .7 * v.sum() - .01))
    return np.repeat(kept[:, None], 3, 1)
def bernoulli(a):
    p = np.where(np.abs(a) < np.abs(a).mean(1, keepdims=True) * (1 - 1e-5), .5, 1)
    for bits in itertools.product((True, False), repeat=a.size):
        keep = np.reshape(bits, a.shape)
        if (c := np.where(keep, p, 1 - p).prod()) > 0:
            yield c, keep / p
def pruned(w, kind, denominator="all"):
    surprise, q = np.sqrt(((1 - np.exp(w.lp)) ** 2 * w.there).sum(2)), np.arange(2)[:, None]
    by = {"surprise": surprise, "cost": np.ones((2, 1)) / np.sqrt(w.len)}.get(kind.split()[-1], np.ones((2, 4)))
    ways = {"topk": lambda a, r, i: [(1, largest(a, 2))], "bernoulli": lambda a, r, i: bernoulli(a),
            "topk of the step": lambda a, r, i: [(1, largest(a.ravel(), 4).reshape(a.shape))],
            "bottom": lambda a, r, i: [(1, largest(a, 1))], "none": lambda a, r, i: [(1, np.ones(a.shape))],
            "pods": lambda a, r, i: [(1, np.array([*map(pods, r)]))],
            "variance": lambda a, r, i: [(1, variance_share(r))]}
    way = ways.get(kind.split(",")[0], lambda a, r, i: pps(a, i, kind != "pps", np.abs(a) * by[q, i]))
    s = w.steps()
    a, r = loo(look(s, w.r), s["t"]), look(s, w.r)
    at, chance, x = zip(*((n, *drawn) for n in range(len(a)) for drawn in way(a[n], r[n], s["i"][n])), strict=True)
    a, s, x = a[[*at]], take(s, [*at]) | {"c": s["c"][[*at]] * chance}, np.array(x, float)
    a = loo(look(s, w.r), x > 0) if kind == "pods" else a
    return estimate(w, s, a * x, kept=(x > 0) if denominator == "kept" else None)
def flight(paths, logit_QP, reward_QK, away_P, policy):
    """The asynchrony of pairs (assets/draw_asynchrony.py): scale, bias and variance by correction."""
    at = [policy(paths, logit_QP + step / 3 * away_P) for step in range(4)]
    lengths, sc, runs = [len(path) for path in paths], at[0][1], {}
    p = np.exp(at[0][0].sum(2))
    target = ((p * reward_QK)[..., None] * sc.sum(2)).sum(1).mean(0)
    for q, late in itertools.product(range(len(logit_QP)), (0, 1)):
        logs = []  # of each completion: now, before the update, and by those who drew it, of both schedules
        for k, n in enumerate(lengths):
            steps = [[max(1, 3 - j - 3 * t // n) for t in range(n)] for j in (0, 1)]
            logs.append([at[0][0][q, k, :n], at[1][0][q, k, :n],
                         *(np.array([at[d][0][q, k, t] for t, d in enumerate(by)]) for by in steps)])
        drew = np.exp([log[2 + late].sum() for log in logs])
        pulls = [[{name: f @ sc[q, k, :lengths[k]] for name, f in weights(*log, late, sign).items()}
                  for k, log in enumerate(logs)] for sign in (1, -1)]
        for i, j in itertools.product(range(len(paths)), repeat=2):
            a, c = reward_QK[q, i] - reward_QK[q, j], drew[i] * drew[j] / len(logit_QP) / 2
            for name in pulls[0][0] if a else ():
                g = a / 2 * (pulls[int(a < 0)][i][name] - pulls[int(a > 0)][j][name])
                if "rate_by_ess" in name:
                    x = p[q, [i, j]] / drew[[i, j]]
                    g = g * np.sqrt(x.sum() ** 2 / 2 / (x ** 2).sum())
                runs.setdefault(name, []).append((c, g))
    equal = {name: (1 - sum(c for c, _ in of), 0 * target) for name, of in runs.items()}  # pairs without a gradient
    runs = {name: zip(*of, equal[name], strict=True) for name, of in runs.items()}
    return {name: stats({"c": np.array(c)}, np.array(g), target) for name, (c, g) in runs.items()}
def weights(now, before, first, second, late, sign):
    drew, old, ones = (first, second)[late], before - (first, second)[late], np.ones(len(now))
    whole, clip, own = np.exp((now - drew).sum()), trust("clip", now, before, sign), trust("clip", now, drew, sign)
    mixed = np.exp(now.sum()) / (np.exp(first.sum()) + np.exp(second.sum())) * 2
    ratio = np.exp(now - drew)
    return {"no correction": ones, "token ratio": ratio, "token ratio, at most 2 (TIS)": ratio.clip(max=2),
            "IPO: token ratio, or 0 at a distance": trust("total_variation, both sides", now, drew, sign),
            "GSPO: geometric mean of the ratios": trust("GSPO", now, drew, sign),
            "tokens so far": ratio.cumprod(),
            "whole completion, each token's own policy": whole * ones,
            "whole completion, at most 2": min(whole, 2) * ones,
            "whole completion, mixed policies (balance heuristic)": mixed * ones, "no setting: clip": clip,
            "update.rate_by_ess: true (VCPO)": clip,
            "loss.tis_cap: 2 (decoupled, AReaL)": clip * np.exp(old).clip(max=2),
            "loss.mask_ratio: 1.2": clip * (abs(old.mean()) <= np.log(1.2)), "loss.old_logp: engine": own,
            "loss.old_logp: engine, tis_cap: 2": own.clip(max=2)}
