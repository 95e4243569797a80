"""Tokenize an environment's replies behind the policy's own tokens, which are never made again from text.

A chat template renders a whole conversation anew for each turn, and its text for earlier turns need not be
the one that was sampled and read there. So only the end of such a text is taken: all behind the token that
closes an answer. It is refused if the template writes the text before it in another way than it was sampled,
as templates do that drop the thoughts of earlier answers or move the system prompt.
"""

from collections.abc import Sequence

from infra.tokenizer import Tokenizer
from settings.loader import SHORT, ConfigError, encodable

QUESTION = {"role": "user", "content": "?"}
BEFORE = ([], [{"role": "system", "content": "rule"}], [QUESTION, {"role": "assistant", "content": "yes"}])
ANSWER, THOUGHT = "ANSWER", "<think>\nthought\n</think>\n\n"
Messages = list[dict[str, str]]


class Splicer:
    """Write replies as tokens for one tokenizer and its template."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.closing = tokenizer.closing_token()
        self.closing_text = "" if self.closing is None else tokenizer.rust.id_to_token(self.closing)
        self.end_text = self.closing_text or tokenizer.rust.id_to_token(min(tokenizer.eos_ids))
        self.fitting: set[tuple[str, ...]] = set()  # roles that have passed `require_fit`

    def ends_turn(self, token: int) -> bool:
        """Tell whether a reply may stand behind a completion's last token: of a stop text, or the token that
        closes an answer. Another token that ends a sequence ends the completion."""
        tokenizer = self.tokenizer
        return token not in tokenizer.eos_ids or token in tokenizer.stop_ids or token == self.closing

    def tokens(self, content: str | Messages, so_far: Sequence[int]) -> list[int]:
        """Tokenize a reply: messages as the template renders them, with the opening of the next answer, or a
        text. A text behind the token that closes an answer is a message of the user.

        Raises ConfigError if the tokens would not be those of the conversation as the template renders it, or
        not read back as the text.
        """
        closed = so_far[-1] == self.closing
        if isinstance(content, str):
            if not closed:
                return self.text_tokens(content, so_far)
            content = [{"role": "user", "content": content}]
        roles = tuple(message["role"] for message in content)
        if roles not in self.fitting:
            self.require_fit(roles)
            self.fitting.add(roles)
        ids = self.encode_behind(self.render_tail([QUESTION], self.answers()[0], content), self.end_text)
        return ids if closed else [self.closing, *ids]

    def text_tokens(self, text: str, so_far: Sequence[int]) -> list[int]:
        text, before = encodable(text), self.tokenizer.decode(so_far, special=True)
        for anchor in (self.end_text, "\n"):  # some write a space behind a special token
            ids = self.encode_behind(text, anchor)
            whole = self.tokenizer.decode([*so_far, *ids], special=True)
            if whole == before + text:
                return ids
        raise ConfigError(f"environment.file: the reply {SHORT.repr(text)} is read back from its tokens "
                          f"as {SHORT.repr(whole[len(before):])}; reply with other characters")

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.rust.encode(text, add_special_tokens=False).ids

    def encode_behind(self, text: str, anchor: str) -> list[int]:
        """Tokenize a text that follows other tokens: some tokenizers write a space before a first one."""
        return self.encode(anchor + text)[len(self.encode(anchor)):]

    def answers(self) -> list[str]:
        """List the kinds of answers that the template must leave as they are."""
        if self.tokenizer.opened:
            return [(THOUGHT + ANSWER).removeprefix(self.tokenizer.opened)]
        return [ANSWER, THOUGHT + ANSWER] if "</think>" in self.tokenizer.source else [ANSWER]

    def render_tail(self, asked: Messages, answer: str, messages: Messages) -> str:
        """Render messages, and the opening of the next answer, behind the token that closes an answer."""
        said = {"role": "assistant", "content": self.tokenizer.opened + answer}
        start = self.tokenizer.conversation(asked, True) + answer + self.closing_text
        whole = self.tokenizer.conversation([*asked, said, *messages], True)
        if self.closing is None:
            raise self.misfit(messages, "closes an answer with no token of its own")
        if not whole.startswith(start):
            raise self.misfit(messages, f"does not leave the answer {answer!r} as it was sampled")
        return whole[len(start):]

    def require_fit(self, roles: tuple[str, ...]) -> None:
        """Check that messages of these roles are rendered alike behind all answers in all conversations, once
        and again, and that their tokens alone are their tokens in the whole. Raises ConfigError."""
        messages = [{"role": role, "content": "reply"} for role in roles]
        tokenizer, tails = self.tokenizer, set()
        for before in BEFORE:
            asked = [*before, QUESTION]
            try:
                opening = tokenizer.conversation(asked, True)
            except ConfigError:  # it takes no system prompt, say
                continue
            for answer in self.answers():
                tail = self.render_tail(asked, answer, messages)
                tails.add(tail)
                said = [{"role": "assistant", "content": tokenizer.opened + answer}, *messages]
                closed = answer + self.closing_text
                start = opening + closed
                if tokenizer.conversation([*asked, *said, *said], True) != start + tail + closed + tail:
                    raise self.misfit(messages, "writes a second turn in another way than the first")
                if self.encode(start + tail) != self.encode(start) + self.encode_behind(tail, self.end_text):
                    raise self.misfit(messages, "makes other tokens of them alone than of the whole")
        if len(tails) > 1:
            raise self.misfit(messages, "writes them differently behind different answers")

    def misfit(self, messages: Messages, what: str) -> ConfigError:
        return ConfigError(
            f"environment.file: before messages of the role {', '.join(one['role'] for one in messages)}, "
            f"the chat template of {self.tokenizer.folder} {what}; reply with another role, or set "
            "data.chat_template to a template that only appends")
