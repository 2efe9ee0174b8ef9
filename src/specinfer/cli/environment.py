"""The commands that print what is installed: collect-env and version."""

from importlib import metadata

import typer

import specinfer
from specinfer.core.systems import installed_memory, usable_cpus


def collect_env() -> None:
    """Print versions and hardware for bug reports, without names of users, machines or folders."""
    import platform

    import torch

    from specinfer import ops
    from specinfer.model.device import cpu_model, driver_version, why_no_cuda
    from specinfer.setup.engine import described, gpu_abilities

    packages = ("torch", "triton", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy")
    rows = {"specinfer": specinfer.__version__} | {name: _version_of(name) for name in packages}
    rows |= {
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_model() or "unknown",
        "cores": str(usable_cpus()),
        "memory": _memory(),
        "native kernels": ops.describe(),
        "native layers": "bfloat16 by its instructions" if ops.uses_dots(torch.bfloat16) else "all in float32",
        "torch threads": str(torch.get_num_threads()),
        "torch cpu capability": torch.backends.cpu.get_cpu_capability(),
        "torch cuda": torch.version.cuda or "not built in",
        "gpu driver": driver_version() or "not found",
    }
    why_none = why_no_cuda()  # PyTorch also counts devices whose driver it cannot use
    num_gpus = torch.cuda.device_count() if why_none is None else 0
    for i in range(num_gpus):
        properties = torch.cuda.get_device_properties(i)
        memory, capability = f"{properties.total_memory / 2**30:.0f} GiB", f"{properties.major}.{properties.minor}"
        rows[f"gpu {i}"] = f"{properties.name}, {memory}, compute capability {capability}"
        for line in described(gpu_abilities(torch.device("cuda", i))):
            part, _, answer = line.partition(": ")
            rows[f"gpu {i} {part}"] = answer
    if not num_gpus:
        rows["gpus"] = ", ".join(filter(None, ("none", why_none)))
    for name, value in rows.items():
        print(f"{name + ':':22}{value}")


def version() -> None:
    """Print the version."""
    show_version(True)


def show_version(asked: bool) -> None:
    if asked:
        print(f"specinfer {specinfer.__version__}")
        raise typer.Exit


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _memory() -> str:
    num_bytes = installed_memory()
    return "unknown" if num_bytes is None else f"{num_bytes / 2**30:.1f} GiB"
