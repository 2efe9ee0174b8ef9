"""Systems other than Linux: the package runs without what only Linux or Unix has."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specinfer import LLM
from specinfer.core.parallel_config import ParallelConfig
from specinfer.model.device import find_device
from specinfer.server.config import ServerConfig
from specinfer.server.listening import listening

# In a process of its own: the names that Windows or macOS lacks are taken away before the package is imported.
HIDE = """
import asyncio, builtins, ctypes, io, os, pathlib, signal, socket, sys

import fastapi, gguf, httpx, huggingface_hub, llguidance, prometheus_client, rich.console, safetensors.torch, tokenizers
import torch, typer, uvicorn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

windows, macos = sys.argv[1] == "windows", sys.argv[1] == "macos"
LINUX_OS = ["sched_getaffinity", "posix_fadvise", "fdatasync", "O_DIRECT"]
UNIX_OS = ["preadv", "pread", "sysconf", "fork", "killpg", "setsid", "getuid", "geteuid", "getpgid", "getloadavg",
           "uname", "O_CLOEXEC", "O_NONBLOCK", "WNOHANG", "statvfs", "fchown", "chown", "getpgrp"]
for name in LINUX_OS + UNIX_OS * windows:
    if hasattr(os, name):
        delattr(os, name)
if windows:
    for name in ("fcntl", "resource", "termios", "tty", "pwd", "grp", "pty"):
        sys.modules[name] = None
    for name in ("SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGQUIT"):
        delattr(signal, name)

    def add_signal_handler(*arguments):
        raise NotImplementedError

    asyncio.SelectorEventLoop.add_signal_handler = add_signal_handler

    def symlink(*arguments, **options):
        raise OSError(22, "A required privilege is not held by the client")

    os.symlink = symlink
    plain = ctypes.CDLL.__init__

    def load(self, name, *arguments, **options):
        if name is None:
            raise TypeError("LoadLibrary() argument 1 must be str, not None")
        plain(self, name, *arguments, **options)

    ctypes.CDLL.__init__ = load


def audit(event, arguments):
    if event == "open" and str(arguments[0]).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(2, "No such file or directory", arguments[0])


sys.addaudithook(audit)
"""

GENERATE = """
import importlib, logging, pkgutil
import specinfer

skipped = (".triton", "_native", ".replicas", "__main__")
for module in pkgutil.walk_packages(specinfer.__path__, "specinfer."):
    if not any(name in module.name for name in skipped):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as missing:  # an extra that is not installed
            assert missing.name.partition(".")[0] in ("accelerate", "matplotlib", "opentelemetry", "ray"), missing
from specinfer.cli import main
sys.argv = ["specinfer", "generate", "demo", "def read(", "--max-tokens", "6", "--temperature", "0"]
sys.argv += ["--offload", "disk", "--memory-budget", "1GiB"]
main()
"""

SERVE = """
import threading, time
from pathlib import Path
from specinfer.cli import main

def ask():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ports.append(port)
    ready.set()
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
    for _ in range(600):
        try:
            if client.get("/health").status_code == 200:
                break
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    answer = client.post("/v1/completions", json={"model": "demo", "prompt": "def read(", "max_tokens": 4})
    print(answer.status_code, answer.json()["usage"]["completion_tokens"], flush=True)
    signal.raise_signal(signal.SIGINT)

ports, ready = [], threading.Event()
threading.Thread(target=ask, daemon=True).start()
ready.wait()
sys.argv = ["specinfer", "serve", "demo", "--port", str(ports[0])]
main()
"""


def run(code: str, *words: str, cache: Path) -> str:
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("system", ["windows", pytest.param("macos", marks=pytest.mark.slow)])
def test_all_modules_are_imported_and_text_is_generated_without_what_only_linux_has(
    system: str, tmp_path: Path
) -> None:
    assert run(HIDE + GENERATE, system, cache=tmp_path).strip()


@pytest.mark.slow
def test_a_server_answers_and_stops_where_loops_take_no_signals(tmp_path: Path) -> None:
    assert run(HIDE + SERVE, "windows", cache=tmp_path).split() == ["200", "4"]


def test_a_unix_socket_is_refused_where_there_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(socket, "AF_UNIX")
    place = tmp_path / "socket"
    with (
        pytest.raises(OSError, match=f"^uds: cannot listen on {place}: this system has no Unix sockets"),
        listening(ServerConfig(uds=str(place))),
    ):
        pass


def test_several_ranks_are_refused_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ValueError, match="tensor_parallel_size: several ranks need Linux or macOS"):
        ParallelConfig(tensor_parallel_size=2)
    with pytest.raises(ValueError, match="pipeline_parallel_size: several ranks need Linux or macOS"):
        ParallelConfig(pipeline_parallel_size=2)


def test_the_gpu_of_a_mac_is_refused_by_name_and_auto_chooses_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device("auto") == torch.device("cpu")
    for name in ("mps", "mps:0"):
        with pytest.raises(ValueError, match=f"device: '{name}', the GPU of a Mac, is not supported; use \"cpu\""):
            LLM("demo", device=name)
