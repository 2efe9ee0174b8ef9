"""A peer's adapter that says one token again and again, takes no time but reports some, and fails as it is told.

The variable FAKE_PEER holds what it is to do in place of its nth `generate`, such as "3 die".
"""

import os
import sys
import time

from benchmarks.peers.interface import Ask, Generated, Load, Settings
from benchmarks.process import WorkerError

TOKEN = 7


def create(num_threads: int) -> "FakePeer":
    return FakePeer(num_threads)


class FakePeer:
    """Fastest with 3 guesses; plain decoding takes a second for each token."""

    def __init__(self, num_threads: int) -> None:
        self.version = f"fake on {num_threads}"
        self._num_asked = 0
        when, _, self._failure = os.environ.get("FAKE_PEER", "0 none").partition(" ")
        self._when = int(when)

    def load(self, job: Load) -> list[Settings]:
        print(f"loading {job.target}")  # as libraries do
        if self._failure == "refuse":
            raise WorkerError("it does not like the model")
        if job.looks_up:
            return [{"num_draft": 3, "looked_up": True}]
        return [{}] if job.drafter is None else [{"num_draft": count} for count in range(1, 11)]

    def generate(self, ask: Ask) -> Generated:
        self._num_asked += 1
        if self._num_asked == self._when:
            if self._failure == "die":
                print("last words", file=sys.stderr)
                os._exit(3)
            if self._failure == "hang":
                time.sleep(60)
            if self._failure == "raise":
                raise RuntimeError("\nwhere it was\nwhat it was\n")
        num_tokens = ask.max_tokens - 1 if self._failure == "stop" else ask.max_tokens
        each = 1.0 + abs(ask.settings["num_draft"] - 3) if ask.settings else 1.0
        outputs = [[TOKEN] * num_tokens] * (ask.request or {}).get("n", 1)
        return Generated(outputs, 2 if ask.settings else 1, 0.5, each * num_tokens)
