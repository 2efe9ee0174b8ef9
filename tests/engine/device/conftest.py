"""What tests of steps on a device share."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from on_device import Pair, load_plain
from specinfer.engine.commit import Committer
from specinfer.engine.executor import Outcome
from tiny import paths_of


@pytest.fixture(scope="module")
def pair(model_folder: Callable[..., Path]) -> Pair:
    """Return a target, and a small model that is often right."""
    return load_plain(model_folder("llama")), load_plain(model_folder("llama", 0, 0.05))


@pytest.fixture
def trees(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Return the paths of the trees of each request, and their accepted tokens, as steps report them."""
    found, store = defaultdict[str, list[Any]](list), Committer.store

    def stored(self: Committer, outcomes: Sequence[Outcome]) -> int:
        for one in outcomes:
            if one.tree is not None and one.acceptance is not None and len(one.tree) > 1:
                accepted = [one.tree.tokens[node] for node in one.acceptance.path]
                found[one.span.request.request_id].append((sorted(paths_of(one.tree)), accepted))
        return store(self, outcomes)

    monkeypatch.setattr(Committer, "store", stored)
    return found
