"""Conversations in the dialects of public chat templates: the policy's tokens are those that were sampled, and all
others those of the conversation as the template renders it, or the run refuses.

The templates are written anew after those of the models that they are named after: what they write, and where they
change earlier turns, is the same.
"""

import copy
import json
import random
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import TOY, refuses
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Rust

import config
import data
from collect import Sampler
from config import ConfigError, Reward
from infra.tokenizer import ANSWERED, ASKED
from records import Group, Prompt, Request, Sample

CHATML = """{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# Thoughts of an answer stay while tools are called, and are dropped once a user has spoken after it.
QWEN3 = """{%- set ns = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}{% set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought + '\\n</think>\\n\\n' + content }}
        {%- else %}{{ '<|im_start|>assistant\\n' + content }}{% endif %}
        {{- '<|im_end|>\\n' }}
    {%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
LLAMA3 = """{{- bos_token }}{{ '<|start_header_id|>system<|end_header_id|>\\n\\nToday is 26 Jul 2024\\n\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% set messages = messages[1:] %}{% endif %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role in ('tool', 'ipython') %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
GEMMA = """{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\\n\\n' %}
{%- set messages = messages[1:] %}{% else %}{% set first = '' %}{% endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles alternate') }}{% endif %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {{- (first if loop.first else '') + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
# The system prompt stands before the last question, wherever that is.
MISTRAL = """{{- bos_token }}{% if messages[0].role == 'system' %}{% set rule = messages[0].content %}
{%- set messages = messages[1:] %}{% endif %}{% set ns = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{{ '[TOOL_RESULTS]' + {'content': message.content} | tojson + '[/TOOL_RESULTS]' }}
    {%- elif message.role == 'user' %}
        {{- '[INST]' + (rule + '\\n\\n' if rule is defined and loop.index0 == ns.last else '') }}
        {{- message.content + '[/INST]' }}
    {%- else %}{{ message.content + eos_token }}{% endif %}
{%- endfor %}"""
# Thoughts of all earlier answers are dropped, and the prompt opens one.
R1 = """{{ bos_token }}{% for message in messages %}
    {%- if message.role == 'user' %}{{ '<|User|>' + message.content }}
    {%- elif message.role == 'assistant' %}{{ '<|Assistant|>' + message.content.split('</think>')[-1] + eos_token }}
    {%- else %}{{ message.content }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"""
# An answer ends where the next message begins: it has no token of its own.
GLM = """[gMASK]<sop>{% for message in messages %}
{{- '<|' + ('observation' if message.role == 'tool' else message.role) + '|>\\n' + message.content }}
{%- endfor %}{% if add_generation_prompt %}<|assistant|>\\n{% endif %}"""
SPECIAL = ["<|endoftext|>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|im_sep|>", "<|start_header_id|>",
           "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "[TOOL_RESULTS]",
           "[/TOOL_RESULTS]", "<|User|>", "<|Assistant|>", "<|user|>", "<|assistant|>", "<|observation|>", "[gMASK]",
           "<sop>"]
LEFT, NO_TOKEN = "does not leave the answer", "closes an answer with no token of its own"
# name -> (template, token that closes an answer, tokenizer, roles that fit, roles that are refused and why)
DIALECTS = {
    "chatml": (CHATML, "<|im_end|>", "bytes", ["user", "tool"], {}),
    "qwen3": (QWEN3, "<|im_end|>", "bytes", ["tool"], {"user": LEFT}),
    "llama3": (LLAMA3, "<|eot_id|>", "bytes", ["user", "tool"], {}),
    "gemma": (GEMMA, "<end_of_turn>", "spaces", ["user"], {"tool": "the chat template fails: .* roles alternate"}),
    "mistral": (MISTRAL, "</s>", "first", ["tool"], {"user": LEFT}),
    "r1": (R1, "</s>", "bytes", [], {"user": LEFT}),
    "glm": (GLM, "<|user|>", "bytes", [], {"user": NO_TOKEN, "tool": NO_TOKEN})}
WORDS = ["apples", "12", "=", "é", "日本", "\n", "\n\n", "  ", "{", '"a": 1', "</s", "<tool_call>", "x+y", "ÿ", "\t",
         "\\boxed{3}", "''", "the", "The"]


def write_tokenizer(folder: Path, kind: str) -> None:
    """Of bytes, as GPT's and Llama 3's, or of characters with marks for spaces, as Llama 2's and Mistral's."""
    corpus = [" ".join(WORDS) * 3, Path(__file__).read_text()]
    if kind == "bytes":
        rust = Rust(models.BPE())
        pieces = pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated")
        rust.pre_tokenizer = pre_tokenizers.Sequence([pieces, pre_tokenizers.ByteLevel(add_prefix_space=False,
                                                                                       use_regex=False)])
        rust.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
        rust.train_from_iterator(corpus, trainer)
    else:
        vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256}
        for char in "".join(corpus):
            vocab.setdefault(char, len(vocab)) if ord(char) < 128 and char != " " else None
        merges = [("t", "h"), ("▁", "t"), ("▁", "▁"), ("a", "p"), ("1", "2")]
        for a, b in merges:
            vocab.setdefault(a + b, len(vocab))
        rust = Rust(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
        if kind == "first":  # a space before a text alone, and before none that follows a special token
            rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        else:
            rust.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        rust.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                          decoders.Strip(" ", 1, 0)])
    rust.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    rust.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def dialects(tmp_path_factory) -> dict[str, data.Tokenizer]:
    loaded = {}
    for name, (template, closing, kind, *_) in DIALECTS.items():
        folder = tmp_path_factory.mktemp(name)
        write_tokenizer(folder, kind)
        ids = Rust.from_file(str(folder / "tokenizer.json")).token_to_id
        shape = json.loads((TOY / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(shape | {"vocab_size": 700, "eos_token_id": ids(closing)}))
        settings = {"chat_template": template, "bos_token": "<s>", "eos_token": closing,
                    "tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        loaded[name] = data.Tokenizer(folder)
    return loaded


def some_text(rng: random.Random) -> str:
    return "".join(rng.choice(WORDS) + rng.choice(["", " "]) for _ in range(rng.randint(1, 8))).strip() or "x"


class Talk:
    """An engine and an environment that hold a random conversation."""

    def __init__(self, tokenizer: data.Tokenizer, roles: list[str], asked: list[dict], rng: random.Random,
                 canonical: bool):
        self.tokenizer, self.roles, self.rng, self.canonical = tokenizer, roles, rng, canonical
        self.messages = asked  # and all that follows
        self.eos_ids = tokenizer.eos_ids
        self.closing = tokenizer.closing_token()
        self.turns: list[list[int]] = []
        self.left = rng.randint(0, 3)

    def generate(self, requests, *rest, **named):
        from leaves.environment.replies import Splicer
        text = some_text(self.rng)
        before, whole = (self.encode(self.tokenizer.conversation(self.messages, True) + more) for more in ("", text))
        ids = whole[len(before):]
        if not self.canonical:  # the same text in other tokens, as models sample it
            splicer = Splicer(self.tokenizer)
            ids = [i for char in text for i in splicer.encode_behind(char, splicer.end_text)]
        self.turns.append([*ids, self.closing])
        self.messages.append({"role": "assistant", "content": text})
        return [Sample(self.turns[-1], [-1.0] * len(self.turns[-1]), True)]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.rust.encode(text, add_special_tokens=False).ids

    def reply(self, text, row):
        if not self.left:
            return None
        self.left -= 1
        role = self.rng.choice(self.roles)
        count = self.rng.randint(1, 2) if role == "tool" else 1
        said = [{"role": role, "content": some_text(self.rng)} for _ in range(count)]
        self.messages += said
        return said[0]["content"] if role == "user" and self.rng.random() < 0.5 else said


def hold(tokenizer: data.Tokenizer, roles: list[str], seed: int, canonical: bool) -> tuple[Talk, Prompt, Sample]:
    from leaves.environment.join import EnvironmentEngine
    from leaves.environment.test_environment import Inline
    rng = random.Random(seed)
    asked = [{"role": "user", "content": some_text(rng)}]
    if rng.random() < 0.5:
        asked.insert(0, {"role": "system", "content": some_text(rng)})
    prompt = Prompt("q", tokenizer.encode([tokenizer.conversation(asked, True)])[0], "1")
    talk = Talk(tokenizer, roles, asked, rng, canonical)
    engine = EnvironmentEngine(talk, tokenizer, Inline(talk.reply, max_context=5000), lock_step=False)
    sample, = engine.generate([Request(prompt, 1, 4000)], 1.0)
    return talk, prompt, sample


@pytest.mark.slow
def test_tokens_are_those_sampled_and_those_of_the_template(dialects):
    for name, (_, _, kind, roles, _) in DIALECTS.items():
        for seed in range(20 if roles else 0):
            # Templates that trim or drop have nothing to do here: texts have neither spaces around nor thoughts.
            # Decoders of tokens with marks for spaces write one behind each special token.
            canonical, tokenizer = seed % 2 == 0 or kind != "bytes", dialects[name]
            talk, prompt, sample = hold(tokenizer, roles, seed, canonical)
            own = [sample.ids[start:to].tolist() for start, to in sample.turns][::2]
            assert own == talk.turns, (name, seed)
            rendered = tokenizer.conversation(talk.messages[:-1], True)  # what the last turn was sampled behind
            ids = [*prompt.ids, *sample.ids][:-len(own[-1])]
            if canonical:
                assert talk.encode(rendered) == ids, (name, seed)
            else:
                assert tokenizer.decode(ids, special=True) == rendered, (name, seed)


# The policy's words, by turns with a reply's -> accuracy and unparsed where the gold answer is 12.
TALKS = [
    (["I add.", "5", r"So \boxed{12}."], (1, 0)), ([r"\boxed{12}?", "8", r"No: \boxed{8}."], (0, 0)),
    ([r"\boxed{12}?", "8", "I can not tell."], (0, 1)), (["I add.", r"The answer is \boxed{12}.", "Thanks."], (0, 1)),
    (["I add.", r"\boxed{8}", "8?", "No.", r"\boxed{12}"], (1, 0)), ([r"\boxed{8}<eos></s>: \boxed{12}"], (1, 0))]


@pytest.mark.parametrize("name", DIALECTS)
def test_rewards_read_the_last_words_of_the_policy_and_no_others(name, dialects):
    """Behind messages and behind a stop text. Ends are this template's own tokens: another's are text, and so are
    these if they are spelled in other tokens."""
    from leaves.environment.join import Dialogue
    from leaves.environment.replies import Splicer
    tokenizer, (_, _, kind, roles, _) = dialects[name], DIALECTS[name]
    splicer, closing = Splicer(tokenizer), [tokenizer.rust.token_to_id(DIALECTS[name][1])]
    sampler = Sampler(None, tokenizer, config.load("grpo_toy.yaml").rollout, Reward(), 0, graded=True)

    def spell(text: str) -> list[int]:
        pieces = [text] if kind == "spaces" else text  # it would put a space before each character
        return [i for piece in pieces for i in splicer.encode_behind(piece, splicer.end_text)]

    def judged(ids: list[int], replies: list[tuple[int, int]] = ()) -> tuple[float, float]:
        sample = Dialogue(ids, [0.0] * len(ids), True, tuple(replies))
        parts = sampler.score([Group(Prompt("q", (1,), "12"), (sample,))]).components
        return parts["accuracy"].item(), parts["unparsed"].item()

    for role in (None, *roles):
        for talk, due in TALKS:
            ids, replies = [], []
            for i, text in enumerate(talk):
                said = spell(text) + closing * (role is not None)
                if i % 2:
                    said = splicer.tokens([{"role": role, "content": text}] if role else text, ids)
                    replies.append((len(ids), len(ids) + len(said)))
                ids += said
            unread = splicer.tokens([{"role": role, "content": r"\boxed{12}"}] if role else r"\boxed{12}", ids)
            assert judged(ids, replies) == due, (role, talk)
            assert judged([*ids, *unread], [*replies, (len(ids), len(ids) + len(unread))]) == due
    between = splicer.encode(tokenizer.conversation([ASKED, ANSWERED, ASKED], False).partition("ANSWER")[2])
    for turn in (between, between[1:]):  # it goes on as the user, with the end of its own turn or without
        if tokenizer.ends & {*turn}:
            assert judged([*spell(r"\boxed{12}"), *turn, *spell(r"\boxed{8}")]) == (1, 0)


@pytest.mark.parametrize("name", DIALECTS)
def test_roles_that_a_template_renders_otherwise_are_refused(name, dialects):
    from leaves.environment.join import EnvironmentEngine
    from leaves.environment.replies import Splicer
    *_, fitting, refused = DIALECTS[name]
    tokenizer = copy.copy(dialects[name])
    tokenizer.eos_ids = {0, *tokenizer.eos_ids}  # as Qwen's, which may end by another token than its answers do
    splicer = Splicer(tokenizer)
    assert splicer.closing is None or splicer.end_text == DIALECTS[name][1]
    for notation in ("plain", "json"):  # in the second a reply has the role of a tool
        with pytest.raises(ConfigError) if notation == "json" and "tool" not in fitting else nullcontext():
            EnvironmentEngine(None, tokenizer, SimpleNamespace(tools=[None], format=notation), False)
    for role in fitting:
        splicer.require_fit((role,))
    for role, why in refused.items():
        said = why if "fails" in why else f"before messages of the role {role}, the chat template of .* {why}"
        refuses(said, splicer.require_fit, (role,))


def test_a_tail_is_not_taken_from_a_template_that_numbers_its_turns(dialects, tmp_path):
    from leaves.environment.replies import Splicer
    template = tmp_path / "own.jinja"
    template.write_text("{% for message in messages %}<|im_start|>{{ loop.index }} {{ message.role }}\n"
                        "{{ message.content }}<|im_end|>\n{% endfor %}"
                        "{% if add_generation_prompt %}<|im_start|>{{ messages | length + 1 }} assistant\n{% endif %}")
    tokenizer = data.Tokenizer(dialects["chatml"].folder, config.Data("x", None, chat_template=str(template)))
    refuses("writes a second turn in another way than the first", Splicer(tokenizer).require_fit, ("user",))


def test_a_reply_that_is_read_back_otherwise_is_refused(dialects):
    """Its tokenizer has no token for this character, and none for its bytes."""
    from leaves.environment.replies import Splicer
    tokenizer = dialects["chatml"]
    splicer = Splicer(tokenizer)
    tokenizer.rust.normalizer = normalizers.Lowercase()
    with pytest.raises(ConfigError, match="environment.file: the reply 'Five' is read back from its tokens as 'five'"):
        splicer.tokens("Five", splicer.encode("x"))
    tokenizer.rust.normalizer = normalizers.Sequence([])


@pytest.mark.parametrize("name", ["chatml", "gemma", "mistral"])
def test_a_text_behind_a_stop_has_the_tokens_that_it_has_in_the_whole(name, dialects):
    """Without the space that some tokenizers write before a first text."""
    from leaves.environment.replies import Splicer
    splicer = Splicer(dialects[name])
    before, whole = splicer.encode("1 + 1 ="), splicer.encode("1 + 1 = 2.")
    assert [*before, *splicer.tokens(" 2.", before)] == whole
