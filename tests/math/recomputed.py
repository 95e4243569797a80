"""Compute the entries of experiments/atlas.py a second time: numpy alone, formulas from the papers, none of its code.

A set of steps is a dict: c chances [S], q prompts [S, N], i completions [S, N, G], t are there, w weights [S, N, 1]."""
import itertools

import numpy as np

TH, AWAY = np.array([0.3, -0.2, 0.4]), np.array([-0.9, 0.8, -0.6])
OWN = np.array([[0.5, 0.2, -0.4], [-0.9, 0.6, 0.7]])
COMP = np.array([[[1, 0, 1, 0], [1, 1, 0, 0]], [[0, 0, 1, 0], [1, 1, 0, 0]]], float)
TURNS = np.array([[[1, 1, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 0, 0]], [[1, 0, 0, 0, 1, 1, 0], [0, 1, 0, 1, 0, 0, 1.]]])
PATHS = {"unequal": [[(0, 0)], [(0, 1), (1, 0)], [(0, 1), (1, 1), (2, 0)], [(0, 1), (1, 1), (2, 1)]],
         "equal": [[(0, 1), (1, 1)], [(0, 1), (1, 0)], [(0, 0), (2, 1)], [(0, 0), (2, 0)]],
         "turns": [[(0, 1), (0, 1), (2, 1)], [(0, 1), (0, 1), (2, 0)], [(0, 1), (0, 0)], [(0, 0), (0, 1), (2, 1)],
                   [(0, 0), (0, 1), (2, 0)], [(0, 0), (0, 0), (1, 1)], [(0, 0), (0, 0), (1, 0)]]}
TRAINED = np.array([[.5, .8, .4, 1]] * 2)
GO = {"aborted": np.array([[1, .4, .4, .4], [1, .7, .7, .7]]), "threshold": np.array([[1, 0, 0, 0], [1, 1, 1, 1.]]),
      "drawn": np.array([[.3, .5, .9, .6]] * 2) * TRAINED}
SKIPS = {"bernoulli": [(1, 1), (.5, 2)], "pps": [(.8, 1.25), (.4, 2.5)], "rank": [(1, 1), (0, 0)]}

def policy(paths, logit_QP):
    lp, sc = (np.zeros((len(logit_QP), len(paths), 3, *more)) for more in ((), (3,)))
    for k, path in enumerate(paths):
        for t, (prefix, choice) in enumerate(path):
            p = 1 / (1 + np.exp(-logit_QP[:, prefix]))
            lp[:, k, t], sc[:, k, t, prefix] = np.log(p if choice else 1 - p), choice - p
    return lp, sc

class World:
    def __init__(self, lengths="unequal", prompts=(0, 1), graded=True, size=3):
        own, self.size, turns = OWN[list(prompts)], size, lengths == "turns"
        self.lp, self.sc = policy(PATHS[lengths], TH + own)
        self.comp = (TURNS if turns else COMP[:, list(prompts)])[0 if graded else 1:]
        self.old = {name: policy(PATHS[lengths], TH + far * AWAY + own)[0] for name, far in (("near", .5), ("far", 2))}
        if turns:
            self.lp[..., 1] = np.log([.7, .7, .3, .4, .4, .6, .6])
        self.r, self.len = self.comp.mean(0), np.array([len(p) for p in PATHS[lengths]])
        self.full = (self.sc * np.array([1, not turns, 1])[:, None]).sum(2)
        self.p, self.there = np.exp(self.lp.sum(2)), np.arange(3) < self.len[:, None]
        self.target = ((self.p * self.r)[..., None] * self.full).sum(1).mean(0)

    def group(self, q, p, size, width):
        i = np.array([*itertools.product(range(len(self.len)), repeat=size)])
        t = np.broadcast_to(np.arange(width) < size, (len(i), width))
        places = {"q": np.full((len(i), 1), q), "i": np.pad(i, ((0, 0), (0, width - size)))[:, None], "t": t[:, None]}
        return places | {"c": p[q][i].prod(1), "w": np.ones((len(i), 1, 1))}

    def steps(self, rule="all", p=None):
        sizes = [(2, 4), (4, 4)] if rule == "ragged" else [(self.size, self.size)] * len(self.r)
        groups = [self.group(q, self.p if p is None else p, *of) for q, of in enumerate(sizes)]
        if "refill" in rule:
            groups = [take(g, np.ptp(look(g, self.r), axis=2)[:, 0] > 0) for g in groups]
            groups = groups if "same" in rule else [join(groups)] * len(groups)
            groups = [g | {"c": g["c"] / g["c"].sum()} for g in groups]
        if rule in SKIPS:
            groups = [join([g | {"c": g["c"] * p, "w": g["w"] * w}, g | {"c": g["c"] * (1 - p), "w": 0 * g["w"]}])
                      for g, (p, w) in zip(groups, SKIPS[rule], strict=True)]
        groups = [survive(g, GO[rule]) if rule in GO else g for g in groups]
        return groups[0] if len(groups) == 1 else cross(*groups)
def take(g, keep):
    return {x: v[keep] for x, v in g.items()}
def join(parts):
    return {x: np.concatenate([part[x] for part in parts]) for x in parts[0]}
def cross(a, b):
    i, j = np.divmod(np.arange(len(a["c"]) * len(b["c"])), len(b["c"]))
    return {"c": a["c"][i] * b["c"][j]} | {x: np.concatenate([a[x][i], b[x][j]], 1) for x in "qitw"}
def survive(g, go):
    p = look(g, go)
    parts = [g | {"c": g["c"] * np.where(bits, p, 1 - p).prod(2)[:, 0], "t": np.broadcast_to(bits, g["i"].shape)}
             for bits in itertools.product((True, False), repeat=p.shape[2])]
    return take(join(parts), join(parts)["c"] > 0)
def look(s, table):
    return table[s["q"][..., None], s["i"]]
def div(a, b):
    return np.where(b > 1e-12, a / np.where(b > 1e-12, b, 1), 0)
def total(x):
    return x.sum(2, keepdims=True)
def stats(s, grad, target):
    m = s["c"] @ grad
    scale = m @ target / (target @ target)
    size = abs(scale) * np.linalg.norm(target)
    return scale, np.linalg.norm(m - scale * target) / size, s["c"] @ ((grad - m) ** 2).sum(1) / size ** 2
def estimate(w, s, a, form="sum", kept=None, pull=None):
    """`a` is weight times advantage; the denominators are of all, or of those `kept`."""
    t = s["t"] if kept is None else kept
    tokens, items = ((t * w.len[s["i"]]).sum((1, 2), keepdims=True), t.sum((1, 2), keepdims=True))
    bottom = {"token": tokens, "sequence": items * w.len[s["i"]], "constant": 3 * items, "sum": items}[form]
    pulled = look(s, w.full) if pull is None else np.where((a > 0)[..., None], look(s, pull[0]), look(s, pull[1]))
    return stats(s, ((a * s["w"] / np.maximum(bottom, 1))[..., None] * pulled).sum((1, 2)), w.target)
def by_token(w, s, a, target=None):
    x = np.broadcast_to(a, (*s["i"].shape, 3)) / s["i"][0].size
    return stats(s, (x[..., None] * look(s, w.sc)).sum((1, 2, 3)), w.target if target is None else target)
def z(r, ddof=1):
    scaled = (r - total(r) / r.shape[2]) / (r.std(2, ddof=ddof, keepdims=True) + 1e-4)
    return np.where(np.ptp(r, axis=2, keepdims=True) > 0, scaled, 0)
def loo(r, t):
    n = total(t)
    return np.where(t & (n > 1), (r - div(total(r * t), n)) * n / np.maximum(n - 1, 1), 0)
def advantages(w, s, kind):
    r, m, v = look(s, w.r), look(s, w.r).mean(2), look(s, w.r).var(2) / 2
    if kind == "decoupled":
        a = sum(z(look(s, part)) for part in w.comp) / 2
        sd = a.reshape(len(a), -1).std(1, ddof=1)[:, None, None]
        return np.where(np.abs(a).max((1, 2), keepdims=True) > 0, a / (sd + 1e-4), 0)
    if kind == "shrinkage":  # of one other prompt: its noise v, and no spread
        lam = (v[:, ::-1] / np.maximum(v[:, ::-1], 1e-12) / 2)[..., None]
        return (1 - lam) * loo(r, s["t"]) + lam * (r - m[:, ::-1, None])
    return {"reward": r, "soft_value": r - (.5 * np.log(np.exp(w.r / .5).mean(1)))[s["q"]][..., None], "leave_one_out":
            loo(r, s["t"]), "centred": r - m[..., None], "group_norm": z(r), "group_norm, correction 0": z(r, 0)}[kind]
def trust(kind, new, old, sign):
    """What multiplies grad logp of each token of one completion with an advantage of this sign."""
    p, q, r, n = np.exp(new), np.exp(old), np.exp(new - old), np.sqrt(np.arange(1, len(new) + 1))
    so_far, mean, ones = r.cumprod(), np.exp((new - old).mean()), np.ones(len(r))
    kl = q * (old - new) + (1 - q) * np.log((1 - q + 1e-8) / (1 - p + 1e-8))
    beyond = (so_far > np.exp(.05 * n)) | (sign < 0) & (so_far < np.exp(-.025 * n))

    def clip(x, low, high):
        return np.where((sign > 0) & (x > high) | (sign < 0) & (x < low), 0, x)

    return {"none": ones, "clip": clip(r, .8, 1.2), "clip, high 0.28": clip(r, .8, 1.28),
            "clip_sequence": clip(mean * ones, 1 - 3e-4, 1 + 4e-4), "clamp": np.minimum(r, 1.2),
            "total_variation": np.where((p - q) * sign > .15, 0, np.minimum(r, 20)),
            "total_variation, both sides": np.where(np.abs(p - q) > .3, 0, r),
            "binary_kl": np.where((kl > .05) & ((p - q) * sign > 0), 0, np.minimum(r, 20)),
            "ratio of the completion": so_far[-1] * ones, "ratio of the tokens so far": so_far, "token ratio": r,
            "token ratio, at most 2": np.minimum(r, 2), "CTPO": np.where(beyond, 0, so_far),
            "CPPO of prefixes": np.where(np.abs(p - q).cumsum() / n ** 2 > .1, 0, r),
            "SAO": np.where((r > .7) & (r < 6), r, 0), "GSPO": clip(mean * ones, .8, 1.2)}[kind]
def stale(w, kind, behind, form="sum"):
    pull = [np.array([[trust(kind, w.lp[q, k, :n], w.old[behind][q, k, :n], sign) @ w.sc[q, k, :n]
                       for k, n in enumerate(w.len)] for q in range(2)]) for sign in (1, -1)]
    s = w.steps(p=np.exp(w.old[behind].sum(2)))
    return estimate(w, s, loo(look(s, w.r), s["t"]), form, pull=pull)
def baseline(w, name):
    """OTB, the step's mean, and aborts."""
    rule = "threshold" if "ESPO" in name else "all" if name[:3] in ("OTB", "mea", "bal") else "aborted"
    s = w.steps(rule)
    t, r = s["t"], look(s, w.r) * s["t"]
    if name[:3] == "OTB":
        e, r = look(s, (w.sc ** 2).sum(3).cumsum(2) * w.there), r[..., None]
        mine = (r * e, e) if "leave" in name else (0, 0)
        return by_token(w, s, r - div(total(r * e) - mine[0], total(e) - mine[1]))
    if "reward 0" in name:
        return by_token(w, s, (r - (total(r) - r) / 2)[..., None] * (t[..., None] | (np.arange(3) == 0)))
    if name[:3] == "mea":
        return by_token(w, s, (r - (r.sum((1, 2), keepdims=True) - r) / 5)[..., None])
    if "1/p" in name:
        x = t / look(s, GO["aborted"])
        own = total(x * r) - x * r
        base = own / 2 if name.endswith("others weighed 1/p") else div(own, total(x) - x)
        return by_token(w, s, (x * (r - (div(total(r), total(t)) if "plain" in name else base)))[..., None])
    if "balance" in name:
        least, right = np.minimum(total(r > .5), total(r <= .5)), r > .5
        t = np.where(right, right.cumsum(2), (~right).cumsum(2)) <= least
    a = t * (r - div(total(r * t), total(t))) / np.maximum(t.sum((1, 2), keepdims=True), 1)
    return by_token(w, s, 6 * a[..., None])
def recent(w, name):
    s = w.steps()
    r, m, lp = look(s, w.r), total(look(s, w.r)) / w.size, look(s, w.lp.sum(2))
    sd, zs, n = r.std(2, ddof=1, keepdims=True) + 1e-4, z(r), w.size
    q, p = np.exp(lp + zs), np.exp(lp)
    t = (r[..., :1] != r[..., 1:2]) | (np.arange(n) < 2)
    a = {"MC-GRPO": (r - np.sort(r)[..., (n - 1) // 2:][..., :1]) / sd, "MaxRL": div(r - m, m),
         "OAPL": r - .5 * np.log(total(np.exp(2 * r)) / n), "TPO": n * (q / total(q) - p / total(p)),
         "AERO": r - (total(r) + 1) / (n + 2), "HA-DW": zs * np.exp(-np.sign(zs) * (m - .5)),
         "Pilot-Commit": loo(r, t) * n / total(t)}[name]
    return by_token(w, s, a[..., None])
def distilled(w, name):
    """log teacher - log student of each token, and a target of its own."""
    gap = policy(PATHS["unequal"], TH + np.array([.8, -1.1, 1]) + OWN)[0] - w.lp
    p = np.exp(w.lp)
    q, gap = p * np.exp(gap), gap * w.there
    s = w.steps("drawn" if "drawn" in name else "all")
    a = gap + ("state" in name) * w.there * ((1 - p) * np.log((1 - p + ~w.there) / (1 - q + ~w.there)) - p * gap)
    far = (w.lp + gap < np.log(.3)) & w.there
    drifted = np.cumsum(far, 2) - far > 0
    unsure = -np.abs(p - .5)
    middle = np.sort(unsure[:, w.there].ravel())[(2 * w.there.sum() - 1) // 2] - 1e-12
    kept = {"the": np.arange(3) == 0, "up ": ~drifted, "tok": unsure >= middle}
    x = s["t"] / look(s, {"both chances": GO["drawn"], "y the second": TRAINED}.get(name[-12:], np.ones((2, 4))))
    target = ((w.p / 2)[..., None, None] * gap[..., None] * w.sc).sum((0, 1, 2))
    return by_token(w, s, x[..., None] * look(s, a * kept.get(name[:3], 1)), target)
def turns(w, name):
    s, (first, second) = w.steps(), w.comp / 2
    t = s["t"] if "dropped" not in name else w.len[s["i"]] == 3  # in the denominator, and trained on
    whole, one, two = (t / np.maximum(t.sum((1, 2), keepdims=True), 1) * t[0].size * (r - div(total(r) - r, w.size - 1))
                       for r in (look(s, w.r), look(s, first), look(s, second)))
    a = np.stack([one if "own" in name else whole, whole, two if "each" in name else whole], 3)
    return by_token(w, s, a * (np.array([1, 1, 1]) if "trained on" in name else np.array([1, 0, 1])))
