"""What a downloaded folder may hold: read as transformers reads it, or refused; and what an exported folder says."""

import json
from decimal import Decimal
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from conftest import TOY, load, refuses, toy_config, write_tiny
from safetensors.torch import load_file, save_file
from test_data import edit, write

import config
import learner as programs
import train
from collect import Sampler
from config import ConfigError, Data, Reward
from data import load_problems
from infra.export import export, prompted_files
from infra.rows import find_cell, spelled
from infra.tokenizer import Tokenizer
from infra.weights import find_model, read_shape
from records import Group, Problem, Prompt, Sample

TEMPLATE = json.loads((TOY / "tokenizer_config.json").read_text())["chat_template"]
ODD = "48/2 = 24 clips — in May; 50% off: €3.50?\n\tHow many, 𝟜 or ½? 😀" + "".join(map(chr, range(1, 256)))
TALK = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": ODD}]


def folder_with(folder: Path, **changes) -> Path:
    """A tiny model; `changes` update its json files, by their stems."""
    write_tiny(folder)
    for stem, change in changes.items():
        path = folder / f"{stem}.json"
        said = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps(said | change))
    return folder


def tokenizer(folder: Path, stop: tuple[str, ...] = (), **data) -> Tokenizer:
    return Tokenizer(folder, Data(train="x", eval=None, **data), stop)


def theirs(folder: Path, messages: list[dict]) -> list[int]:
    own = transformers.AutoTokenizer.from_pretrained(folder)
    return own.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def ours(folder: Path, messages: list[dict], **data) -> list[int]:
    read = tokenizer(folder, **data)
    return list(read.encode([read.render(messages, None)])[0])


def begins_and_ends(begin: str | None, end: str | None) -> dict:
    ids = {"<|endoftext|>": 0, "<|im_end|>": 2}
    around = [[{"SpecialToken": {"id": text, "type_id": 0}}] if text else [] for text in (begin, end)]
    single = [*around[0], {"Sequence": {"id": "A", "type_id": 0}}, *around[1]]
    tokens = {text: {"id": text, "ids": [i], "tokens": [text]} for text, i in ids.items()}
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": tokens}


ASKED = {
    "truncation": {"truncation": {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}},
    "padding": {"padding": {"strategy": {"Fixed": 1000}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0,
                            "pad_type_id": 0, "pad_token": "<|endoftext|>"}},
    "dropout": {"model": json.loads((TOY / "tokenizer.json").read_text())["model"] | {"dropout": 0.9}},
    "BOS": {"post_processor": begins_and_ends("<|endoftext|>", None)},
    "BOS and EOS": {"post_processor": begins_and_ends("<|endoftext|>", "<|im_end|>")}}


@pytest.mark.parametrize("asked", ASKED)
def test_ids_are_a_function_of_text_and_vocabulary_and_a_plain_prompt_begins_once_and_does_not_end(asked, tmp_path):
    folder, before = folder_with(tmp_path / "model", tokenizer=ASKED[asked]), [0] * ("BOS" in asked)
    assert ours(folder, TALK) == theirs(folder, TALK) == ours(TOY, TALK)
    bare = ours(TOY, TALK[:1], prompt="Q: {question}\nA:")
    assert ours(folder, TALK[:1], prompt="Q: {question}\nA:") == before + bare
    assert ours(folder, TALK[:1], prompt="<|endoftext|>Q: {question}\nA:") == [0, *bare]


def test_special_tokens_of_a_text_are_split_where_the_config_says_so(tmp_path):
    folder = folder_with(tmp_path / "model", tokenizer_config={"split_special_tokens": True})
    assert ours(folder, TALK) == theirs(folder, TALK) != ours(TOY, TALK)


def test_tokens_that_only_the_config_has_are_added_as_in_transformers(tmp_path):
    size = read_shape(TOY).vocab_size
    plain = {"special": True, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    texts = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    listed = {str(i): plain | {"content": text} for i, text in enumerate(texts)}
    listed[str(size)] = plain | {"content": "<note>", "rstrip": True}
    change = {"tokenizer_config": {"added_tokens_decoder": listed}}
    talk = [{"role": "user", "content": "a <note> b"}]
    with pytest.raises(ConfigError, match=f"makes token {size} of a prompt, and there are {size} in the model"):
        ours(folder_with(tmp_path / "small", **change), talk)
    folder = folder_with(tmp_path / "model", config={"vocab_size": size + 3}, **change)
    assert ours(folder, talk) == theirs(folder, talk) and size in ours(folder, talk)
    folder_with(tmp_path / "other", tokenizer_config={"added_tokens_decoder": {"5": {"content": "<|im_end|>"}}})
    refuses("makes token 2 of '<.im_end.>', and tokenizer_config.json says 5", tokenizer, tmp_path / "other")


@pytest.mark.parametrize("listed", [[1], "s", {"x": {}}, {"3": "a"}, {"3": {}}, {"3": {"content": 5}},
                                    {"99": {"content": "<new>", "special": "yes"}}])
def test_added_tokens_of_another_type_are_an_error_of_that_file(listed, tmp_path):
    folder = folder_with(tmp_path, tokenizer_config={"added_tokens_decoder": listed})
    refuses("tokenizer_config.json(: .*; mend it, or download it again| says 3; take)", tokenizer, folder)


TEMPLATES = {
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>\n"
                  "{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}",
    "generation, white space": "{% for m in messages %}\n  {%- generation -%}\n {{ m.content }} \n"
                               "{%- endgeneration -%}\nx\n{% endfor %}",
    "generation, a scope": "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}",
    "no tools": "{% if tools is not none %}TOOLS{% endif %}{% if documents is not none %}TEXTS{% endif %}ok",
    "tojson": "{{ messages | tojson(indent=1) }}{{ {'a': '<é>'} | tojson }}",
    "loops": "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
             "{{ eos_token }}"}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_as_in_transformers(name, tmp_path):
    folder = folder_with(tmp_path / "model", tokenizer_config={"chat_template": TEMPLATES[name]})
    own = transformers.AutoTokenizer.from_pretrained(folder)
    expected = own.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    assert tokenizer(folder).render(TALK, None) == expected != ""


SEVERAL = {"tool_use": "TOOLS", "default": "{{ messages[0].content }}!"}


@pytest.mark.parametrize(("changes", "text"), [
    ({"tokenizer_config": {"chat_template": SEVERAL}}, "1+1?!"),
    ({"tokenizer_config": {"chat_template": [{"name": n, "template": t} for n, t in SEVERAL.items()]}}, "1+1?!"),
    ({"tokenizer_config": {"chat_template": None}, "chat_template": {"chat_template": SEVERAL["default"]}}, "1+1?!"),
    ({"tokenizer_config": {"chat_template": "{{ bos_token }}{{ eos_token }}?"},  # the config's own comes first
      "special_tokens_map": {"bos_token": {"content": "<|endoftext|>"}, "eos_token": "<|endoftext|>"}},
     "<|endoftext|><|im_end|>?")], ids=["several", "listed", "a processor's", "the older file of special tokens"])
def test_a_template_and_its_tokens_are_found_in_each_place(changes, text, tmp_path):
    assert tokenizer(folder_with(tmp_path / "model", **changes)).render(TALK, None) == text


def test_a_template_of_several_none_of_which_is_the_default_is_an_error(tmp_path):
    for several in ({"tool_use": "TOOLS"}, [{"name": "tool_use", "template": "TOOLS"}]):
        folder = folder_with(tmp_path / "model", tokenizer_config={"chat_template": several})
        refuses("has the chat templates tool_use and none named default; write one to a", tokenizer, folder)


def test_a_date_is_there_if_it_is_set(tmp_path):
    folder = folder_with(tmp_path / "model", tokenizer_config={"chat_template": "{{ strftime_now('%d %b %Y') }}"})
    with pytest.raises(ConfigError, match="it writes today's date: set data.date to one that stays, such as 2026-01-3"):
        tokenizer(folder).render(TALK, None)
    assert tokenizer(folder, date="2026-03-01").render(TALK, None) == "01 Mar 2026"
    asks = {"chat_template": "{{ strftime_now('%Y') if strftime_now is defined else 'July' }}"}  # Llama 3.2's
    assert tokenizer(folder_with(tmp_path / "asks", tokenizer_config=asks)).render(TALK, None) == "July"
    refuses("data.date='soon' must be a day as YYYY-MM-DD", tokenizer, folder, date="soon")


def formats(read: Tokenizer, text: str) -> float:
    ids = read.encode([text])[0]
    group = Group(Prompt("a", (1,), ""), (Sample(ids, [0.0] * len(ids), True),) * 2)
    settings, reward = config.load("grpo_toy.yaml").rollout, Reward(accuracy=0, format=1)
    rewards = Sampler(None, read, settings, reward, 0, graded=False).score([group])
    return rewards.components["format"][0, 0].item()


REASONED = "2 + 2\n</think>\n<answer>4</answer>"


@pytest.mark.parametrize("opening", ["<think>", "<think>\n", "<think>\n\n"])
def test_what_the_prompt_has_opened_counts_for_the_format(opening, tmp_path):
    opens = TEMPLATE.replace("assistant\n{% endif", f"assistant\n{opening}{{% endif")
    folder = folder_with(tmp_path / "model", tokenizer_config={"chat_template": opens})
    assert tokenizer(folder).opened == opening and tokenizer(TOY).opened == ""
    for read in (tokenizer(folder), tokenizer(TOY, prompt=f"Q: {{question}}\nA: {opening}")):
        assert formats(read, REASONED) == 1 and formats(read, f"<answer>{REASONED}") == 1
        assert formats(read, "4</answer>") == 0
    assert formats(tokenizer(TOY), REASONED) == 0 and formats(tokenizer(TOY), f"<think>{REASONED}") == 1


def test_marks_that_are_special_tokens_reach_the_rewards_and_ends_do_not(tmp_path):
    folder = folder_with(tmp_path / "model", config={"vocab_size": read_shape(TOY).vocab_size + 4})
    rust = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    marks = ["<think>", "</think>", "<answer>", "</answer>"]
    rust.add_special_tokens(marks)
    rust.save(str(folder / "tokenizer.json"))
    read = tokenizer(folder)
    text = f"<think>{REASONED}"
    ids = read.encode([f"{text}<|im_end|>"])[0]
    assert {rust.token_to_id(mark) for mark in marks} < set(ids)
    assert read.decode(ids) == "2 + 2\n\n4" and read.read(Sample(ids, [0.0] * len(ids), True)) == (text,)
    assert formats(read, f"{text}<|im_end|>") == 1


def changed(folder: Path, **tensors: torch.Tensor | None) -> Path:
    path = folder / "model.safetensors"
    kept = load_file(path) | {name.replace("__", "."): t for name, t in tensors.items()}
    save_file({name: t for name, t in kept.items() if t is not None}, path)
    return folder


def test_a_head_in_a_tied_folder_is_the_embedding_and_stored_rotary_frequencies_the_configs(tmp_path):
    folder = write_tiny(tmp_path / "model")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    (frequency, _), = load(folder).frequencies.values()
    with pytest.raises(ConfigError, match="has other rotary frequencies than config.json implies; mend rope_theta"):
        load(changed(folder, **{name: frequency / 2}))
    load(changed(folder, **{name: frequency}))
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    before = load(folder).embed_tokens.weight
    assert torch.equal(load(changed(folder, lm_head__weight=embedding.clone())).embed_tokens.weight, before)
    changed(folder, lm_head__weight=embedding + 1e-6)
    refuses("lm_head.weight is not model.embed_tokens.weight, and config.json ties them", load, folder)


def test_a_tied_matrix_is_read_under_either_name_and_without_a_word_on_ties_there_is_none(tmp_path):
    """As by transformers, which would draw the matrix that is missing."""
    folder = folder_with(tmp_path / "model")
    before = load(folder).embed_tokens.weight
    changed(folder, model__embed_tokens__weight=None, lm_head__weight=before.clone())
    assert torch.equal(load(find_model(str(folder))).embed_tokens.weight, before)
    edit(folder, "config.json", tie_word_embeddings=False)
    refuses("model.embed_tokens.weight is nothing, where it says", find_model, str(folder))
    changed(folder, model__embed_tokens__weight=2 * before)
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({key: said[key] for key in said if key != "tie_word_embeddings"}))
    assert torch.equal(load(folder).head_VD, before) and not read_shape(folder).tied


@pytest.mark.parametrize("other", ["model-00002-of-00002.safetensors", "adapter_config.json",
                                   "adapter_model.safetensors"])
def test_a_folder_has_one_set_of_weights(other, tmp_path):
    folder = write_tiny(tmp_path / "model")
    if other.endswith("safetensors"):
        save_file({"x": torch.zeros(1)}, folder / other)
    else:
        (folder / other).write_text("{}")
    refuses(f"holds .*{other}.*, and a model has one set of weights", find_model, str(folder))
    (folder / "config.json").unlink()
    told = "it is an adapter: set model.lora.path" if other.endswith("json") else "give a Hugging Face folder"
    refuses(f"model.path={folder} has no config.json; {told}", find_model, str(folder))


def test_an_index_names_the_one_set_of_weights_beside_which_mistrals_second_copy_may_lie(tmp_path):
    folder = write_tiny(tmp_path / "model")
    save_file({"x": torch.zeros(1)}, folder / "consolidated.safetensors")
    load(folder)
    tensors = load_file(folder / "model.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model.safetensors")}))
    load(find_model(str(folder)))
    save_file(tensors, folder / "model-1.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model-1.safetensors")}))
    refuses("holds model-1.safetensors and model.safetensors, and a model has one set", find_model, str(folder))
    first = dict(list(tensors.items())[:3])
    (folder / "model.safetensors").unlink()
    save_file(first, folder / "model-2.safetensors")
    files = dict.fromkeys(tensors, "model-1.safetensors") | dict.fromkeys(first, "model-2.safetensors")
    index.write_text(json.dumps({"weight_map": files}))
    refuses("is in another file too; download the weights again", load, folder)


READING = {"chat_template": "{{ style }}{% if deep and more is none %}D{% endif %}" + TEMPLATE}


@pytest.mark.parametrize(("given", "system", "change"), [
    ({"prompt": "Question: {question} {{x}} 😀\nAnswer:"}, None, {"tokenizer": ASKED["BOS and EOS"]}),
    ({"prompt": "<|endoftext|>Q: {question}\nA:"}, None, {}), ({}, 'Be "brief",\nplease: 😀.', {}),
    ({"template": {"style": "dry", "deep": True, "more": None}}, None, {"tokenizer_config": READING})],
    ids=["plain", "plain, with a BOS", "system", "arguments"])
def test_an_export_prompts_by_itself_as_the_run_did(given, system, change, tmp_path):
    """For our programs without the run's config, and for transformers."""
    folder = folder_with(tmp_path / "model", **change)
    read = tokenizer(folder, **given)
    ids = read.encode([read.render("1 + 1?", system)])[0]
    export(load(folder), folder, tmp_path / "hf", prompted_files(read, system))
    question = [{"role": "user", "content": "1 + 1?"}]
    assert ours(tmp_path / "hf", question) == theirs(tmp_path / "hf", question) == list(ids)
    assert prompted_files(tokenizer(TOY), None) == {}


@pytest.mark.slow
def test_the_ends_of_training_are_those_of_the_export_and_of_a_checkpoints(tmp_path):
    folder = folder_with(tmp_path / "model", config={"eos_token_id": 0}, generation_config={"eos_token_id": 0},
                         tokenizer_config={"eos_token": "<|endoftext|>"})
    cfg = toy_config(tmp_path / "run", f"model.path={folder}", 'rollout.stop=["<|im_end|>"]', "steps=1",
                     "checkpoint.every=1", "data.system_prompt=Add.")
    train.train(cfg)
    programs.export_checkpoint(tmp_path / "run" / "checkpoints" / "step_000001", tmp_path / "again")
    for exported in (tmp_path / "run" / "hf", tmp_path / "again"):
        assert json.loads((exported / "generation_config.json").read_text())["eos_token_id"] == [0, 2]
        assert tokenizer(exported).eos_ids == {0, 2} and "Add." in tokenizer(exported).render("1?", None)


def problems_of(folder: Path, *rows: dict) -> list[Problem]:
    return load_problems(str(write(folder / "own.jsonl", *rows)))


@pytest.mark.parametrize(("cell", "gold"), [
    ("We add.\nSo the answer is \\boxed{5}.", "5"), (r"\boxed{1} is wrong, \boxed{\frac{1}{2}} right", r"\frac{1}{2}"),
    ("Add them. #### 5", "5"), ("Add them: 8.\n\n**Final answer:** 8", "8"), ("The answer is 12.", "12"),
    ("<think>3?</think><answer>4</answer>", "4"), ("$\\boxed{3}$", "3"), (5.0, "5"), (-0.5, "-0.5"), (7, "7"),
    (10**400, f"{10**400}"),
    ([1.0, "x"], "1, x"), ('["34"]', "34"), (r'["\\pi", "2"]', r"\pi, 2"), ("[1, 2]", "[1, 2]"),
    ("['a'], 'b'", "['a'], 'b'"),
    ("['5']", "5"), ("['5' '6']", "5, 6"), ("['a', 1.0]", "a, 1"), ("['5'", "['5'"),
    ("Paris", "Paris"), ("x = 5", "x = 5"), ("0.50", "0.50")])
def test_a_gold_cell_is_read_as_a_person_would(cell, gold, tmp_path):
    problem, = problems_of(tmp_path, {"question": "q", "answer": cell})
    assert problem.answer == gold
    assert problem.solution == (cell if isinstance(cell, str) and cell != gold and cell[0] != "[" else "")


def test_decimals_of_a_parquet_file():
    for number, gold in ("5.00", "5"), ("0.250", "0.25"), ("100", "100"), ("1E+2", "100"), ("NaN", None):
        assert spelled(find_cell({"answer": Decimal(number)}, "answer", {})) == gold


TURNS = [{"from": "system", "value": "Add."}, {"from": "human", "value": "2+3?"},
         {"from": "gpt", "value": "So \\boxed{5}."}]


def test_sharegpt_and_messages_with_the_reply(tmp_path):
    roles = {"human": "user", "gpt": "assistant", "system": "system"}
    renamed = [{"role": roles[m["from"]], "content": m["value"]} for m in TURNS]
    rows = [{"conversations": TURNS}, {"messages": renamed}, {"prompt": renamed, "answer": "6"},
            {"question": json.dumps(TURNS)}, {"system": "Add.", "conversations": TURNS[1:]}]
    found = problems_of(tmp_path, *rows)
    assert [p.answer for p in found] == ["5", "5", "6", "5", "5"]
    assert all(p.messages == tuple(renamed[:2]) and p.solution == TURNS[2]["value"] for p in found)


@pytest.mark.parametrize(("row", "message"), [
    ({"answer": "word " * 41}, r"own.jsonl:1: the answer is a text of 41 words and marks none of them as its"),
    ({"question": [TURNS[0]]}, r"own.jsonl:1: the last message, or that before the assistant's, must be the user"),
    ({"question": [{"from": "tool", "value": "x"}]}, r"own.jsonl:1: a message must be an object with 'role', one of"),
    ({"question": [{"role": "bot", "content": "x"}]}, r"a message must be an object with 'role'.*not \{'role': 'bot'"),
    ({"question": [{"role": "user", "content": [{"type": "text"}]}]}, r"and 'content', a text"),
    ({"question": ["hello"]}, r"a message must be an object"),
    ({"question": "[{'role': 'user', 'content': 'x'}]"}, r"not valid JSON .*looks like a list of messages"),
    ({"question": []}, r"'question' must be a non-empty text, not \[\]")])
def test_a_row_that_nobody_can_read_is_named(row, message, tmp_path):
    refuses(message, problems_of, tmp_path, {"question": "q", "answer": "1"} | row)
    if "answer" in row:
        load_problems(str(tmp_path / "own.jsonl"), answers=False)
