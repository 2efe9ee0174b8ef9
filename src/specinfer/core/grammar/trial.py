"""Trials of grammars from untrusted clients: another process compiles each one first, with limits on time and memory.

A constraint of a kilobyte can take minutes and gigabytes to compile. Only what passes its trial is compiled where the
engine runs.
"""

import json
from collections.abc import Callable
from dataclasses import astuple

from specinfer.core.bounded_process import BoundedProcesses, answer_questions
from specinfer.core.grammar.checks import Checked, check, loosest
from specinfer.core.grammar.matcher import STACK_BYTES, make_tokenizer

CPU_SECONDS = 0.25  # of one trial; schemas of real tools take a tenth of that
MEMORY_BYTES = 512 << 20  # that one trial may add
_TOO_MUCH = (
    f"takes more than {CPU_SECONDS:g} s or {MEMORY_BYTES >> 20} MiB to compile; have fewer patterns, repetitions and "
    "alternatives"
)
COMMAND: tuple[str, ...] = ("-m", "specinfer.core.grammar.trial")
_NICENESS = 5  # the engine's threads come first
_MAX_PROCESSES = 2  # a trial at its limit does not delay another


class GrammarTrials:
    """Processes that try to compile grammars. Any thread may use them.

    Args:
        tokenizer: Text of the tokenizer.json.
        num_tokens: Number of tokens of llguidance's tokenizer.
        end_token: Token that marks the end of the text.
    """

    def __init__(self, tokenizer: str, num_tokens: int, end_token: int) -> None:
        job = json.dumps([tokenizer, num_tokens, end_token]).encode()
        self._processes = BoundedProcesses(COMMAND, job, _MAX_PROCESSES, _NICENESS)
        self._processes.start()

    def check(self, kind: str, text: str) -> Checked:
        """Check a constraint; see `checks.py`.

        Raises:
            StartError: No process for trials can be started.
            EngineDeadError: The client has left.
        """
        answer = self._processes.ask(json.dumps([kind, text]).encode())
        ignored: tuple[tuple[str, str], ...] = ()
        if answer is None:
            looser = loosest(kind, text)
            ignored = looser.ignored
            answer = self._processes.ask(json.dumps([kind, looser.text]).encode()) if ignored else None
        if answer is None:
            return Checked(None, ("", _TOO_MUCH))
        made, fault, others = json.loads(answer)
        return Checked(made, tuple(fault), (*ignored, *map(tuple, others)))

    def close(self) -> None:
        """End the processes; those at work end with their trial."""
        self._processes.close()


def _prepare(job: bytes) -> Callable[[bytes], bytes]:
    text, num_tokens, end_token = json.loads(job)
    tokenizer = make_tokenizer(text, num_tokens, end_token)
    return lambda question: json.dumps(astuple(check(tokenizer, end_token, *json.loads(question)))).encode()


def main() -> None:
    """Try grammars until the process that asks has ended."""
    # The last trial's stack may still be there.
    answer_questions(_prepare, lambda _: CPU_SECONDS, MEMORY_BYTES + 2 * STACK_BYTES)


if __name__ == "__main__":
    main()
