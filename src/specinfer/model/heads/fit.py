"""The check of what a head's configuration states about the target that it was trained for."""

import re
from collections.abc import Iterable
from itertools import product
from typing import Any

from specinfer.core.errors import ModelError
from specinfer.hub.files import verifier_of
from specinfer.model.heads.checkpoint import HeadCheckpoint

_TASK = re.compile(r"(For[A-Z]\w*|LMHeadModel|Model)$")  # targets with and without a vision tower are one family


def check_stated_target(checkpoint: HeadCheckpoint, config: Any) -> None:
    """Check the sizes and the architecture that a head's configuration states against its target's configuration.

    Raises:
        ModelError: The head was trained for another target.
    """
    fields, text = checkpoint.fields, config.get_text_config()
    for name, own in (("target_hidden_size", text.hidden_size), ("num_target_layers", text.num_hidden_layers)):
        if fields.get(name) not in (None, own):
            raise _other_target(checkpoint, name, fields[name], own)
    wanted, own = verifier_of(fields).get("architectures") or (), config.architectures or ()
    if wanted and own and not _has_common_family(wanted, own):
        raise _other_target(checkpoint, "verifier.architectures", ", ".join(map(str, wanted)), ", ".join(own))


def _has_common_family(wanted: Iterable[object], own: Iterable[object]) -> bool:
    """Return whether two are one family, perhaps with and without a vision tower: Mistral3 and Mistral."""
    pairs = product(map(_family, wanted), map(_family, own))
    return any(one.startswith(other) or other.startswith(one) for one, other in pairs)


def _family(architecture: object) -> str:
    return _TASK.sub("", str(architecture))


def _other_target(checkpoint: HeadCheckpoint, name: str, stated: object, own: object) -> ModelError:
    return ModelError(
        f"drafters: {name} in config.json of {checkpoint.folder} is {stated}, and the target's is {own}; take a "
        "drafter that was trained for this target"
    )
