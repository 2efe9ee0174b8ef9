"""The peers of one measurement: they are started, tuned, measured alternately with our arms, and dropped on failure."""

import hashlib
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.disk import forget_pages
from benchmarks.memory_cap import cap_memory
from benchmarks.peers.messages import Ask, Load, Settings
from benchmarks.peers.names import LIBRARIES, OWN_FILE, Peer, parse_peer
from benchmarks.peers.plain_folder import plain_folder
from benchmarks.peers.report import PeerReport
from benchmarks.process import Worker, WorkerError
from specinfer.bench.models import Models
from specinfer.bench.results import Arm, Run
from specinfer.core.files import cache_folder
from specinfer.core.lookups import reserved_names
from specinfer.core.sampling import SamplingParams
from specinfer.model.definition import load_config
from specinfer.model.gguf.folder import weights_file

LOADING_TIMEOUT = 3600.0  # seconds, since files may have to be converted
TIMEOUT_PER_TOKEN = 4.0
SLOW_PER_TOKEN = 120.0  # where each token reads the model from the disk
# All settings are ranked on the first prompt, then the finalists on the first two.
_NUM_TUNING_PROMPTS = 2
_NUM_FINALISTS = 6
_BESIDE_FILE = "bf16"  # the type of a drafter's weights when the target's own GGUF file is used
_GGUF_LAYOUT = 1  # increment when the layout of the written files changes


@dataclass(slots=True)
class _Entry:
    """A peer that has not failed so far."""

    peer: Peer
    process: Worker
    offered: list[Settings]
    version: str
    files: list[Path]
    settings: Settings = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)

    @property
    def details(self) -> dict[str, Any]:
        """Facts about the peer for a report."""
        return {"drafts": self.peer.drafts, "version": self.version, "settings": self.settings}


class Peers:
    """The requested peers that can be measured. A peer that fails is dropped, and the report gives the reason.

    Args:
        memory: Bytes that each process may use, or None for no cap. The target need not fit, and passes take seconds.
        is_capped: Whether the operating system enforces `memory`. False where `memory` is a GPU's and the layers are
            in host memory.
    """

    def __init__(
        self,
        names: Sequence[str],
        models: Models,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_len: int,
        memory: int | None = None,
        is_capped: bool = True,
    ) -> None:
        measured = str(dtype).removeprefix("torch.")
        measurement = "latency" if memory is None else "offload"
        self._wanted = list(dict.fromkeys(parse_peer(name, measured, measurement) for name in names))
        self._models, self._memory, self._is_capped = models, memory, is_capped
        self._dtype, self._device, self._max_len = measured, str(device), max_len
        self._entries: dict[str, _Entry] = {}
        self._processes: dict[tuple[str, str], Worker] = {}
        self._skipped: dict[str, str] = {}

    @property
    def names(self) -> list[str]:
        """Names of the peers that have not failed."""
        return list(self._entries)

    def start(self, params: SamplingParams, report: Callable[[str], None]) -> None:
        """Start and load the peers that support these parameters, one at a time. `report` gets a message for each."""
        for peer in self._wanted:
            report(f"loading {peer.name}")
            try:
                self._check(peer, params)
                self._entries[peer.name] = self._load(peer)
            except (WorkerError, OSError) as error:
                self._skipped[peer.name] = str(error)

    def tune(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        report: Callable[[str], None],
        names: Sequence[str] | None = None,
    ) -> None:
        """Find the fastest settings of each peer, or of the peers in `names`, and warm it up."""
        for name in self.names if names is None else names:
            report(f"tuning {name}")
            with suppress(WorkerError):
                self._tune(self._entries[name], prompts[:_NUM_TUNING_PROMPTS], params)

    def measure(self, name: str, prompt: list[int], params: SamplingParams, number: int, repeat: int) -> Run | None:
        """Measure and return one run, or None if the peer has failed. A run with a negative repeat is not kept."""
        if (entry := self._entries.get(name)) is None:
            return None
        with suppress(WorkerError):
            run = self._run(entry, prompt, params, number, repeat)
            if run.num_decoded or repeat < 0:
                entry.runs += [run] if repeat >= 0 else []
                return run
            self._drop(name, f"all {params.max_tokens} tokens came at once; raise max_tokens")
        return None

    def process(self, name: str) -> Worker:
        """Return the process of a peer that has not failed."""
        return self._entries[name].process

    def drafts(self, name: str) -> bool:
        return self._entries[name].peer.drafts

    def files(self, name: str) -> list[Path]:
        """Return the weight files that the peer reads."""
        return self._entries[name].files

    def report(self) -> PeerReport:
        arms = (Arm(name, tuple(entry.runs), entry.details) for name, entry in self._entries.items())
        return PeerReport(tuple(arms), dict(self._skipped))

    def __enter__(self) -> "Peers":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.close()

    def _check(self, peer: Peer, params: SamplingParams) -> None:
        library = LIBRARIES[peer.library]
        if command := library.missing():
            raise WorkerError(command)
        if library.cpu_only and self._device != "cpu":
            raise WorkerError("it is measured on the CPU only; use --device cpu")
        if library.gpu_only and self._device == "cpu":
            raise WorkerError("it keeps the layers of a model on a GPU in host memory; use --device cuda")
        if peer.drafts and params.temperature > 0 and not library.samples_with_drafter:
            raise WorkerError(
                "text it samples with a drafter does not have the target's distribution; use temperature 0"
            )
        if peer.has_drafter:
            drafter = self._drafter()
            sizes = [load_config(folder).get_text_config().vocab_size for folder in (drafter, self._models.target)]
            if sizes[0] != sizes[1]:
                raise WorkerError(f"the drafter's vocabulary of {sizes[0]} tokens is not the target's of {sizes[1]}")

    def _drafter(self) -> Path:
        folders = [Path(name) for name in self._models.drafters if name not in reserved_names()]
        if not folders:
            raise WorkerError("no drafter is a model")
        return folders[0]

    def _load(self, peer: Peer) -> _Entry:
        library = LIBRARIES[peer.library]
        dtype = self._dtype if library.needs_gguf else peer.weights
        folders = [self._models.target, *([self._drafter()] if peer.has_drafter else [])]
        files = [self._as_read(peer, folder) for folder in folders]
        weights = files if library.needs_gguf else [file for one in files for file in sorted(one.glob("*.safetensors"))]
        if self._memory is not None:
            forget_pages(weights)  # pages that other processes have read would not count against the cap
        # Arms of one library with the same weights share a process and its loaded models.
        key = (peer.library, peer.weights)
        if key not in self._processes:
            cap = None if self._memory is None or not self._is_capped else cap_memory(self._memory)
            self._processes[key] = Worker(library.module, torch.get_num_threads(), cap)
        drafter, is_slow = str(files[1]) if peer.has_drafter else None, self._memory is not None
        job = Load(str(files[0]), drafter, self._max_len, dtype, self._device, library.offload, is_slow, peer.looks_up)
        reply = self._processes[key].ask({"do": "load", "job": asdict(job)}, LOADING_TIMEOUT)
        return _Entry(peer, self._processes[key], reply["settings"], reply["version"], weights)

    def _as_read(self, peer: Peer, folder: Path) -> Path:
        """Return the folder or file that a peer reads for the model in `folder`."""
        if not LIBRARIES[peer.library].needs_gguf:
            return plain_folder(folder, peer.weights)
        if peer.weights != OWN_FILE:
            return _as_gguf(folder, peer.weights)
        if (file := weights_file(folder)) is not None:
            return file
        if folder == self._models.target:
            raise WorkerError(
                "the target is not read from a GGUF file as it is; name one as the model, and do not grow it"
            )
        return _as_gguf(folder, _BESIDE_FILE)

    def _tune(self, entry: _Entry, prompts: Sequence[list[int]], params: SamplingParams) -> None:
        def seconds(settings: Settings, prompts: Sequence[list[int]]) -> float:
            entry.settings = settings
            runs = [self._run(entry, prompt, params, 0, -1) for prompt in prompts]
            return sum(run.time / run.num_decoded if run.num_decoded else math.inf for run in runs)

        seconds(entry.offered[0], prompts[:1])  # warms up
        finalists = entry.offered
        if len(finalists) > _NUM_FINALISTS:
            finalists = _fastest(finalists, [seconds(settings, prompts[:1]) for settings in finalists])
        if len(finalists) > 1:
            finalists = _fastest(finalists, [seconds(settings, prompts) for settings in finalists])
        entry.settings = finalists[0]

    def _run(self, entry: _Entry, prompt: list[int], params: SamplingParams, number: int, repeat: int) -> Run:
        """Run one prompt. A peer that fails is dropped."""
        assert params.max_tokens is not None
        ask = Ask(prompt, params.max_tokens, params.temperature, params.seed or 0, entry.peer.drafts, entry.settings)
        timeout = (TIMEOUT_PER_TOKEN if self._memory is None else SLOW_PER_TOKEN) * (60 + params.max_tokens)
        try:
            reply: Mapping[str, Any] = entry.process.ask({"do": "generate", "ask": asdict(ask)}, timeout)
            if len(reply["token_ids"]) != params.max_tokens:
                raise WorkerError(f"{len(reply['token_ids'])} tokens came, not {params.max_tokens}")
        except WorkerError as error:
            self._drop(entry.peer.name, str(error))
            raise
        prompt_time, seconds = reply["prompt_time"], reply["time"]
        outputs, num_first = (tuple(reply["token_ids"]),), reply["num_first"]
        return Run(repeat, (number,), prompt_time, seconds, prompt_time + seconds, outputs, num_first=num_first)

    def _drop(self, name: str, reason: str) -> None:
        self._skipped[name] = reason
        del self._entries[name]


def _fastest(offered: Sequence[Settings], seconds: Sequence[float]) -> list[Settings]:
    """Return the best `_NUM_FINALISTS` settings, the fastest first."""
    order = sorted(range(len(offered)), key=seconds.__getitem__)
    return [offered[i] for i in order[:_NUM_FINALISTS]]


def gguf_place(folder: Path, weights: str) -> Path:
    """Return the path of the model's GGUF file in the user's cache. The file need not exist yet."""
    marks = [str(folder.resolve()), str(_GGUF_LAYOUT)]
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors"), *folder.glob("*.gguf")]):
        status = path.stat()
        marks.append(f"{path.name} {status.st_size} {status.st_mtime_ns}")
    key = hashlib.sha256("\n".join(marks).encode()).hexdigest()[:8]
    return cache_folder() / f"peer-{folder.name}-{weights}-{key}.gguf"


def _as_gguf(folder: Path, weights: str) -> Path:
    """Return the model's GGUF file, and write it if it does not exist."""
    from benchmarks.peers.gguf_file import write_gguf  # needs an optional extra

    file = gguf_place(folder, weights)
    if file.exists():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".gguf-") as name:
        fresh = Path(name) / "fresh.gguf"
        try:
            write_gguf(folder, fresh, weights)
        except (KeyError, TypeError, ValueError) as error:  # a configuration of an unusual kind
            raise WorkerError(f"no GGUF file can be written of {folder}: {error!r}") from error
        os.replace(fresh, file)
    return file
