"""Rendering by a chat template, which ends after a time: templates come with models, and may loop for ever."""

import ctypes
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

MAX_SECONDS = 5.0  # usual templates take milliseconds


class SlowTemplateError(Exception):
    """The chat template takes too long."""

    def __str__(self) -> str:
        return f"it takes longer than {MAX_SECONDS:g} s"


def render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Return the text of messages; `options` are those of `apply_chat_template`.

    Raises:
        SlowTemplateError: It takes too long.
        Exception: Templates are programs and may raise anything.
    """
    with _limited(MAX_SECONDS):
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise `SlowTemplateError` in this thread if a block of Python code takes longer."""
    lock, thread, is_over = threading.Lock(), ctypes.c_ulong(threading.get_ident()), threading.Event()

    def interrupt() -> None:
        with lock:
            if not is_over.is_set():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(SlowTemplateError))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            is_over.set()
        timer.cancel()
        # One that came too late is raised here: Python looks for it at each jump back. While one is pending, all
        # threads are slow, and those that are traced stand still.
        for _ in range(100):
            pass
