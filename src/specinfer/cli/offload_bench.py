"""The command bench offload: measures targets that are larger than memory."""

from typing import Annotated

import typer

from specinfer.cli.commands import checking
from specinfer.cli.measure import drafter_names
from specinfer.cli.options import (
    DEBUG,
    DEVICE,
    DRAFTER_QUANTIZATION,
    DRAFTERS,
    DTYPE,
    GROW,
    JSON,
    PLOT,
    QUANTIZATION,
    SEED,
    SELECT,
    flag,
)
from specinfer.cli.screen import Screen
from specinfer.cli.terminal import quiet_libraries


def offload(
    model: Annotated[str, typer.Argument(metavar="MODEL")] = "demo",
    *,
    drafter: DRAFTERS = None,
    grow: GROW = None,
    dtype: DTYPE = "auto",
    quantization: QUANTIZATION = None,
    drafter_quantization: DRAFTER_QUANTIZATION = None,
    offload: Annotated[
        str, flag("Model", "Where layers lie that do not stay: disk, or cpu (host memory, for a target on a GPU).")
    ] = "disk",
    memory_budget: Annotated[
        str | None,
        flag(
            "Model",
            "What our process may hold, and each peer's, such as 2GiB; else a third of the target's weights.",
            metavar="SIZE",
        ),
    ] = None,
    offload_folder: Annotated[
        str | None,
        flag(
            "Model",
            "Keep a packed copy of the layers here and stream that; quantized ones need it.",
            metavar="DIR",
        ),
    ] = None,
    cap_own: Annotated[
        bool, flag("Model", "Hold our process to the budget by the operating system too, as the peers.", "--cap-own")
    ] = False,
    device: DEVICE = "auto",
    select: SELECT = None,
    tree: Annotated[list[str] | None, flag("Speculation", "A tree to measure; may be repeated; else auto.")] = None,
    peer: Annotated[
        list[str] | None,
        flag(
            "Speculation",
            "Another engine, held to the same memory: accelerate (layers on the disk), accelerate-cpu (in host memory, "
            "for a GPU), llama.cpp (mapped) or llama.cpp-draft; may end in a type of weights, such as :q8_0; may be "
            "repeated.",
            metavar="NAME",
        ),
    ] = None,
    batch: Annotated[
        list[int] | None, flag("Sampling", "Requests that run together; may be repeated; else 1 and 16.")
    ] = None,
    temperature: Annotated[
        list[float] | None, flag("Sampling", "0 is greedy; may be repeated; else 0 and 1.", "--temperature")
    ] = None,
    num_prompts: Annotated[
        int, flag("Sampling", "Held-out texts for each batch size; a larger batch has as many as it holds.")
    ] = 4,
    prompt_chars: Annotated[int, flag("Sampling", "About how long they are.")] = 400,
    max_tokens: Annotated[int, flag("Sampling", "Tokens for each, also of peers that speculate.")] = 32,
    peer_tokens: Annotated[int, flag("Sampling", "Tokens for each of peers that say one a pass.")] = 8,
    repeats: Annotated[int, flag("Sampling", "Measured runs of each arm on each batch.")] = 1,
    disk_seconds: Annotated[
        float, flag("Sampling", "How long the disk is read in each of two ways, before and after each arm.")
    ] = 1.0,
    check_resident: Annotated[
        bool, flag("Output", "Load the target whole at the end and compare its tokens.", "--check-resident")
    ] = False,
    seed: SEED = 0,
    as_json: JSON = None,
    plot: PLOT = None,
    debug: DEBUG = False,
) -> None:
    """Time a target streamed from the disk: trees against plain decoding, the disk, and engines with as much memory."""
    quiet_libraries(debug=debug)
    from specinfer.bench.offload import run_offload
    from specinfer.bench.offload_plans import OffloadBenchConfig
    from specinfer.bench.offload_table import print_offload

    screen = Screen()
    with checking():
        config = OffloadBenchConfig(
            model=model,
            drafters=drafter_names(drafter),
            trees=tuple(tree or ["auto"]),
            peers=tuple(peer or []),
            grow=grow,
            dtype=dtype,
            quantization=quantization,
            drafter_quantization=drafter_quantization,
            select=select or "all",
            device=device,
            offload=offload,
            memory_budget=memory_budget,
            offload_folder=offload_folder,
            cap_own=cap_own,
            check_resident=check_resident,
            batch_sizes=tuple(batch or (1, 16)),
            temperatures=tuple(temperature or (0.0, 1.0)),
            num_prompts=num_prompts,
            prompt_chars=prompt_chars,
            max_tokens=max_tokens,
            peer_tokens=peer_tokens,
            repeats=repeats,
            disk_seconds=disk_seconds,
            seed=seed,
            json=as_json,
            plot=plot,
        )
        report = run_offload(config, screen.err)
    print_offload(report, screen.out)
