"""The adapters that an engine has in memory."""

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from specinfer.core.errors import ModelError, RequestError
from specinfer.core.lora import Adapter, LoRAConfig, LoRARequest
from specinfer.model.adapters.peft_folder import Pair, Shape, read_adapter
from specinfer.model.adapters.sites import AdapterSites
from specinfer.model.fixed_passes import has_fixed_order
from specinfer.model.load import LoadedModel
from specinfer.ops import AdapterTable

logger = logging.getLogger(__name__)


class AdapterRanks(Protocol):
    """The other ranks of a target that is split."""

    def linears(self) -> dict[str, Shape]:
        """Prepare them for adapters, and return their linear layers that adapters may change, by name."""
        ...

    def share(self, table: AdapterTable, pairs: Mapping[str, Pair]) -> None:
        """Give them the matrices of the adapter that this process has in a table; they drop them after the table."""
        ...


class Adapters:
    """The adapters of a target, loaded when a request first names them; any thread may ask for one.

    When there are too many, the least recently used one is dropped. Requests that run keep theirs until they end.

    Args:
        target: The target, or rank 0's shard of it.
        name: Name of the target, which adapters were trained with.
        ranks: The other ranks, or None for a whole target.

    Attributes:
        slots: Slots for the adapters of passes on a GPU, or None.

    Raises:
        ModelError: Passes of ranks must have a fixed order, which what adapters add there has not.
    """

    def __init__(self, target: LoadedModel, config: LoRAConfig, name: str, ranks: AdapterRanks | None = None) -> None:
        if ranks is not None and has_fixed_order(target.model):
            raise ModelError(
                "batch_invariant: on several GPUs what adapters add has sums whose order depends on the number of "
                "rows; leave enable_lora or batch_invariant out, or use one GPU"
            )
        self.config, self._name, self._ranks = config, name, ranks
        self._sites = AdapterSites(target)
        self.slots = None if target.device.type == "cpu" else self._sites.adapter_slots(config)
        self._linears = self._sites.linears | ({} if ranks is None else ranks.linears())
        self._lock = threading.Lock()
        self._loaded: OrderedDict[int, Adapter] = OrderedDict()

    def find(self, request: LoRARequest) -> Adapter:
        """Return an adapter, loaded now unless it is in memory.

        Raises:
            ModelError: It cannot be loaded; the message says what to change.
            RequestError: Its number is that of another adapter.
        """
        with self._lock:
            found = self._loaded.get(request.lora_int_id)
        if found is None:
            loaded = self._load(request)  # other requests need not wait for it
        with self._lock:
            if found is None:
                found = self._loaded.setdefault(request.lora_int_id, loaded)
                while len(self._loaded) > self.config.max_cpu_loras:
                    self._loaded.popitem(last=False)
            if found.request != request:
                raise RequestError(
                    f"lora_request: lora_int_id {request.lora_int_id} is that of {found.name!r} from "
                    f"{found.request.lora_path}; give each adapter a number of its own"
                )
            if request.lora_int_id in self._loaded:
                self._loaded.move_to_end(request.lora_int_id)
            return found

    def drop(self, lora_int_id: int) -> bool:
        """Forget an adapter, and return whether it was in memory; requests that have it keep it."""
        with self._lock:
            return self._loaded.pop(lora_int_id, None) is not None

    def _load(self, request: LoRARequest) -> Adapter:
        folder = Path(request.lora_path).expanduser()
        if not folder.is_dir():
            raise ModelError(f"lora_path: no folder {request.lora_path!r:.200}; name a folder in PEFT's format")
        config, pairs = read_adapter(folder, self._linears, self.config.max_lora_rank)
        if config.base is not None and _stem(config.base) != _stem(self._name):
            logger.warning("adapter %s was trained with %s, and this is %s", request.lora_name, config.base, self._name)
        table = self._sites.table(pairs)
        if self._ranks is not None:
            self._ranks.share(table, pairs)
        logger.info("adapter %s: %.1f MiB from %s", request.lora_name, table.num_bytes / 2**20, folder)
        return Adapter(request, _content(pairs), table)


def _content(pairs: Mapping[str, Pair]) -> str:
    """Return a digest of an adapter's matrices, the same after each start."""
    total = hashlib.sha256()
    for name, pair in sorted(pairs.items()):
        total.update(f"{name} {[tuple(matrix.shape) for matrix in pair]}\n".encode())
        for matrix in pair:
            total.update(matrix.numpy().tobytes())
    return total.hexdigest()


def _stem(name: str) -> str:
    """Return the last part of a model's name, which is the same for a folder and for a model of the hub."""
    return Path(name.partition("@")[0].rstrip("/")).name.lower()
