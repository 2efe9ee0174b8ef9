"""`--log-format json`: an object a line, with the request that it is about."""

import json
import logging
from collections.abc import Iterator

import pytest

from specinfer.server import logs
from specinfer.server.middleware import REQUEST_ID


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, ours = root.handlers[:], root.level, logging.getLogger("specinfer").level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("specinfer").setLevel(ours)
    logging.captureWarnings(False)


def _lines(capfd: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    logs.flush()
    return [json.loads(line) for line in capfd.readouterr().err.splitlines()]


def test_each_line_is_an_object_with_its_request_and_exception(capfd: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "json")
    logger = logging.getLogger("specinfer.test")
    logger.info("two\nlines of %s", "text")
    token = REQUEST_ID.set("request-7")
    try:
        raise ValueError("a reason")
    except ValueError:
        logger.exception("it failed")
    finally:
        REQUEST_ID.reset(token)
    plain, failed = _lines(capfd)
    assert plain["message"] == "two\nlines of text"
    assert (plain["level"], plain["logger"]) == ("info", "specinfer.test")
    assert plain["time"].endswith("+00:00")
    assert "request" not in plain
    assert failed["request"] == "request-7"
    assert failed["exception"].splitlines()[-1] == "ValueError: a reason"


def test_text_is_the_default(capfd: pytest.CaptureFixture[str]) -> None:
    logs.configure("info")
    logging.getLogger("specinfer.test").info("hello")
    logs.flush()
    assert capfd.readouterr().err.endswith("specinfer.test: hello\n")
