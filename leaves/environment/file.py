"""Call the user's own environment (environment.file), in workers that may be ended."""

from collections.abc import Sequence
from dataclasses import replace

from infra.tokenizer import Tokenizer
from infra.user_files import describe_end, read_file, report_once
from infra.user_worker import Source
from leaves.environment.settings import Environment
from leaves.environment.worker import Reply, Turn, call_environment, list_schemas, make_reply
from records import Problem, frozen
from settings.loader import ConfigError
from verify.workers import WORKERS, Call, Limits, OverLimit

CHARACTERS = 200  # of one token at most, so that a reply with more for each token of the context cannot fit


@frozen
class EnvironmentFile:
    """A file with reply() or tools(), as it was when the run began, and how it is called."""

    settings: Environment
    source: Source
    tools: tuple[dict, ...] = ()  # as chat templates take them; empty with reply()
    format: str = "plain"         # of their calls

    @property
    def limits(self) -> Limits:
        own = self.settings
        named = "environment.seconds", "environment.gib"
        return Limits("environment", int(own.gib * 2**30), WORKERS, own.seconds, named)

    def error(self, what: str) -> ConfigError:
        return ConfigError(f"environment.file={self.settings.file}: {what}")

    def fitted(self, tokenizer: Tokenizer) -> "EnvironmentFile":
        """Choose the format of calls by the chat template. Raises ConfigError without a place for tools."""
        form, template = self.settings.format, "" if tokenizer.template is None else tokenizer.source
        takes_tools = "tools" in template
        if form == "auto" and takes_tools:
            form = "qwen" if "<tool_call>" in template else "llama"
        elif form == "auto":
            form = "plain"
        if self.tools and form != "plain" and not takes_tools:
            raise ConfigError(
                f"environment.format={form}: the chat template of {tokenizer.folder} has no place for tools; "
                "set it to plain and describe them in data.system_prompt, or set data.chat_template")
        return replace(self, format=form)

    def call(self, function: object, *given: object) -> Call:
        return Call(function, self.source, self.settings.seconds, *given, limits=self.limits)

    def ask(self, text: str, newest: str, row: dict) -> Call:
        """Ask for the reply to a turn: the text so far, and the newest turn in it."""
        turn = Turn(text, newest, row, self.format, CHARACTERS * self.settings.max_context)
        return self.call(call_environment, turn)

    def wait(self, call: Call, row_id: str) -> Reply:
        """Wait for a reply; a call that has to be ended is a failure, which is said once for each reason.

        Raises ConfigError for an error in the file.
        """
        try:
            reply = call.result()
        except OverLimit as error:
            goes_on = "the model reads that" if self.tools else "its completion ends there"
            report_once(f"environment.file={self.settings.file}", self.limits, str(error), row_id,
                        f"{goes_on}, as of all that end so (environment/failures)")
            if not self.tools:
                return Reply(None, failures=1)
            how = describe_end(self.limits, str(error))
            message = {"role": "tool", "name": "", "content": f"error: the call {how}"}
            return make_reply([message], self.format, 1)
        if isinstance(reply, str):
            raise self.error(f"{reply} (row {row_id})")
        return reply

    def try_rows(self, *sets: Sequence[Problem]) -> None:
        """Ask for a reply to an empty text, for the first and the last row of each set.

        Raises ConfigError if a call fails.
        """
        for problems in sets:
            for problem in (problems[0], problems[-1]):
                if self.wait(self.ask("", "", problem.row), problem.id).failures:
                    raise self.error(f"before the run, a call had to be ended (row {problem.id})")


def open_environment(settings: Environment) -> EnvironmentFile | None:
    """Read the file of an environment and list its tools; None without a file. Raises ConfigError."""
    if settings.file is None:
        return None
    own = EnvironmentFile(settings, read_file(settings.file, "environment.file"))
    try:
        schemas = own.call(list_schemas).result()
    except OverLimit as error:
        how = describe_end(own.limits, str(error))
        raise own.error(f"before the run, a call {how}") from None
    if isinstance(schemas, str):
        raise own.error(schemas)
    return replace(own, tools=tuple(schemas))
