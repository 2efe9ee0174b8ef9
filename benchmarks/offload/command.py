"""The command offload: measures targets that are larger than memory."""

from typing import Annotated

import typer

from specinfer.cli.bench_options import GrowableOptions, ReportOptions
from specinfer.cli.errors import checking
from specinfer.cli.options import (
    DEVICE,
    SELECT,
    flag,
)


def offload(
    model: Annotated[str, typer.Argument(metavar="MODEL")] = "demo",
    *,
    models: GrowableOptions,
    offload: Annotated[
        str, flag("Model", "Where to keep offloaded layers: disk, or cpu (host memory, for a target on a GPU).")
    ] = "disk",
    memory_budget: Annotated[
        str | None,
        flag(
            "Model",
            "Memory limit of this process and of each peer, such as 2GiB. (default: a third of the weights)",
            metavar="SIZE",
        ),
    ] = None,
    offload_folder: Annotated[
        str | None,
        flag(
            "Model",
            "Folder for a packed copy of the offloaded layers. Required for quantized layers.",
            metavar="DIR",
        ),
    ] = None,
    cap_own: Annotated[
        bool,
        flag("Model", "Enforce the memory limit of this process by the operating system, as for peers.", "--cap-own"),
    ] = False,
    device: DEVICE = "auto",
    select: SELECT = None,
    tree: Annotated[
        list[str] | None, flag("Speculation", "Token tree to measure. May be repeated. (default: auto)")
    ] = None,
    peer: Annotated[
        list[str] | None,
        flag(
            "Speculation",
            "Another engine with the same memory limit: accelerate (layers on the disk), accelerate-cpu (in host "
            "memory, for a GPU), llama.cpp (mapped) or llama.cpp-draft; may end in a type of weights, such as :q8_0; "
            "may be repeated.",
            metavar="NAME",
        ),
    ] = None,
    batch: Annotated[list[int] | None, flag("Sampling", "Batch size. May be repeated. (default: 1 and 16)")] = None,
    temperature: Annotated[
        list[float] | None,
        flag("Sampling", "Temperature; 0 is greedy. May be repeated. (default: 0 and 1)", "--temperature"),
    ] = None,
    num_prompts: Annotated[
        int, flag("Sampling", "Number of held-out texts for each batch size; at least the batch size.")
    ] = 4,
    prompt_chars: Annotated[int, flag("Sampling", "Approximate length of texts, in characters.")] = 400,
    max_tokens: Annotated[
        int, flag("Sampling", "Number of tokens to generate for each text, also by peers that speculate.")
    ] = 32,
    plain_tokens: Annotated[
        int | None, flag("Sampling", "Number of tokens to generate by plain decoding. (default: that of --max-tokens)")
    ] = None,
    peer_tokens: Annotated[int, flag("Sampling", "Number of tokens to generate by peers that do not speculate.")] = 8,
    repeats: Annotated[int, flag("Sampling", "Number of measured runs of each arm on each batch.")] = 1,
    disk_seconds: Annotated[
        float, flag("Sampling", "Duration of each disk read measurement before and after each arm, in seconds.")
    ] = 1.0,
    check_resident: Annotated[
        bool, flag("Output", "Load the whole target into memory at the end and compare the tokens.", "--check-resident")
    ] = False,
    report: ReportOptions,
) -> None:
    """Compare an offloaded target with plain decoding, the disk, and other engines with the same memory limit."""
    screen = report.screen()
    from benchmarks.offload.plans import OffloadBenchConfig
    from benchmarks.offload.run import run_offload
    from benchmarks.offload.views import print_offload

    with checking():
        config = OffloadBenchConfig(
            model=model,
            trees=tuple(tree or ["auto"]),
            peers=tuple(peer or []),
            **models.settings(),
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
            plain_tokens=plain_tokens,
            peer_tokens=peer_tokens,
            repeats=repeats,
            disk_seconds=disk_seconds,
            **report.settings(),
        )
        result = run_offload(config, screen.err)
    print_offload(result, screen.out)
