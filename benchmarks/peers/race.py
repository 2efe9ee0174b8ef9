"""The peers of one measurement: they are started, tuned, measured alternately with our arms, and dropped on failure."""

import hashlib
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.peers.interface import Adapter, Ask, Generated, Load, Settings
from benchmarks.peers.llama_server import LlamaServer
from benchmarks.peers.names import LIBRARIES, OWN_FILE, Library, Peer, parse_peer
from benchmarks.peers.plain_folder import plain_folder
from benchmarks.peers.report import PeerRuns
from benchmarks.process import Worker, WorkerError
from specinfer.bench.models import Models
from specinfer.bench.prompts import Asked
from specinfer.bench.results import Arm, Run
from specinfer.core.errors import ModelError
from specinfer.core.files import cache_folder
from specinfer.core.lookups import reserved_names
from specinfer.model.definition import load_config, load_plain
from specinfer.model.gguf.folder import weights_file
from specinfer.model.gguf.writing import write_gguf
from specinfer.model.offload.shards import Shards

LOADING_TIMEOUT = 3600.0  # seconds, since files may have to be converted
TIMEOUT_PER_TOKEN = 4.0
_NUM_FINALISTS = 6  # all settings are ranked on the first prompt, then the finalists on all that are for tuning
_BESIDE_FILE = "bf16"  # the type of a drafter's weights when the target's own GGUF file is used
_GGUF_LAYOUT = 2  # increment when the layout of the written files changes


class Engine(Adapter, Protocol):
    """A peer in a process of its own."""

    def close(self) -> None: ...


class WorkerEngine:
    """A peer whose library runs in a worker."""

    def __init__(self, module: str, num_threads: int, timeout: float) -> None:
        self._worker, self._timeout = Worker(module, num_threads), timeout
        self.version = ""

    def load(self, job: Load) -> list[Settings]:
        reply = self._worker.ask({"do": "load", "job": asdict(job)}, LOADING_TIMEOUT)
        self.version, offered = reply["version"], reply["settings"]
        return list(offered)

    def generate(self, ask: Ask) -> Generated:
        timeout = self._timeout * (60 + ask.max_tokens)
        return Generated(**self._worker.ask({"do": "generate", "ask": asdict(ask)}, timeout))

    def close(self) -> None:
        self._worker.close()


@dataclass(slots=True)
class _Entry:
    """A peer that has not failed so far, or one of its settings if each is measured by itself."""

    name: str
    peer: Peer
    engine: Engine
    offered: list[Settings]
    settings: Settings = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)

    @property
    def details(self) -> dict[str, Any]:
        """Facts about the peer for a report."""
        facts = {"library": self.peer.library, "weights": self.peer.weights, "drafts": self.peer.drafts}
        return {**facts, "version": self.engine.version, "settings": self.settings}


class Peers:
    """The requested peers that can be measured. A peer that fails is dropped, and the report gives the reason.

    Args:
        sweep: Whether each of a peer's settings is measured by itself, or the fastest is found before.
        num_outputs: Most outputs of one prompt.
        has_requests: Whether the prompts are chat requests.
    """

    def __init__(
        self,
        names: Sequence[str],
        models: Models,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_len: int,
        sweep: bool = False,
        num_outputs: int = 1,
        has_requests: bool = False,
    ) -> None:
        measured = str(dtype).removeprefix("torch.")
        self._wanted = list(dict.fromkeys(parse_peer(name, measured) for name in names))
        self._models, self._sweep = models, sweep
        self._num_outputs, self._has_requests = num_outputs, has_requests
        self._servers: dict[tuple[int, str], Any] = {}  # of llama.cpp, which share the memory
        self._dtype, self._device, self._max_len = measured, str(device), max_len
        self._entries: dict[str, _Entry] = {}
        self._engines: list[Engine] = []
        self._skipped: dict[str, str] = {}

    @property
    def names(self) -> list[str]:
        """Names of the peers that have not failed."""
        return list(self._entries)

    def start(self, report: Callable[[str], None]) -> None:
        """Start and load the peers that can be measured, one at a time. `report` gets a message for each."""
        for peer in self._wanted:
            report(f"loading {peer.name}")
            try:
                self._entries |= {entry.name: entry for entry in self._load(peer)}
            except (ModelError, WorkerError, OSError) as error:
                self._skipped[peer.name] = str(error)

    def tune(self, prompts: Sequence[Asked], report: Callable[[str], None]) -> None:
        """Find the fastest settings of each peer, and warm it up; in a sweep the first turns do."""
        for name in [] if self._sweep else self.names:
            report(f"tuning {name}")
            with suppress(WorkerError):
                self._tune(self._entries[name], prompts)

    def measure(self, name: str, asked: Asked, number: int, repeat: int) -> Run | None:
        """Measure and return one run, or None if the peer has failed. A run with a negative repeat is not kept."""
        if (entry := self._entries.get(name)) is None:
            return None
        with suppress(WorkerError):
            run = self._run(entry, asked, number, repeat)
            if run.num_decoded or repeat < 0:
                entry.runs += [run] if repeat >= 0 else []
                return run
            self._drop(name, f"all {run.num_tokens} tokens came at once; raise max_tokens")
        return None

    def runs(self) -> PeerRuns:
        arms = (Arm(name, tuple(entry.runs), entry.details) for name, entry in self._entries.items())
        return PeerRuns(tuple(arms), dict(self._skipped))

    def __enter__(self) -> "Peers":
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self._engines:
            engine.close()

    def _load(self, peer: Peer) -> list[_Entry]:
        library = LIBRARIES[peer.library]
        if command := library.missing():
            raise WorkerError(command)
        if library.cpu_only and self._device != "cpu":
            raise WorkerError("it is measured on the CPU only; use --device cpu")
        if self._has_requests and not library.takes_requests:
            raise WorkerError("it answers no chat requests with formats and tools")
        folders = [self._models.target, *([self._drafter()] if peer.has_drafter else [])]
        files = [self._as_read(peer, folder) for folder in folders]
        engine = self._start(library)
        drafter = str(files[1]) if peer.has_drafter else None
        dtype = self._dtype if library.needs_gguf else peer.weights
        job = Load(
            str(files[0]), drafter, self._max_len, dtype, self._device, peer.looks_up, self._sweep, self._num_outputs
        )
        offered = engine.load(job)
        if not self._sweep or offered == [{}]:
            return [_Entry(peer.name, peer, engine, offered)]
        names = [" ".join([peer.name, *map(str, settings.values())]) for settings in offered]
        return [_Entry(name, peer, engine, [one], one) for name, one in zip(names, offered, strict=True)]

    def _start(self, library: Library) -> Engine:
        threads = torch.get_num_threads()
        if library.module is None:
            self._engines.append(LlamaServer(threads, TIMEOUT_PER_TOKEN, self._servers))
        else:
            self._engines.append(WorkerEngine(library.module, threads, TIMEOUT_PER_TOKEN))
        return self._engines[-1]

    def _drafter(self) -> Path:
        """Return the folder of the first drafter that is a model with the target's vocabulary."""
        folders = [Path(name) for name in self._models.drafters if name not in reserved_names()]
        if not folders:
            raise WorkerError("no drafter is a model")
        own, wanted = (load_config(folder).get_text_config().vocab_size for folder in (folders[0], self._models.target))
        if own != wanted:
            raise WorkerError(f"the drafter's vocabulary of {own} tokens is not the target's of {wanted}")
        return folders[0]

    def _as_read(self, peer: Peer, folder: Path) -> Path:
        """Return the folder or file that a peer reads for the model in `folder`."""
        if not LIBRARIES[peer.library].needs_gguf:
            return plain_folder(folder, peer.weights)
        if peer.weights != OWN_FILE:
            return gguf_of(folder, peer.weights)
        if (file := weights_file(folder)) is not None:
            return file
        if folder == self._models.target:
            raise WorkerError(
                "the target is not read from a GGUF file as it is; name one as the model, and do not grow it"
            )
        return gguf_of(folder, _BESIDE_FILE)

    def _tune(self, entry: _Entry, prompts: Sequence[Asked]) -> None:
        def seconds(settings: Settings, prompts: Sequence[Asked]) -> float:
            entry.settings = settings
            runs = [self._run(entry, asked, 0, -1) for asked in prompts]
            return sum(run.time / run.num_decoded if run.num_decoded else math.inf for run in runs)

        seconds(entry.offered[0], prompts[:1])  # warms up
        finalists = entry.offered
        for tried in (prompts[:1], prompts):
            if len(finalists) > (_NUM_FINALISTS if tried is not prompts else 1):
                times = [seconds(settings, tried) for settings in finalists]
                order = sorted(range(len(finalists)), key=times.__getitem__)
                finalists = [finalists[i] for i in order[:_NUM_FINALISTS]]
        entry.settings = finalists[0]

    def _run(self, entry: _Entry, asked: Asked, number: int, repeat: int) -> Run:
        """Run one prompt. A peer that fails is dropped."""
        params, body = asked.params, None if asked.request is None else asked.request.body
        assert params.max_tokens is not None
        ask = Ask(asked.token_ids, params.max_tokens, params.temperature, params.seed or 0, entry.settings, body)
        try:
            made = entry.engine.generate(ask)
            if body is None and len(made.outputs[0]) != params.max_tokens:
                raise WorkerError(f"{len(made.outputs[0])} tokens came, not {params.max_tokens}")
        except WorkerError as error:
            self._drop(entry.name, str(error))
            raise
        outputs, total = tuple(map(tuple, made.outputs)), made.prompt_time + made.time
        return Run(repeat, (number,), made.prompt_time, made.time, total, outputs, num_first=made.num_first)

    def _drop(self, name: str, reason: str) -> None:
        self._skipped[name] = reason
        del self._entries[name]


def gguf_of(folder: Path, weights: str) -> Path:
    """Return the model's GGUF file in the user's cache, and write it if it does not exist.

    Raises:
        ModelError: A GGUF file cannot hold such a model.
    """
    marks = [str(folder.resolve()), str(_GGUF_LAYOUT)]
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors"), *folder.glob("*.gguf")]):
        status = path.stat()
        marks.append(f"{path.name} {status.st_size} {status.st_mtime_ns}")
    key = hashlib.sha256("\n".join(marks).encode()).hexdigest()[:8]
    file = cache_folder() / f"peer-{folder.name}-{weights}-{key}.gguf"
    if file.exists():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".gguf-") as name, Shards(folder) as shards:
        fresh = Path(name) / "fresh.gguf"
        write_gguf(
            fresh, load_config(folder), shards.sources, lambda: load_plain(folder, "auto").state_dict(), _vocabulary,
            weights, lambda count: None,
        )  # fmt: skip
        os.replace(fresh, file)
    return file


def _vocabulary(size: int) -> dict[str, Any]:
    """Return the metadata of a vocabulary without texts: peers receive and return token ids.

    Readers require a control token, a merge, and a byte-level BPE token for each byte.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    named = ["<>", "ab", *map(chr, range(0x100, 0x100 + 256 - len(shown))), *map(chr, shown)]
    tokens = [*named, *(f"<{number}>" for number in range(len(named), size))][:size]
    fields: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3] + [1] * (size - 1),
        "merges": ["a b"],
    }
    fields |= {f"{name}_token_id": 0 for name in ("bos", "eos", "padding")}
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
