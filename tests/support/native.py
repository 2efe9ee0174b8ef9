"""Which instruction sets the native kernels can be tried with here."""

from collections.abc import Iterator

import pytest

from specinfer.ops.cpu.library import library

ISAS = (
    "portable code",
    "AVX2",
    "AVX-512",
    "AVX-512 VNNI",
    "AVX-512 VNNI BF16",
    "AVX-512 VNNI BF16 AMX",
    "NEON dotprod",
    "NEON i8mm",
)


def each_isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Body of a fixture with ISAS as parameters."""
    loaded = library()
    best = loaded.specinfer_name()
    if not loaded.specinfer_use(request.param.encode()):
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    loaded.specinfer_use(best)
