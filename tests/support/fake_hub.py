"""A Hugging Face Hub on this machine: serves folders as models, so that downloads can be tested without a network."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest


class FakeHub:
    """A server of the model folders `root/org/name`, and `root/org/name@revision` for revisions that are not main.

    Attributes:
        requested: Paths of the files that were sent.
        gated: Names of models whose terms nobody has accepted.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.requested: list[str] = []
        self.gated: set[str] = set()
        self._commits: dict[str, str] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:  # the server's names
                hub.answer(self, with_body=False)

            def do_GET(self) -> None:
                hub.answer(self, with_body=True)

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def answer(self, handler: BaseHTTPRequestHandler, *, with_body: bool) -> None:
        parts = [unquote(part) for part in urlparse(handler.path).path.strip("/").split("/")]
        is_api = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if is_api else parts[:2])
        revision = (parts[5:6] if is_api else parts[3:4] if parts[2:3] == ["resolve"] else []) or ["main"]
        at = self._commits.get(revision[0], name if revision[0] == "main" else f"{name}@{revision[0]}")
        folder, commit = self.root / at, hashlib.sha1(at.encode()).hexdigest()
        self._commits[commit] = at
        headers = {"X-Repo-Commit": commit}
        if name in self.gated:
            return _send(handler, 403, b"{}", {"X-Error-Code": "GatedRepo"}, with_body)
        if not folder.is_dir():
            missing = "RevisionNotFound" if (self.root / name).is_dir() else "RepoNotFound"
            return _send(handler, 404, b"{}", {"X-Error-Code": missing}, with_body)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        if is_api and "tree" in parts:
            entries = [{"type": "file", "path": str(file.relative_to(folder)), "size": file.stat().st_size,
                        "oid": _digest(file)} for file in files]  # fmt: skip
            return _send(handler, 200, json.dumps(entries).encode(), headers, with_body)
        if is_api:
            siblings = [{"rfilename": str(file.relative_to(folder)), "size": file.stat().st_size} for file in files]
            record = {"id": name, "modelId": name, "sha": commit, "siblings": siblings, "private": False, "tags": []}
            return _send(handler, 200, json.dumps(record).encode(), headers, with_body)
        file = folder / "/".join(parts[4:])
        if not file.is_file():
            return _send(handler, 404, b"", {"X-Error-Code": "EntryNotFound"}, with_body)
        if with_body:
            self.requested.append(f"{name}/{file.relative_to(folder)}")
        return _send(handler, 200, file.read_bytes(), {**headers, "ETag": f'"{_digest(file)}"'}, with_body)


def _send(handler: BaseHTTPRequestHandler, code: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
    handler.send_response(code)
    for name, value in {**headers, "Content-Length": str(len(body)), "Content-Type": "application/json"}.items():
        handler.send_header(name, value)
    handler.end_headers()
    if with_body:
        handler.wfile.write(body)


def _digest(file: Path) -> str:
    """As the hub has it: SHA-256 of weights, git's SHA-1 of other files."""
    data = file.read_bytes()
    if file.suffix in (".safetensors", ".gguf"):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


@contextmanager
def fake_hub(root: Path, cache: Path) -> Iterator[FakeHub]:
    """Run a hub, and let the hub's library use it with an empty cache."""
    from huggingface_hub import constants

    root.mkdir(parents=True, exist_ok=True)
    hub = FakeHub(root)
    thread = threading.Thread(target=hub.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield hub
    hub.server.shutdown()
    hub.server.server_close()
    thread.join()
