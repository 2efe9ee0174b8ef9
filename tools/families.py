"""Write docs/families.md: what becomes of every causal family of the installed transformers."""

import argparse
import importlib
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Try each family, and write the page; a family that answers wrongly stops it with an error."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tests")]
    transformers, sweep = (importlib.import_module(name) for name in ("transformers", "sweep"))  # with these settings
    outcomes = {}
    for family in sweep.FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            outcomes[family] = sweep.outcome_of(family, Path(folder))
        print(family, outcomes[family].way, outcomes[family].reason)
    page = sweep.page_of(outcomes, transformers.__version__)
    (ROOT / "docs" / "families.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
