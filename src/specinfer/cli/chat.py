"""A conversation with a model: its messages so far, and the commands that are typed between them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from specinfer.cli.sampling_options import SamplingOptions
from specinfer.cli.screen import Answer, Screen
from specinfer.core.errors import RequestError

if TYPE_CHECKING:  # importing these imports torch, which takes seconds
    from specinfer.core.sampling import SamplingParams
    from specinfer.inputs.arguments import Message
    from specinfer.llm import LLM


class Partner(Protocol):
    """The model that answers: in this process, or behind a server.

    All methods raise a `RequestError` for what the model cannot do.
    """

    def check(self, messages: "Sequence[Message]") -> None:
        """Check before anything is typed that the model has a chat template which accepts these messages."""
        ...

    def answer(self, messages: "Sequence[Message]", *, stoppable: bool) -> Answer:
        """Generate and show the next message of a conversation."""
        ...

    def complete(self, prompt: str, *, stoppable: bool) -> Answer:
        """Generate and show a completion."""
        ...


@dataclass(frozen=True, slots=True)
class LocalPartner:
    """A model in this process."""

    llm: "LLM"
    model: str
    screen: Screen
    sampling: SamplingOptions
    params: "SamplingParams"

    def check(self, messages: "Sequence[Message]") -> None:
        self.llm.chat_prompt(messages)

    def answer(self, messages: "Sequence[Message]", *, stoppable: bool) -> Answer:
        return self.screen.stream(self.llm, self.llm.chat_prompt(messages), self.params, stoppable=stoppable)

    def complete(self, prompt: str, *, stoppable: bool) -> Answer:
        return self.screen.stream(
            self.llm, prompt, self.sampling.fit(self.params, self.llm, prompt), stoppable=stoppable
        )


class Chat:
    """One conversation: its messages so far, and the commands that begin with a slash."""

    HELP = "/clear forgets the conversation, /stats shows the last answer's numbers, /exit or Ctrl-D leaves"

    def __init__(self, partner: Partner, screen: Screen, system_prompt: str | None) -> None:
        self._partner, self._screen = partner, screen
        self._first: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._messages = list(self._first)
        self._numbers: str | None = None  # the last answer's statistics

    def check(self) -> None:
        """Check before anything is typed that the model has a chat template.

        Raises:
            RequestError: There is no chat template, or it does not accept the system prompt.
        """
        self._partner.check([*self._first, {"role": "user", "content": "Hello"}])

    def send(self, text: str, *, stoppable: bool) -> None:
        """Answer one message; the shown part of a stopped answer stays in the conversation.

        Raises:
            RequestError: The conversation cannot be answered; it stays as it was.
        """
        messages = [*self._messages, {"role": "user", "content": text}]
        try:
            answer = self._partner.answer(messages, stoppable=stoppable)
        except RequestError as error:
            raise RequestError(f"{error} (/clear forgets the conversation)") from error
        self._messages = [*messages, {"role": "assistant", "content": answer.text}]
        self._numbers = answer.numbers or self._numbers  # a stopped answer has no statistics

    def messages(self, lines: Iterable[str]) -> Iterator[str]:
        """Yield the lines to answer, and run the commands among them, until /exit."""
        for line in lines:
            match line.split()[0]:
                case "/exit" | "/quit" | "/bye":
                    return
                case "/clear":
                    self._messages, self._numbers = list(self._first), None
                case "/stats":
                    self._screen.note(self._numbers or "no answer yet")
                case word if word.startswith("/"):
                    self._screen.note(self.HELP)
                case _:
                    yield line
