"""Faults on a timetable, while honest and hostile clients ask: the engine is killed, faults or stops, the disk is full.

    python tools/faults.py demo-chat --minutes 60

starts a server, and hurts it once a while. A request that was under way when the server was hurt, or came before it was
ready again, may end with an error; it must not be left without an end. All others must have their answers, which are
those of plain decoding. Afterwards the server must be ready within a time that follows from its first start, and the
process that stays must have the memory and the descriptors that it had.
"""

import asyncio
import json
import math
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from safetensors.torch import save_file

from hostile import TEXT
from specinfer.drafters.remote.process import MODULE
from tests.server.pressure.attack import Arm, Honest, Hostile, Report, attacking, bearer
from tests.server.pressure.steady import HONEST, HOSTILE, arms_of, key_file
from tests.server.served_command import ServedCommand
from worlds import children_of

FAULTS = (
    "kill", "fault_natively", "stop", "fill_disk", "close_sockets", "change_adapters", "lose_rank", "change_drafters",
)  # fmt: skip
_ADMIN = "admin-key"
_ARMS: tuple[Arm, ...] = ("leaver", "malformed", "bombs")
_HUNG = 15.0  # seconds after which a step counts as hung
_LOADS, _LEAST = 2.0, 10.0  # times the first start, and seconds beyond, until the server must be ready again
_FULL, _BYTES = 5.0, 2**20  # seconds for which the disk is full, and the bytes that files may have meanwhile
_DRAFTERS = ("suffix", "ngram")
_PATIENCE = 600.0  # seconds after which a server that does not come back is given up
_SLACK = 8  # MiB, or descriptors, that may come and go


@dataclass(slots=True)
class FaultReport:
    """What came of it.

    Attributes:
        clients: What the honest clients saw.
        recoveries: Faults, seconds until the server was ready again, and seconds that were allowed.
        parents: MiB and descriptors after each fault, of each process that stays while engines come and go.
    """

    clients: Report = field(default_factory=Report)
    recoveries: list[tuple[str, float, float]] = field(default_factory=list)
    parents: list[list[tuple[float, int]]] = field(default_factory=list)

    def faults(self) -> list[str]:
        """Return what must not be, in words."""
        late = [f"{name}: ready after {took:.0f} s" for name, took, allowed in self.recoveries if took > allowed]
        grown = [
            f"the parent grew from {first} to {last} (MiB, descriptors)"
            for first, *_, last in (samples for samples in self.parents if len(samples) > 1)
            if last[0] > 1.1 * first[0] + _SLACK or last[1] > first[1] + _SLACK
        ]
        nothing = [] if self.clients.attacked and self.recoveries else ["nothing was measured"]
        return [*late, *grown, *nothing, *self.clients.wrong, *self.clients.failed]

    def lines(self) -> list[str]:
        """Return the report in words."""
        clients = self.clients
        return [
            f"{len(clients.attacked)} answers, {len(clients.wrong)} wrong, {len(clients.failed)} failed, "
            f"{clients.num_interrupted} interrupted, {clients.num_cut} cut off",
            *(f"{name}: ready after {took:.1f} s, {most:.0f} allowed" for name, took, most in self.recoveries),
            f"the processes that stay, MiB and descriptors: {self.parents}",
            f"hostile requests by status: {clients.statuses}",
            *self.faults()[:10],
        ]


class Timetable:
    """A server with clients that is hurt again and again.

    Args:
        start: Starts a server with further words of its command.
        adapter: Folder of an adapter.
        faults: Names of methods, in turn.
    """

    def __init__(
        self, start: Callable[..., ServedCommand], adapter: Path, faults: Sequence[str], num_clients: int, seed: int
    ) -> None:
        self._start, self._adapter, self._faults, self._seed = start, adapter, faults, seed
        self._random, self._num_deaths = random.Random(seed), 0
        self._hurt_at = 0.0  # when the server was ready again for the last time; infinite while it is not
        self._begun = time.monotonic()
        self.server = start()
        try:
            self.server.wait(self.server.is_up)
        except BaseException:
            self.server.close()
            raise
        self._load_seconds = time.monotonic() - self._begun
        keys = [HONEST] * num_clients
        self.honest = Honest(
            self.server.port, self.server.process.pid, seed, keys, may_fail=lambda begun: begun <= self._hurt_at
        )
        self.report = FaultReport(self.honest.report, parents=[[]])

    def run(self, end: float, pause: float) -> None:
        """Hurt the server until a time by `time.monotonic`, so many seconds after it is ready again."""
        arms = [*arms_of(self.server, "all together")[::2], *_ARMS]
        with attacking(Hostile(self.server.port, self._seed, HOSTILE, arms), self.report.clients) as is_attacked:
            asyncio.run(self._run(end, pause, is_attacked))

    async def _run(self, end: float, pause: float, is_attacked: Any) -> None:
        asking = asyncio.create_task(self.honest.load(end, is_attacked.set))
        while not (is_attacked.is_set() or asking.done()):
            await asyncio.sleep(0.1)
        faults = [getattr(self, name) for name in self._faults]
        place = 0
        while time.monotonic() + pause + self._load_seconds < end and not asking.done():
            await asyncio.sleep(pause)
            await self._hurt(faults[place % len(faults)])
            place += 1
        await asyncio.sleep(max(end - time.monotonic(), 0.0))
        await asking

    async def _hurt(self, fault: Callable[[], Coroutine[Any, Any, None]]) -> None:
        begun = time.monotonic()
        await fault()
        num_ready = 0
        async with httpx.AsyncClient(base_url=self.server.url, timeout=5) as client:
            while num_ready < 3:  # an engine that was stopped answers until its parent notices
                if time.monotonic() - begun > _PATIENCE:
                    raise TimeoutError(f"{fault.__name__}: not ready after {_PATIENCE:.0f} s")
                await asyncio.sleep(0.5)
                with suppress(httpx.HTTPError):
                    is_ready = (await client.get("/health/ready")).status_code == 200
                    num_ready = num_ready + 1 if is_ready and self._is_running() else 0
        if self._hurt_at == math.inf:
            self._hurt_at = time.monotonic()
        took, waits = time.monotonic() - begun, 2.0 ** min(self._num_deaths - 2, 5) if self._num_deaths > 1 else 0.0
        allowed = _LOADS * self._load_seconds + _LEAST + waits + 2 * _HUNG * (fault == self.stop)
        self.report.recoveries.append((fault.__name__, took, allowed))
        parent = psutil.Process(self.server.process.pid)
        self.report.parents[-1].append((parent.memory_full_info().uss / 2**20, parent.num_fds()))

    def _is_running(self) -> bool:
        with suppress(ValueError, psutil.NoSuchProcess):
            return psutil.Process(self.server.engine).status() != psutil.STATUS_STOPPED
        return False

    # ------------------------------------------------------------------------------------ faults

    async def kill(self) -> None:
        """Kill the engine."""
        self._signal(self.server.engine, signal.SIGKILL)

    async def fault_natively(self) -> None:
        """Let the engine end as by a fault of native code."""
        self._signal(self.server.engine, signal.SIGSEGV)

    async def stop(self) -> None:
        """Stop the engine, so that it neither ends nor goes on."""
        self._signal(self.server.engine, signal.SIGSTOP)

    async def lose_rank(self) -> None:
        """Kill a rank of the engine."""
        ranks = [child for child in children_of(self.server.engine) if MODULE in _command(child)]
        self._signal(self._random.choice(ranks), signal.SIGKILL)

    async def fill_disk(self) -> None:
        """Let no file of the server grow, as on a full disk. Nobody may notice."""
        processes = self.server.process.pid, self.server.engine
        before = [resource.prlimit(process, resource.RLIMIT_FSIZE) for process in processes]
        for process, (_, hard) in zip(processes, before, strict=True):
            resource.prlimit(process, resource.RLIMIT_FSIZE, (_BYTES, hard))
        await asyncio.sleep(_FULL)
        for process, limits in zip(processes, before, strict=True):
            resource.prlimit(process, resource.RLIMIT_FSIZE, limits)

    async def close_sockets(self) -> None:
        """Close half of the honest connections. Nobody else may notice."""
        for task in self._random.sample(sorted(self.honest.asking, key=id), len(self.honest.asking) // 2):
            task.cancel()

    async def change_adapters(self) -> None:
        """Load an adapter, ask it, and unload it during the answer."""
        body = {"model": "adapter", "prompt": "def f", "max_tokens": 200, "ignore_eos": True}
        async with httpx.AsyncClient(base_url=self.server.url, timeout=120, headers=bearer(_ADMIN)) as client:
            named = {"lora_name": "adapter"}
            loaded = await client.post("/v1/load_lora_adapter", json=named | {"lora_path": str(self._adapter)})
            answer = asyncio.create_task(client.post(TEXT, json=body))
            await asyncio.sleep(0.5)
            unloaded = await client.post("/v1/unload_lora_adapter", json=named)
            for response in (loaded, await answer, unloaded):
                if response.status_code != 200:
                    self.report.clients.failed.append(f"change_adapters: {response.status_code} {response.text:.200}")

    async def change_drafters(self) -> None:
        """Stop the server as an operator does, and start it with another drafter."""
        self._hurt_at, self._num_deaths = math.inf, 1
        with suppress(psutil.NoSuchProcess):
            self.server.process.terminate()
        code = await asyncio.to_thread(self.server.process.wait, _PATIENCE)
        if code:
            self.report.clients.failed.append(f"change_drafters: the server ended with exit code {code}")
        self.server.close()
        self.server = self._start("--drafter", _DRAFTERS[len(self.report.parents) % len(_DRAFTERS)])
        self.report.parents.append([])

    def _signal(self, process: int, number: signal.Signals) -> None:
        self._num_deaths += 1
        self._hurt_at = math.inf
        os.kill(process, number)


def _command(process: int) -> str:
    with suppress(psutil.NoSuchProcess):
        return " ".join(psutil.Process(process).cmdline())
    return ""


def _save_adapter(folder: Path, model: str) -> Path:
    """Write a random adapter of the queries of a model."""
    from specinfer.model.folder import find_folder
    from specinfer.setup.model_names import find_target

    config = json.loads((find_folder(find_target(model)) / "config.json").read_text())
    width, rank = config["hidden_size"], 4
    heads = config["num_attention_heads"] * config.get("head_dim", width // config["num_attention_heads"])
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = 0.02 * torch.randn(rank, width)
        tensors[f"{name}.lora_B.weight"] = 0.02 * torch.randn(heads, rank)
    folder.mkdir()
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def hurt(
    model: str, end: float, *, port: int, pause: float, faults: Sequence[str] = FAULTS, num_clients: int = 3,
    num_ranks: int = 1, seed: int = 0, options: Sequence[str] = (),
) -> FaultReport:  # fmt: skip
    """Serve a model, and hurt the server until a time by `time.monotonic`."""
    with key_file(f"{_ADMIN} admin,generate name=admin") as keys:
        adapter, log = _save_adapter(keys.with_name("adapter"), model), keys.with_name("log")
        words = (
            "--api-key-file", str(keys), "--shutdown-timeout", "5", "--max-step-seconds", str(_HUNG),
            "--enable-lora", "--allow-runtime-lora-updating", *options,
            *(("-tp", str(num_ranks)) if num_ranks > 1 else ("--prefix-cache-dir", str(keys.with_name("prefixes")))),
        )  # fmt: skip

        def start(*drafters: str) -> ServedCommand:
            return ServedCommand(model, *words, *drafters, port=port, log=log)

        names = [name for name in faults if name != "lose_rank" or num_ranks > 1]
        timetable = Timetable(start, adapter, names, num_clients, seed)
        try:
            with suppress(KeyboardInterrupt):
                timetable.run(end, pause)
        except (AssertionError, TimeoutError, LookupError, OSError, ValueError, httpx.HTTPError) as error:
            timetable.report.clients.failed.append(f"{type(error).__name__}: {error}\n{log.read_text()[-2000:]}")
        finally:
            timetable.server.close()
        return timetable.report
