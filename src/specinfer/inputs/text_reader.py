"""Texts and conversations turned into token ids and back, in the calling thread or in processes with limits.

Tokenizers and templates are programs that come with models, and take the input of untrusted clients: a long text can
keep them busy, fill the memory, or end the process in native code. A server lets other processes read long texts.
"""

import json
import logging
import os
import pickle
import sys
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from specinfer.core.bounded_process import BoundedProcesses, StartError, answer_questions
from specinfer.core.errors import ContextLengthError, RequestError
from specinfer.core.rules import AUTO
from specinfer.inputs.chat.template import ChatTemplate

logger = logging.getLogger(__name__)
SHORT_BYTES = 1 << 14  # texts below take some 20 ms at most, and are read in the calling thread
MEMORY_BYTES = 1 << 30  # that all texts together may add to a process; a megabyte of text takes some 250 MiB
COMMAND: tuple[str, ...] = ("-m", "specinfer.inputs.text_reader")
_NICENESS = 10  # the engine's threads come first
_MAX_PROCESSES = 4
_LEAST_SECONDS, _SECONDS_A_BYTE = 1.5, 8e-6  # processor time; usual texts take a tenth of that
_IDS_AT_ONCE = 1 << 14  # a million would keep all other threads waiting for 20 to 50 ms
_IDS, _TEXT, _REFUSED = b"i", b"t", b"r"  # first byte of an answer


class LocalTextReader:
    """A reader in the calling thread.

    Args:
        tokenizer: The model's tokenizer, or None if there is none and nothing can be read.
        max_model_len: Conversations that cannot fit into this many tokens are refused.
        parsers: Names of the formats of thoughts and of calls, or "auto".
    """

    def __init__(self, tokenizer: Any, max_model_len: int, parsers: tuple[str, str] = (AUTO, AUTO)) -> None:
        self._tokenizer, self._max_model_len = tokenizer, max_model_len
        self.chat = ChatTemplate(tokenizer, max_model_len, parsers)

    def encode(self, text: str, field: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Raises:
            RequestError: It is not valid text; the message begins with `field`.
        """
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        except (TypeError, UnicodeError) as error:
            raise RequestError(
                f"{field}: the text is not valid Unicode (a lone surrogate); mend its decoding"
            ) from error
        return ids

    def read_chat(self, messages: Any, tools: Sequence[Mapping[str, Any]] | None, **options: Any) -> list[int]:
        """Return the token ids of a conversation; see `ChatTemplate.read`."""
        return self.chat.read(messages, tools, **options)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return str(self._tokenizer.decode(ids))

    def tokenized(self, text: str, *, add_special_tokens: bool, with_strings: bool) -> str:
        """Return what `described` returns, for the tokens of a text."""
        return self.described(self.encode(text, "prompt", add_special_tokens=add_special_tokens), with_strings)

    def described(self, ids: Sequence[int], with_strings: bool) -> str:
        """Return the fields of an object in JSON: the number of tokens, their ids, and their strings or null."""
        strings = list(map(str, self._tokenizer.convert_ids_to_tokens(ids))) if with_strings else None
        return json.dumps({"count": len(ids), "tokens": ids, "token_strs": strings}, separators=(",", ":"))[1:-1]

    def pickled(self) -> bytes:
        """Return what `unpickled` makes an equal reader of."""
        return pickle.dumps((self._tokenizer, self._max_model_len, self.chat.formats.names, self.chat.override))

    @classmethod
    def unpickled(cls, data: bytes) -> "LocalTextReader":
        tokenizer, max_model_len, parsers, template = pickle.loads(data)
        made = cls(tokenizer, max_model_len, parsers)
        made.chat.replace(template)
        return made


class BoundedTextReader:
    """A reader of long texts in other processes. Any thread may use it.

    It refuses texts that take too much time or memory, with a `RequestError`.

    Args:
        local: The reader that each process gets a copy of; it reads short texts, and all if no process can be started.
    """

    def __init__(self, local: LocalTextReader) -> None:
        self._local = local
        self._lock = threading.Lock()  # of the creation of the processes
        self._processes: BoundedProcesses | None = None
        self._has_failed = False

    def encode(self, text: str, field: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._ask(field, "encode", text, field, add_special_tokens=add_special_tokens)
        return ids

    def read_chat(self, messages: Any, tools: Sequence[Mapping[str, Any]] | None, **options: Any) -> list[int]:
        ids: list[int] = self._ask("messages", "read_chat", messages, tools, **options)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._ask("tokens", "decode", ids)
        return text

    def tokenized(self, text: str, *, add_special_tokens: bool, with_strings: bool) -> str:
        options = {"add_special_tokens": add_special_tokens, "with_strings": with_strings}
        fields: str = self._ask("prompt", "tokenized", text, **options)
        return fields

    def described(self, ids: Sequence[int], with_strings: bool) -> str:
        fields: str = self._ask("messages", "described", ids, with_strings)
        return fields

    def close(self) -> None:
        """End the processes; those at work end with their text. Others are started if there are more texts."""
        with self._lock:
            if self._processes is not None:
                self._processes.close()
                self._processes = None

    def _ask(self, field: str, method: str, *values: Any, **options: Any) -> Any:
        question = pickle.dumps((method, values, options))
        if len(question) >= SHORT_BYTES and not self._has_failed:
            try:
                answer = self._started().ask(question)
            except StartError as error:
                logger.warning("texts are read in this process, without limits on time and memory: %s", error)
                self._has_failed = True
            else:
                return _read_answer(answer, field, len(question))
        return getattr(self._local, method)(*values, **options)

    def _started(self) -> BoundedProcesses:
        with self._lock:
            if self._processes is None:
                try:
                    job = self._local.pickled()  # takes half a second with a large vocabulary
                except Exception as error:  # a class of the caller's may raise anything
                    raise StartError(f"the tokenizer cannot be sent to another process: {error}") from error
                self._processes = BoundedProcesses(COMMAND, job, _MAX_PROCESSES, _NICENESS)
            return self._processes


TextReader: TypeAlias = LocalTextReader | BoundedTextReader


def _seconds_for(num_bytes: int) -> float:
    return _LEAST_SECONDS + num_bytes * _SECONDS_A_BYTE


def _read_answer(answer: bytes | None, field: str, num_bytes: int) -> list[int] | str:
    if answer is None:
        limits = f"{_seconds_for(num_bytes):.1f} s or {MEMORY_BYTES >> 20} MiB"
        raise RequestError(f"{field}: takes more than {limits} to read; shorten it")
    kind, rest = answer[:1], answer[1:]
    if kind == _IDS:
        numbers, ids = memoryview(rest).cast("i"), list[int]()
        for start in range(0, len(numbers), _IDS_AT_ONCE):
            ids += numbers[start : start + _IDS_AT_ONCE].tolist()
        return ids
    if kind == _TEXT:
        return rest.decode()
    message, length = json.loads(rest)
    raise RequestError(message) if length is None else ContextLengthError(message, *length)


def _prepare(job: bytes) -> Callable[[bytes], bytes]:
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers would take seconds to import it
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1"}
    reader = LocalTextReader.unpickled(job)

    def answer(question: bytes) -> bytes:
        method, values, options = pickle.loads(question)
        try:
            result = getattr(reader, method)(*values, **options)
        except RequestError as error:
            length = list(vars(error).values()) if isinstance(error, ContextLengthError) else None
            return _REFUSED + json.dumps([str(error), length]).encode()
        if isinstance(result, str):
            return _TEXT + result.encode(errors="replace")
        return _IDS + array("i", result).tobytes()

    return answer


def main() -> None:
    """Read texts until the process that asks has ended."""
    answer_questions(_prepare, _seconds_for, MEMORY_BYTES)


if __name__ == "__main__":
    main()
