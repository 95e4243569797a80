"""Tokenize text, and render questions as prompts by a chat template or a plain text."""

import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import jinja2.ext
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE

from config import Config, ConfigError, Data
from infra.trial import try_first
from infra.weights import read_shape
from records import Sample, Stops
from settings import leaves
from settings.loader import SHORT, encodable, in_short, read_json

# Every template gets them, beside special tokens.
RENDER_ARGUMENTS = ("messages", "add_generation_prompt", "tools", "documents", "strftime_now")
MARKER = re.compile(r"<\|[^<>|\s]+\|>")  # how most templates write a special token
ASKED, ANSWERED = {"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": "ANSWER"}
OPENING_TAG = re.compile(r"<[A-Za-z][\w:-]*>\s*\Z")


class Tokenizer:
    """The tokenizer and end-of-sequence ids of a Hugging Face model folder, and how it is prompted.

    `data` may have a template or a plain prompt in place of the model's own template. Each text of `stop`
    that is a special token of the tokenizer becomes an end-of-sequence id; the others are `stops`. Raises
    ConfigError.
    """

    tools = None  # descriptions that the template writes into a prompt

    def __init__(self, folder: Path, data: Data | None = None, stop: Sequence[str] = ()):
        try_first(f"the tokenizer of {folder}", self.load, folder, data, stop)

    def load(self, folder: Path, data: Data | None, stop: Sequence[str]) -> None:
        """Read the files of the folder."""
        path = require_file(folder / "tokenizer.json", "the tokenizer")
        try:
            self.rust = RustTokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"{path} is not a tokenizer: {in_short(error)}; download it again") from None
        # The file may ask for all three, as its last user did; ids depend on text and vocabulary alone.
        self.rust.no_truncation()
        self.rust.no_padding()
        if isinstance(self.rust.model, BPE):
            self.rust.model.dropout = None
        path = require_file(folder / "tokenizer_config.json", "the chat template")
        settings = read_if_there(folder / "special_tokens_map.json") | read_json(path)
        self.rust.encode_special_tokens = settings.get("split_special_tokens") is True
        self.add_tokens(settings.get("added_tokens_decoder") or {}, path)
        self.special = {}  # name -> text, for templates
        for key, value in settings.items():
            if key.endswith("_token"):
                text = value.get("content") if isinstance(value, dict) else value
                if isinstance(text, str):
                    self.special[key] = text
        self.folder = folder
        self.size = read_shape(folder).vocab_size
        ids = {text: self.rust.token_to_id(text) for text in stop}
        # A special token is left out by decoding.
        self.stop_ids = {i for i in ids.values() if i is not None and not self.decode([i])}
        stop_texts = tuple(text for text, i in ids.items() if i not in self.stop_ids)
        self.stops = Stops(stop_texts, self.rust.decode_batch) if stop_texts else None
        self.eos_ids = self.find_ends() | self.stop_ids
        self.hidden = self.eos_ids | set(map(self.rust.token_to_id, self.special.values()))
        self.begin = self.find_begin()
        data = data or Data(train="", eval=None)
        self.plain, self.arguments = data.prompt, data.template or {}
        if self.plain is None:
            self.read_template(data, settings.get("chat_template"))
        else:
            self.source, self.template, self.own_template = self.plain, None, None
        self.opened = self.find_opened()
        self.ends = self.eos_ids  # a turn of the policy is read up to one of them
        with suppress(ConfigError):  # said with the first problem, if the template fails there too
            self.ends |= {*self.behind_answer(ASKED)}
        # The settings that name files of the user's, and the texts that were read.
        self.own_files = {"data.chat_template": self.own_template}

    def add_tokens(self, listed: object, path: Path) -> None:
        """Add the tokens that tokenizer_config.json has beyond tokenizer.json, as transformers does. Raises
        ConfigError for one with another id."""
        try:
            tokens = {int(i): AddedToken(**token) for i, token in dict(listed).items()}
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path}: added_tokens_decoder={SHORT.repr(listed)} must map ids to tokens "
                              f"({in_short(error)}); mend it, or download it again") from None
        for i, token in sorted(tokens.items()):
            if self.rust.token_to_id(token.content) is None:
                self.rust.add_tokens([token])
            found = self.rust.token_to_id(token.content)
            if found != i:
                raise ConfigError(f"{path.parent}: tokenizer.json makes token {found} of {token.content!r}, "
                                  f"and tokenizer_config.json says {i}; take files that belong together")

    def read_template(self, data: Data, configured: object) -> None:
        """Read the template: the user's own file, the model's file, or the text in its config."""
        folder, own = self.folder, data.chat_template
        path = Path(own) if own else folder / "chat_template.jinja"
        if configured is None:
            configured = read_if_there(folder / "chat_template.json").get("chat_template")  # of a processor
        try:
            self.source = path.read_text() if own or path.is_file() else choose_template(configured, folder)
        except (OSError, ValueError) as error:
            raise ConfigError(f"the chat template {path} cannot be read: {error}") from None
        self.own_template = self.source if own else None
        if not isinstance(self.source, str):
            raise ConfigError(
                f"{folder} has a tokenizer without a chat template, as base models do; set data.prompt to a "
                'plain text such as "Question: {question}\\nAnswer:", or data.chat_template to a jinja file')
        where = path if path.is_file() else folder
        environment = chat_environment(data.date)
        try:
            self.template = environment.from_string(self.source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ConfigError(f"{where}: the chat template is not valid: {error}") from None
        # jinja ignores arguments that a template does not read.
        names = jinja2.meta.find_undeclared_variables(environment.parse(self.source))
        free = sorted(names - {*RENDER_ARGUMENTS, *self.special, *environment.globals})
        for name in self.arguments.keys() - set(free):
            raise ConfigError(
                f"data.template.{name}={self.arguments[name]!r}: the chat template of {where} has no "
                f"argument of that name; it reads {', '.join(free) or 'none'}")

    def render(self, question: str | Sequence[dict], system: str | None) -> str:
        """Render a question, or messages, up to and including the generation prompt. Raises ConfigError."""
        return self.conversation(as_messages(question, system), generate=True)

    def conversation(self, messages: list[dict[str, str]], generate: bool) -> str:
        """Render messages, and the opening of an answer if it is to `generate` one, as an encodable text."""
        if self.template is None:
            if not generate:
                return ""
            if len(messages) > 1:
                raise ConfigError(
                    "data.prompt takes one question, and a row has several messages; set data.chat_template "
                    "instead")
            return encodable(self.plain.format(question=messages[0]["content"]))
        arguments = {"tools": self.tools, "documents": None} | self.special | self.arguments
        try:
            return encodable(
                self.template.render(messages=messages, add_generation_prompt=generate, **arguments))
        except Exception as error:  # a template may compute anything
            advice = "does it accept data.system_prompt?" if len(messages) > 1 else "mend it"
            if "strftime_now" in str(error):
                advice = "it writes today's date: set data.date to one that stays, such as 2026-01-31"
            raise ConfigError(
                f"the chat template fails: {type(error).__name__}: {error}; {advice}") from error

    def closing_token(self) -> int | None:
        """Find the first special token that the template writes behind an answer; None without one."""
        return next(iter(self.behind_answer()), None)

    def behind_answer(self, *messages: dict) -> list[int]:
        """Find the special tokens that the template writes behind an answer, before what `messages` say."""
        text = self.conversation([ASKED, ANSWERED, *messages], generate=False)
        tail = text.rpartition("ANSWER")[2].partition("QUESTION")[0]
        added = self.rust.get_added_tokens_decoder()
        ids = self.rust.encode(tail, add_special_tokens=False).ids
        return [i for i in ids if i in added and added[i].special]

    def find_ends(self) -> frozenset[int]:
        """Collect every id that ends a completion, from all files: an id left out would end none."""
        ids = {self.rust.token_to_id(self.special.get("eos_token", ""))} - {None}
        for name in ("config.json", "generation_config.json"):
            path = self.folder / name
            eos = read_if_there(path).get("eos_token_id")
            numbers = eos if isinstance(eos, list) else [] if eos is None else [eos]
            if not all(type(number) is int and 0 <= number < self.size for number in numbers):
                raise ConfigError(
                    f"{path}: eos_token_id={SHORT.repr(eos)} must be one or several of the {self.size} "
                    "tokens of the model; mend it, or download it again")
            ids.update(numbers)
        if not ids:
            raise ConfigError(f"{self.folder} names no EOS: set eos_token_id in generation_config.json")
        return frozenset(ids)

    def find_begin(self) -> tuple[int, ...]:
        """Find the ids that the tokenizer puts before a text, such as a BOS. Those behind a text are never
        used, for a prompt goes on."""
        encoding = self.rust.encode("a")
        return tuple(encoding.ids[:[*encoding.special_tokens_mask, 0].index(0)])

    def find_opened(self) -> str:
        """Find the tags that a prompt ends with, such as <think>: the answer begins within them."""
        try:
            text = self.render("?", None)
        except ConfigError:  # said with the first problem, if it fails there too
            return ""
        if "\ufffd" in text:
            raise ConfigError(f"{self.folder}: its chat template writes half a character; mend it, or set "
                              "data.chat_template")
        split = self.rust.encode_special_tokens or self.own_template is not None
        markers = () if split else {*self.special.values(), *MARKER.findall(text)}
        for marker in markers:
            if marker in text and len(self.rust.encode(marker, add_special_tokens=False)) != 1:
                raise ConfigError(f"{self.folder}: its tokenizer cuts up {marker!r}, which its chat template "
                                  "writes; take the tokenizer that belongs to the model")
        opened = ""
        while (tag := OPENING_TAG.search(text)) and tag[0].strip() not in self.special.values():
            text, opened = text[:tag.start()], tag[0] + opened
        return opened

    def require_whole(self, texts: list[str]) -> None:
        """Raise ConfigError if tokens do not hold what is written in texts, but for spaces and
        normalization."""
        names = [re.escape(token.content) for token in self.rust.get_added_tokens_decoder().values()]
        aside = re.compile("|".join([r"\s", "\u2581", *names]))  # no normalizer reaches special tokens
        normalize = self.rust.normalizer.normalize_str if self.rust.normalizer else str
        for text in texts:
            kept = self.decode(self.rust.encode(text, add_special_tokens=False).ids, special=True)
            if aside.sub("", normalize(aside.sub(" ", text))) != aside.sub("", kept):
                raise ConfigError(f"the tokenizer of {self.folder} loses text: of {SHORT.repr(text)} it "
                                  f"leaves {SHORT.repr(kept)}; take the tokenizer that belongs to the model")

    def encode(self, texts: list[str]) -> list[tuple[int, ...]]:
        """Tokenize texts. A plain prompt gets a BOS, once, if the tokenizer adds one; a template writes its
        own."""
        ids = [tuple(e.ids) for e in self.rust.encode_batch(texts, add_special_tokens=False)]
        if self.template is None:
            count = len(self.begin)
            ids = [x if x[:count] == self.begin else self.begin + x for x in ids]
        highest = max(map(max, filter(None, ids)), default=0)
        if highest >= self.size:
            raise ConfigError(
                f"the tokenizer of {self.folder} makes token {highest} of a prompt, and there are "
                f"{self.size} in the model; take the tokenizer that belongs to it")
        return ids

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """Decode tokens, by default without special ones, the EOS among them."""
        return self.rust.decode(list(ids), skip_special_tokens=not special)

    def read(self, sample: Sample) -> tuple[str, ...]:
        """Decode the turns of a completion, the policy's by turns with an environment's; the last is the
        policy's, which the verifier and rewards read.

        A turn of the policy ends before its first token that ends one, however such tokens are spelled, and
        begins with the tags that its prompt opens. EOS, BOS and padding are left out.
        """
        texts, opened = [], self.opened
        for start, to in sample.turns:
            ids, own = sample.ids[start:to], len(texts) % 2 == 0
            if own:
                ids = ids[:min([k for k, i in enumerate(ids) if i in self.ends], default=to)]
            text = self.rust.decode([i for i in ids if i not in self.hidden], skip_special_tokens=False)
            if own:
                texts.append(opened + text)
            else:
                opened = self.opened if text.endswith(self.opened) else ""
                texts.append(text.removesuffix(opened))
        return tuple(texts if to > start else texts[:-2])  # without a reply that nobody has read


def load_tokenizer(cfg: Config, folder: Path) -> Tokenizer:
    """Read the tokenizer of a model folder as a config has it, changed by leaves. Raises ConfigError."""
    return leaves.through("tokenizer", cfg, Tokenizer(folder, cfg.data, cfg.rollout.stop or ()))


def as_messages(question: str | Sequence[dict], system: str | None) -> list[dict]:
    """Put `system` before a question, or before messages that have no system message of their own."""
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else [*question]
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def choose_template(configured: object, folder: Path) -> object:
    """Choose the template named "default" if a model names several. Raises ConfigError."""
    if isinstance(configured, list):
        configured = {one.get("name"): one.get("template") for one in configured if isinstance(one, dict)}
    if not isinstance(configured, dict):
        return configured
    if "default" not in configured:
        raise ConfigError(
            f"{folder} has the chat templates {', '.join(map(str, configured))} and none named default; "
            "write one to a file, and set data.chat_template to it")
    return configured["default"]


def read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def require_file(path: Path, what: str) -> Path:
    if not path.is_file():
        raise ConfigError(f"{path} not found; the model folder must hold {what}")
    return path


class GenerationTag(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}, by which transformers finds the tokens of an assistant; it
    renders its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def chat_environment(today: str | None) -> ImmutableSandboxedEnvironment:
    """Build the jinja dialect of chat templates (transformers, chat_template_utils).

    strftime_now is there if `today` (data.date) is: a prompt with the real date would make a run that is
    resumed tomorrow another run. Without it Llama 3's template falls back on its own fixed date.
    """

    def refuse(message):
        raise jinja2.TemplateError(message)

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag])
    env.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # jinja's own escapes <, > and & for HTML
    env.globals["raise_exception"] = refuse
    if today:
        try:
            env.globals["strftime_now"] = date.fromisoformat(today).strftime
        except ValueError as error:
            raise ConfigError(f"data.date={today!r} must be a day as YYYY-MM-DD: {error}") from None
    return env
