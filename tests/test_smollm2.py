"""A model out of a GGUF file is the model that is in it, and the word problems that it learns on are sound."""

import re
from collections import Counter
from pathlib import Path

import gguf_model
import pytest
import smollm2
import smollm2_reward
import torch
import word_problems
from conftest import ROOT, others_slow
from safetensors.torch import load_file

import config
import train
from infra import runfolder
from infra.tokenizer import Tokenizer
from infra.weights import read_shape

TEMPLATE = ("{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>'"
            " + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def llama_cpp_order(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """What llama.cpp's converter does to q and k: rows 0, E/2, 1, E/2 + 1, ... of each head."""
    width = len(weight) // heads
    rows = [head * width + i + half for head in range(heads) for i in range(width // 2) for half in (0, width // 2)]
    return weight[rows]


def alphabet() -> list[str]:
    """The character that stands for each byte in a tokenizer of GPT-2's kind."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [*map(chr, shown), *(chr(256 + i) for i in range(len(hidden)))]


def write_file(gguf, path: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write a Llama of one block with tied embeddings."""
    merges = ["Ġ m", "o r", "Ġm or", "1 5"]  # the last is never used: single digits
    tokens = [*SPECIAL, *alphabet(), *(merge.replace(" ", "") for merge in merges)]
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in (("name", "A model"), ("block_count", 1), ("context_length", 512), ("embedding_length", 32),
                        ("head_count", 4), ("feed_forward_length", 64), ("head_count_kv", 2),
                        ("rope_dimension_count", 8), ("rope_freq_base", 5000.0), ("layer_norm_rms_eps", 1e-5),
                        ("vocab_size", len(tokens)), ("tokenizer_model", "gpt2"), ("tokenizer_pre", "smollm"),
                        ("token_list", tokens), ("token_types", [3] * 3 + [1] * (len(tokens) - 3)),
                        ("token_merges", merges), ("chat_template", TEMPLATE), ("unk_token_id", 0),
                        ("bos_token_id", 1), ("eos_token_id", 2), ("pad_token_id", 2)):
        getattr(writer, f"add_{name}")(value)
    for name, weight in weights.items():
        writer.add_tensor(f"{name}.weight", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.slow
def test_a_converted_folder_holds_the_weights_the_shape_and_the_tokenizer_of_the_file(tmp_path):
    gguf = pytest.importorskip("gguf", reason="needs gguf, of requirements/dev.txt")
    draw = torch.Generator().manual_seed(0)
    sizes = {"token_embd": (263, 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,),
             "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32),
             "blk.0.attn_output": (32, 32), "blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32),
             "blk.0.ffn_down": (32, 64)}
    weights = {name: torch.randn(*size, generator=draw) for name, size in sizes.items()}
    stored = weights | {f"blk.0.attn_{name}": llama_cpp_order(weights[f"blk.0.attn_{name}"], heads)
                        for name, heads in (("q", 4), ("k", 2))}
    write_file(gguf, tmp_path / "small.gguf", stored)
    folder = gguf_model.convert(tmp_path / "small.gguf", tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    assert len(tensors) == len(weights) and {t.dtype for t in tensors.values()} == {torch.float32}
    layer = "model.layers.0.self_attn"
    assert torch.equal(tensors[f"{layer}.q_proj.weight"], weights["blk.0.attn_q"])
    assert torch.equal(tensors[f"{layer}.k_proj.weight"], weights["blk.0.attn_k"])
    assert torch.equal(tensors["model.layers.0.mlp.down_proj.weight"], weights["blk.0.ffn_down"])
    shape = read_shape(folder)
    assert (shape.norm_eps, shape.ropes[0].rope_theta, shape.max_positions) == (1e-5, 5000, 512)
    tokenizer, text = Tokenizer(folder), "15 more, naïve\n"
    ids, = tokenizer.encode([text])
    assert tokenizer.decode(ids) == text
    assert [tokenizer.decode([i]) for i in ids[:4]] == ["1", "5", " mor", "e"]
    assert tokenizer.eos_ids == {2} and tokenizer.closing_token() == 2
    assert tokenizer.render("Q", None) == "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
    ids, = tokenizer.encode(["<|im_start|>user<|im_end|>"])
    assert (ids[0], ids[-1], len(ids)) == (1, 2, 6)


GAINED = re.compile(r"buys|gives [A-Z]\w+ \d|finds")
LOST = re.compile(r"gives \d|loses|sells")


def computed(question: str) -> tuple[int, ...]:
    """Read the arithmetic of a problem off its words: a product of two numbers or a start, then signed changes."""
    first, *changes, asks = re.findall(r"[^.?]+[.?]", question)
    factors = [int(n) for n in re.findall(r"\d+", first)]
    assert len(factors) == 1 + ("each" in first) and asks.endswith("?") and not re.search(r"\d", asks)
    signed = []
    for sentence in changes:
        number, = map(int, re.findall(r"\d+", sentence))
        gained, lost = (bool(words.search(sentence)) for words in (GAINED, LOST))
        assert gained != lost, sentence
        signed.append(number if gained else -number)
    return (*reversed(factors), *signed)  # the number of groups is named first


def test_every_answer_is_what_the_words_say_and_no_arithmetic_comes_twice():
    sets = word_problems.make()
    seen = Counter()
    for name, rows in sets.items():
        assert Counter(row["level"] for row in rows) == dict.fromkeys(range(1, 6), word_problems.SIZES[name])
        assert [row["level"] for row in rows[:5]] == [1, 2, 3, 4, 5] and len({row["id"] for row in rows}) == len(rows)
        for row in rows:
            question, level = row["question"][-1]["content"], row["level"]
            numbers = computed(question)
            product = level in (3, 5)
            value, changes = (numbers[0] * numbers[1], numbers[2:]) if product else (numbers[0], numbers[1:])
            on_the_way = [value]
            for change in changes:
                on_the_way.append(on_the_way[-1] + change)
            assert str(on_the_way[-1]) == row["answer"] and min(on_the_way) >= 1, question
            assert len(changes) == {1: 1, 2: 1, 3: 0, 4: 2, 5: 1}[level]
            assert max(on_the_way) <= {1: 25, 2: 50, 3: 180, 4: 25, 5: 65}[level]
            seen[product, numbers] += 1
    assert len(seen) == sum(seen.values()) == 5 * sum(word_problems.SIZES.values())
    assert sets == word_problems.make() != word_problems.make(1)
    changes = [numbers[1] for product, numbers in seen if not product and len(numbers) == 2]
    assert 0.4 < sum(change > 0 for change in changes) / len(changes) < 0.6


def test_the_examples_before_a_problem_are_right():
    assert [turn["role"] for turn in word_problems.as_messages("Q")] == ["user", "assistant"] * 2 + ["user"]
    for question, solution in word_problems.EXAMPLES:
        for a, sign, b, total in re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)", solution):
            assert {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign] == int(total)
        numbers = computed(question)
        value = (numbers[0] * numbers[1], *numbers[2:]) if "each" in question else numbers
        assert smollm2_reward.reward(solution, total) == 1 and sum(value) == int(total)


@pytest.mark.parametrize(("text", "gold", "value"), [
    *((text, "12", value) for text, value in [
        (r"8 + 4 = 12, so \boxed{12}.", 1), (r"\boxed{7} and then \boxed{12}", 1), (r"\boxed{12} of 30", 1),
        (r"\boxed{ 12.0 }", 1), ("8 + 4 = 12", 0.5), ("It is 12.", 0.5), (r"so \boxed{7}, or 12", 0.5),
        (r"\boxed{12 apples}", 0.5), ("12 or 13", 0), (r"\boxed{13}", 0), (r"\boxed{12", 0.5), ("", 0), ("112", 0)]),
    (r"\boxed{1,200}", "1200", 1), ("1,200", "1200", 0.5), (r"\boxed{1200}", "1,200", 1)])  # as GSM8K writes it
def test_the_reward(text, gold, value):
    assert smollm2_reward.reward(text, gold) == value


@pytest.mark.slow
@pytest.mark.parametrize("method", others_slow(smollm2.METHODS, "PPS, LoRA"))
def test_a_method_trains_for_a_step(method, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    word_problems.write(tmp_path)
    sets = {"model.path": tiny, "out": tmp_path / "run", "data.train": tmp_path / "train.jsonl",
            "data.eval": tmp_path / "validation.jsonl", "data.max_prompt_tokens": 1024, "steps": 1, "eval.limit": 2,
            "rollout.prompts_per_step": 2, "rollout.max_new_tokens": 8, "eval.max_new_tokens": 8}
    cfg = config.load(smollm2.CONFIG, [*smollm2.METHODS[method], *(f"{key}={value}" for key, value in sets.items())])
    train.train(cfg)
    lines = runfolder.read_log(tmp_path / "run" / "metrics.jsonl")
    assert any("rollout/tokens" in line for line in lines)
    assert sum("eval/validation/accuracy" in line and "eval/validation/reward" in line for line in lines) == 2


def answers(right: list[tuple[bool, bool]]) -> list[dict]:
    return [{"level": str(1 + i % 2), "question": f"Q{i}", "gold": "1",
             "responses": [{"verdict": "right" if marked else "unparsed", "last_number": last, "text": f"T{i}",
                            "tokens": 10, "finished": True}]}
            for i, (marked, last) in enumerate(right)]


def test_the_tables_tell_both_readings_by_level():
    results = {"before": answers([(False, True)] * 4), "CPPO": answers([(True, True)] * 3 + [(False, False)])}
    assert smollm2.level_table(results, "accuracy")[2:] == [
        "| before | 0.0% [0, 49] | 0.0% [0, 66] | 0.0% [0, 66] |",
        "| CPPO | 75.0% [30, 95] | 100.0% [34, 100] | 50.0% [9, 91] |"]
    cells = smollm2.difference_table(results)[2].split(" | ")
    assert cells[1].startswith("+75.0% [") and cells[1].endswith("p = 0.25") and cells[2].startswith("-25.0% [")
