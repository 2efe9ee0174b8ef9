"""A fixture of the instruction sets that native kernels can be tried with here."""

from collections.abc import Iterator

import pytest

from specinfer.ops.cpu.library import library

ISAS = (
    "portable code",
    "AVX2",
    "AVX-VNNI",
    "AVX-512",
    "AVX-512 VNNI",
    "AVX-512 VNNI BF16",
    "AVX-512 VNNI BF16 AMX",
    "NEON dotprod",
    "NEON i8mm",
)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Let native kernels use this instruction set; the test is skipped where this machine lacks it."""
    yield from using(request.param)


def using(name: str) -> Iterator[str]:
    """Body of a fixture in which native kernels use an instruction set."""
    loaded = library()
    best = loaded.specinfer_name()
    if not loaded.specinfer_use(name.encode()):
        pytest.skip(f"this machine has no {name}")
    yield name
    loaded.specinfer_use(best)
