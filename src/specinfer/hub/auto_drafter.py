"""The drafters that "auto" chooses for a target that is not embedded."""

import logging
from pathlib import Path

from specinfer.core.errors import ModelError
from specinfer.core.progress import ProgressCallback
from specinfer.hub.known_models import SMALL_MODEL, known_drafters
from specinfer.hub.locate import is_on_hub

logger = logging.getLogger(__name__)
LOOKUP, LOOKUP_WITH_MODEL = "ngram", "suffix"  # the drafter without a small model, and the one with


def auto_drafters(model: str | Path, progress: ProgressCallback | None = None) -> tuple[str, ...]:
    """Return a known small model of the target's family and a lookup, or a lookup alone.

    A small model in the cache is preferred. Otherwise the smallest one is downloaded, if the target itself is a model
    of the hub: whoever names a folder or a file expects no download.
    """
    small = [one.name for one in known_drafters(model) if one.kind == SMALL_MODEL]
    if not small:
        logger.info("drafters: auto chooses %s, as no small model is known for %s", LOOKUP, model)
        return (LOOKUP,)
    from specinfer.hub.store import download, find_cached

    for name in small:
        if find_cached(name) is not None:
            logger.info(
                "drafters: auto chooses %s, which is in the cache, and %s for %s", name, LOOKUP_WITH_MODEL, model
            )
            return (name, LOOKUP_WITH_MODEL)
    if not is_on_hub(model):
        logger.info("drafters: auto chooses %s; %s could draft for %s, but is not cached", LOOKUP, small[0], model)
        return (LOOKUP,)
    try:
        download(small[0], progress=progress)
    except ModelError as error:
        logger.warning("drafters: auto chooses %s, as %s cannot be downloaded: %s", LOOKUP, small[0], error)
        return (LOOKUP,)
    logger.info("drafters: auto chooses %s, which it downloaded, and %s for %s", small[0], LOOKUP_WITH_MODEL, model)
    return (small[0], LOOKUP_WITH_MODEL)
