"""Compare a model's folder with transformers: python tests/compare_logits.py FOLDER [float64 | float32 | bfloat16]

Two prompts with two or three completions each make one packed row. Prints the largest difference of logits and of
gradients, and the largest gradient; in float64 both differences should be below 1e-8.
"""

import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent))

from conftest import Doubled, make_groups

from model import BACKENDS, hf_name, load_model
from pack import Minibatch, Plan, build_row

COMPLETIONS = [[4, 9, 3], [6, 25]]


def compare(folder: Path, dtype: torch.dtype = torch.float64, prompts=(9, 5)) -> tuple[float, float, float]:
    """Return the largest difference of logits, that of gradients of weighed log-probs, and the largest gradient."""
    with Doubled() if dtype is torch.float64 else nullcontext():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
        ours = load_model(folder, dtype, torch.device("cpu")).requires_grad_(True)
        groups = make_groups(COMPLETIONS, list(prompts), vocab=min(400, ours.shape.vocab_size))
        members = [(n, g) for n, group in enumerate(groups) for g in range(len(group.samples))]
        zero_NG = torch.zeros(2, 3)
        row = build_row(Minibatch(groups, zero_NG == 0, zero_NG, zero_NG, zero_NG), Plan(members))
        weight_C = torch.randn(len(row.target_C), generator=torch.Generator().manual_seed(0), dtype=dtype)
        attend = BACKENDS["sdpa"](row.segments)
        logp_C = ours(row.ids_T, row.position_T, attend, row.predict_C, row.target_C, 1.0)
        (logp_C * weight_C).sum().backward()
        with torch.no_grad():
            logits_CV = ours.logits(ours.hidden(row.ids_T, row.position_T, attend)[row.predict_C])
        expected = []
        for group in groups:
            for sample in group.samples:
                ids = torch.tensor([[*group.prompt.ids, *sample.ids]])
                expected.append(theirs(ids).logits[0, len(group.prompt.ids) - 1:-1])
        expected_CV = torch.cat(expected)
        (expected_CV.log_softmax(-1).gather(1, row.target_C[:, None])[:, 0] * weight_C).sum().backward()
    grads = {hf_name(name): p.grad for name, p in ours.named_parameters()}
    other = {name: p.grad for name, p in theirs.named_parameters()}
    assert grads.keys() == other.keys()
    gaps = [float((grads[name] - other[name]).abs().max()) for name in grads]
    largest = max(float(grad.abs().max()) for grad in grads.values())
    return float((logits_CV - expected_CV).detach().abs().max()), max(gaps), largest


if __name__ == "__main__":
    kind = getattr(torch, sys.argv[2] if len(sys.argv) > 2 else "float64")
    print("logits {:.1e}, gradients {:.1e} of at most {:.1e}".format(*compare(Path(sys.argv[1]), kind)))
