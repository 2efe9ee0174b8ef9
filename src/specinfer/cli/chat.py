"""One conversation with a model: what was said so far, and the commands that are typed in between."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from specinfer.cli.screen import Screen, numbers_line
from specinfer.errors import RequestError

if TYPE_CHECKING:  # torch comes with these, and takes seconds to import
    from specinfer.llm import LLM
    from specinfer.outputs import RequestOutput
    from specinfer.prompts import Message
    from specinfer.sampling import SamplingParams


class Chat:
    """One conversation: its messages so far, and the commands that begin with a slash."""

    HELP = "/clear forgets the conversation, /stats shows the last answer's numbers, /exit or Ctrl-D leaves"

    def __init__(self, llm: "LLM", screen: Screen, params: "SamplingParams", system_prompt: str | None) -> None:
        self._llm, self._screen, self._params = llm, screen, params
        self._first: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._messages = list(self._first)
        self._last: RequestOutput | None = None

    def check(self) -> None:
        """Refuses a model without a chat template before anything is typed.

        Raises:
            RequestError: There is none, or it does not take the system prompt.
        """
        self._llm.chat_prompt([*self._first, {"role": "user", "content": "Hello"}])

    def say(self, text: str, *, stoppable: bool) -> None:
        """Answers one message; what was shown of a stopped answer stays part of the conversation.

        Raises:
            RequestError: The conversation cannot be answered; it is left as it was.
        """
        messages = [*self._messages, {"role": "user", "content": text}]
        prompt = self._llm.chat_prompt(messages)
        try:
            answer = self._screen.stream(self._llm, prompt, self._params, stoppable=stoppable)
        except RequestError as error:
            raise RequestError(f"{error} (/clear forgets the conversation)") from error
        self._messages = [*messages, {"role": "assistant", "content": answer.text}]
        self._last = answer.output or self._last  # a stopped answer has no numbers

    def messages(self, lines: Iterable[str]) -> Iterator[str]:
        """The lines to answer; commands among them are followed, up to /exit."""
        for line in lines:
            match line.split()[0]:
                case "/exit" | "/quit" | "/bye":
                    return
                case "/clear":
                    self._messages, self._last = list(self._first), None
                case "/stats":
                    self._screen.note("no answer yet" if self._last is None else numbers_line(self._last))
                case word if word.startswith("/"):
                    self._screen.note(self.HELP)
                case _:
                    yield line
