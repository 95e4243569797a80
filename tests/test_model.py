"""Our decoder's log-probs and entropies against the dense formula, its attention against a mask."""

import pytest
import torch
from conftest import attention_by_mask, load, unshared, write_tiny
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

import model as decoder
from config import ConfigError
from infra.device import choose_backend
from infra.export import export
from records import Segments


def test_an_export_keeps_every_file_and_the_dtype(tmp_path):
    source = write_tiny(tmp_path / "a", torch_dtype="bfloat16")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    export(load(source), source, tmp_path / "b")
    names = {path.name for path in source.iterdir()}  # and the digests of all of them
    assert names | {"files.json"} == {path.name for path in (tmp_path / "b").iterdir()}
    assert {t.dtype for t in load_file(tmp_path / "b" / "model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.parametrize("chunk", [1, 5, 23, 100])
def test_log_probs_and_entropies_with_their_gradients_equal_the_dense_formula(chunk, tiny):
    """At a temperature other than 1, for a gradient that differs from token to token: both at once, or log-probs."""
    generator, head_VD = torch.Generator().manual_seed(0), load(tiny, torch.float64).head_VD
    hidden_CD = torch.randn(23, 32, dtype=torch.float64, generator=generator, requires_grad=True)
    target_C = torch.randint(len(head_VD), (23,), generator=generator)
    grad_C2 = torch.randn(23, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    dense_CV = (hidden_CD @ head_VD.T / 0.7).log_softmax(-1)
    dense_C2 = torch.stack([dense_CV.gather(1, target_C[:, None])[:, 0], -(dense_CV.exp() * dense_CV).sum(-1)], dim=1)
    for elementwise, columns in ((decoder.WITH_ENTROPY, slice(None)), (load(tiny).elementwise, 0)):
        dense, grad = dense_C2[:, columns], grad_C2[:, columns]
        expected = torch.autograd.grad(dense, (hidden_CD, head_VD), grad, retain_graph=True)
        out = decoder.ChunkedLogProb.apply(hidden_CD, head_VD, target_C, 0.7, chunk, elementwise)
        torch.testing.assert_close(out, dense)
        torch.testing.assert_close(torch.autograd.grad(out, (hidden_CD, head_VD), grad), expected)


class Watch(TorchDispatchMode):
    """The tensors that operations make: the numbers of the largest, and the most bytes that are alive at a time."""

    def __init__(self):
        super().__init__()
        self.largest = self.most = 0
        self.alive: dict[int, tuple] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in filter(torch.is_tensor, torch.utils._pytree.tree_leaves(out)):
            self.largest, storage = max(self.largest, x.numel()), x.untyped_storage()
            self.alive[storage.data_ptr()] = torch.multiprocessing.reductions.StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, sum(size for ref, size in self.alive.values() if not ref.expired()))
        return out


def test_no_more_is_held_for_entropies_than_is_counted():
    """Three tensors of a chunk's logits in float32, here the whole of it: what leaves/fit/counts.py has."""
    with_entropy, gradient = decoder.WITH_ENTROPY
    with Watch() as watch:
        logits_CV, target_C = torch.randn(64, 5000), torch.zeros(64, dtype=torch.long)
        out_C2 = with_entropy(logits_CV, target_C)
        gradient(logits_CV, target_C, out_C2, torch.ones(64, 2))
    assert 2.5 < watch.most / logits_CV.untyped_storage().nbytes() < 3.1


def test_log_probs_never_hold_all_logits(tiny):
    """The largest tensor that forward or backward makes is one chunk of logits or the head's gradient."""
    model = load(tiny)
    hidden_CD = torch.randn(400, 32, requires_grad=True)
    target_C = torch.zeros(400, dtype=torch.long)
    with Watch() as watch:
        logp_C = decoder.ChunkedLogProb.apply(hidden_CD, model.head_VD, target_C, 1.0, 16, model.elementwise)
        logp_C.sum().backward()
    assert watch.largest == model.shape.vocab_size * 32  # the head itself; all logits would be 400 x vocabulary


def shared(groups: list[tuple[int, list[int]]], device: str = "cpu") -> Segments:
    """Segments of groups (tokens of a prompt, those of each completion behind it) that lie one behind the other."""
    queries, keys, key_K, end = [], [], [], 0
    for prompt, completions in groups:
        first = end
        for completion in completions:
            own = completion + (prompt if end == first else 0)
            prefix = range(first, first + prompt + completion - own)
            key_K += [*prefix, *range(end, end + own)]
            queries.append(own)
            keys.append(prompt + completion)
            end += own
    return Segments.of(queries, keys, torch.tensor(key_K, device=device))


SEGMENTS = {
    "no prefix": unshared([3, 1, 17, 9]),
    "one token": unshared([1]),
    "a group": shared([(5, [4, 9, 3])]),
    "prompts of different lengths": shared([(1, [6, 2]), (20, [3, 5, 4]), (7, [2, 8])]),
    "lengths far apart": shared([(4, [1, 70, 1, 2, 33])]),
    "tokens of one": shared([(1, [1, 1, 1]), (1, [1])]),
    "alone and in groups": shared([(2, [7]), (3, [5, 5, 1]), (9, [1]), (6, [8, 4, 9])]),
    "a prompt alone in front": Segments.of((4, 3, 2), (4, 7, 6), torch.tensor([*range(4), *range(7), *range(4), 7, 8])),
    "a prefix that lies apart": Segments.of((2, 3, 2), (2, 3, 4), torch.tensor([0, 1, 2, 3, 4, 0, 1, 5, 6]))}


def reference_kernel(q, k, v, first_query, first_key, longest_query, longest_key, window_size) -> torch.Tensor:
    """What the varlen kernels are said to compute: query i of a segment sees the keys from i + shift - window_size[0]
    to i + shift + window_size[1], with shift = keys - queries; -1 has no end."""
    outs = []
    for query, key in zip(first_query.tolist()[:-1], first_key.tolist()[:-1], strict=True):
        i = first_query.tolist().index(query)
        queries, keys = (int(first[i + 1] - first[i]) for first in (first_query, first_key))
        assert queries <= longest_query and keys <= longest_key
        back_QK = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
        before, behind = window_size
        seen_QK = (back_QK >= -behind) & (back_QK <= (before if before >= 0 else keys))
        mine, others, values = (x[start:start + count].transpose(0, 1) for x, start, count in (
            (q, query, queries), (k, key, keys), (v, key, keys)))
        out = torch.nn.functional.scaled_dot_product_attention(mine, others, values, seen_QK, enable_gqa=True)
        outs.append(out.transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize(("heads", "window"), [
    ((4, 2), None), ((4, 4), None), ((6, 1), None), ((4, 2), 1), ((4, 2), 6)])
@pytest.mark.parametrize("name", SEGMENTS)
def test_padded_attention_equals_an_explicit_mask_in_value_and_gradient(name, heads, window):
    """With key heads that several query heads share, and without; a kernel gets the window that the mask has."""
    segments, generator = SEGMENTS[name], torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(sum(segments.queries), count, 8, dtype=torch.float64, generator=generator)
                     for count in (heads[0], heads[1], heads[1], heads[0]))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    outs = [decoder.sdpa_padded(segments)(0, *inputs, window), attention_by_mask(*inputs, segments, window)]
    torch.testing.assert_close(*outs, rtol=0, atol=1e-12)
    by_kernel = decoder.attend_by_kernel(segments, reference_kernel)(0, *inputs, window)
    torch.testing.assert_close(by_kernel, outs[1], rtol=0, atol=1e-12)
    for ours, expected in zip(*(torch.autograd.grad(out, inputs, grad) for out in outs), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


def test_padding_is_of_like_lengths():
    """Short completions behind a prefix are not padded to the longest: at most half of a batch's queries are."""
    sizes, true = [], decoder.F.scaled_dot_product_attention

    def watch(q, *rest, **named):
        sizes.append(q.shape[0] * q.shape[2])
        return true(q, *rest, **named)

    segments = shared([(3, [600, *[2, 3] * 20, 500])])
    q = torch.zeros(sum(segments.queries), 1, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder.F, "scaled_dot_product_attention", watch)
        decoder.sdpa_padded(segments)(0, q, q, q, None)
    assert sum(sizes) < 2 * len(q)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["varlen", "flash"])
@pytest.mark.parametrize("window", [None, 1, 20, 64])
@pytest.mark.parametrize("kind", ["alone", "shared"])
def test_cuda_backends_agree_with_padded_attention(kind, window, backend):
    try:
        choose_backend(backend, torch.device("cuda"), torch.bfloat16)
    except ConfigError as error:
        pytest.skip(str(error))
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, grad = (torch.randn(300, heads, 64, dtype=torch.bfloat16, device="cuda", generator=generator)
                     for heads in (4, 2, 2, 4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    segments = {"alone": unshared([30, 10, 170, 90], torch.device("cuda")),
                "shared": shared([(1, [6, 2]), (60, [1, 100, 30]), (40, [60])], "cuda")}[kind]
    outs = [decoder.BACKENDS[name](segments)(0, *inputs, window) for name in (backend, "sdpa")]
    torch.testing.assert_close(*outs, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(*(torch.autograd.grad(out, inputs, grad) for out in outs), rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_of_halves_is_not_rounded_to_halves(dtype):
    """Rounded, logits of size 30 would be off by 0.1, and log-probs with them."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(n, m, generator=generator).to(dtype) for n, m in ((40, 200), (200, 30)))
    exact = left.double() @ right.double()
    assert exact.abs().max() > 30
    made = decoder.matmul_float32(left, right)
    assert made.dtype == torch.float32
    torch.testing.assert_close(made.double(), exact, rtol=0, atol=1e-4)
    onto = torch.ones(40, 30)
    decoder.matmul_float32(left, right, onto=onto)  # in place, as gradients of chunks add up
    torch.testing.assert_close(onto.double(), exact + 1, rtol=0, atol=1e-4)


def test_log_probs_of_halves_are_as_exact_as_float32_and_so_is_a_likely_tokens_gradient():
    """The gradient of a token of probability 1 - 2^-12 would be 0 as a difference of halves, and is 2^-12."""
    head_VD = torch.tensor([[8.3125], [0.0]], dtype=torch.bfloat16)
    hidden_CD = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    target_C, elementwise = torch.zeros(1, dtype=torch.long), (decoder.log_prob, decoder.logits_gradient)
    logp_C = decoder.ChunkedLogProb.apply(hidden_CD, head_VD, target_C, 1.0, 8, elementwise)
    exact = torch.tensor([8.3125, 0], dtype=torch.float64).log_softmax(0)[0]
    assert logp_C.dtype == torch.float32 and abs(logp_C.item() - exact) < 1e-7
    logp_C.sum().backward()
    expected = -exact.expm1() * 8.3125
    assert hidden_CD.grad.dtype == torch.bfloat16 and abs(hidden_CD.grad.item() / expected - 1) < 2**-7


class Products(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.products = self.others = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        product = func.name().partition(".")[0] in ("aten::mm", "aten::addmm")
        self.products, self.others = self.products + product, self.others + (not product)
        return func(*args, **(kwargs or {}))


def test_recomputed_blocks_have_the_same_gradient_and_selective_ones_no_product_twice(tiny):
    """Of a block 7 products forward and 14 backward; "all" computes those again that backward needs: not the last."""
    gradients, counted = {}, {}
    for how in decoder.BLOCK_CALLS:
        model = load(tiny).requires_grad_(True)
        model.checkpoint_blocks = how
        with Products() as count:
            model.hidden(torch.arange(5), torch.arange(5), decoder.sdpa_padded(unshared([5]))).sum().backward()
        gradients[how] = [p.grad for p in model.parameters() if p.grad is not None]
        counted[how] = count.products, count.others
    for how in ("selective", "all"):
        for ours, expected in zip(gradients[how], gradients["none"], strict=True):
            assert torch.equal(ours, expected)
    assert counted["none"][0] == counted["selective"][0] == 2 * 21 and counted["all"][0] == 2 * 27
    assert counted["none"][1] < counted["selective"][1]


@pytest.mark.slow
def test_compiled_passes_take_rows_of_many_lengths_in_few_compilations(tmp_path):
    """20 lengths of rows, with gradients, and one pass without. By inductor, so it needs a C++ compiler."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    folder = write_tiny(tmp_path, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96)
    eager, fused = (load(folder).requires_grad_(True) for _ in range(2))
    fused.compile_passes()
    compiled = []
    generator = torch.Generator().manual_seed(0)
    for tokens in torch.randint(40, 400, (20,), generator=generator).tolist():
        lengths = [tokens // 2, tokens - tokens // 2]
        ids_T, grad_C = torch.randint(eager.shape.vocab_size, (tokens,), generator=generator), torch.randn(tokens - 7)
        predict_C = torch.arange(tokens - 7)
        given = (ids_T, torch.cat([torch.arange(n) for n in lengths]), decoder.sdpa_padded(unshared(lengths)),
                 predict_C, ids_T[1:tokens - 6], 0.7)
        logps = [model(*given) for model in (eager, fused)]
        torch.testing.assert_close(*logps, rtol=0, atol=1e-4)
        torch.autograd.grad(logps[1], list(fused.parameters()), grad_C)
        compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    with torch.no_grad():
        torch.testing.assert_close(eager(*given), fused(*given), rtol=0, atol=1e-4)
    compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    print(f"{compiled} compilations by row, the last without gradient")
    assert max(compiled[:-1]) <= 4  # before attention, behind it, and the head forward and backward
    assert compiled[-1] <= 6        # the first two once more


def test_rope_survives_a_cast_of_the_model(tiny):
    """Frequencies rounded to bfloat16 would turn far positions by radians."""
    queries = {}
    for dtype in (torch.float32, torch.bfloat16):
        def attend(layer, q, k, v, window, dtype=dtype):
            queries.setdefault(dtype, q.float())
            return v.repeat_interleave(2, 1)
        with torch.no_grad():
            load(tiny, dtype).hidden(torch.tensor([7, 7]), torch.tensor([0, 3001]), attend)
    torch.testing.assert_close(queries[torch.bfloat16], queries[torch.float32], rtol=0.02, atol=0.05)
