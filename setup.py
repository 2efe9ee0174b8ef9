"""Build steps that pyproject.toml cannot state: which instruction sets are compiled, and in parts side by side.

A source install compiles portable code and the set of this processor; with SPECINFER_ISAS=all, and in wheels, all sets
are compiled, of which the best is chosen when the library is loaded. SPECINFER_ISAS may also name them:
"avx2,avx512_vnni". "none" builds the package without native code, which does not run (tools/wheels.py adds it).
"""

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, ExecError, PlatformError
from setuptools.extension import Extension

FOLDER = Path("src", "specinfer", "ops", "cpu")
PARTS = (2, 4, 1, 3)  # of an instruction set, as in isa.h: the longest first
NO_COMPILER = (
    "SpecInfer's code for CPUs is C++ and could not be compiled ({}).\n"
    "Install a C++17 compiler (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; macOS: xcode-select "
    "--install), or install a wheel, which needs none: pip install --only-binary specinfer specinfer"
)


class NativeBuild(build_ext):
    """`build_ext` that compiles some instruction sets, each in parts, on all cores."""

    def build_extension(self, ext: Extension) -> None:
        wanted = os.environ.get("SPECINFER_ISAS", "")
        if wanted == "none":
            return
        compile_files = self.compiler.compile
        try:
            if wanted != "all":
                self._choose(ext, wanted.split(",") if wanted else [self._processor()])

            def compile_in_parallel(sources: list[str], output_dir: str, **options: Any) -> list[str]:
                def compile_one(task: tuple[str, list[tuple[str, str]]]) -> list[str]:
                    source, macros = task
                    folder = os.path.join(output_dir, *(value for _, value in macros))
                    options["macros"] = [*(ext.define_macros or ()), *macros]
                    return list(compile_files([source], output_dir=folder, **options))

                with ThreadPoolExecutor(os.cpu_count()) as pool:
                    return [path for paths in pool.map(compile_one, tasks_of(sources)) for path in paths]

            self.compiler.compile = compile_in_parallel
            super().build_extension(ext)
        except (CCompilerError, ExecError, PlatformError, OSError) as error:
            raise SystemExit(NO_COMPILER.format(error)) from error

    def _choose(self, ext: Extension, names: list[str]) -> None:
        """Compile these instruction sets and portable code only."""
        files = {f"isa_{name}.cpp" for name in names if name} | {"isa_portable.cpp"}
        if missing := files - {Path(source).name for source in ext.sources}:
            raise SystemExit(f"SPECINFER_ISAS: no such instruction sets: {', '.join(sorted(missing))}")
        ext.sources = [
            source for source in ext.sources if not Path(source).name.startswith("isa_") or Path(source).name in files
        ]
        ext.define_macros = [
            ("SOME_ISAS", "1"),
            *((f"WITH_{name}", "1") for name in names if name not in ("", "portable")),
        ]

    def _processor(self) -> str:
        """Return the name of the best instruction set of this processor, or "" for portable code."""
        folder = os.path.join(self.build_temp, "processor")
        objects = self.compiler.compile(
            [str(FOLDER / "processor.cpp")], output_dir=folder, extra_postargs=["-std=c++17"]
        )
        self.compiler.link_executable(objects, "processor", output_dir=folder, target_lang="c++")
        return subprocess.run(
            [os.path.join(folder, "processor")], capture_output=True, text=True, check=True
        ).stdout.strip()


def tasks_of(sources: list[str]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield what is compiled, the longest first: a source and its macros."""
    sets = [source for source in sources if Path(source).name.startswith("isa_")]
    for part in PARTS:
        yield from ((source, [("ISA_PART", str(part))]) for source in sets)
    yield from ((source, []) for source in sources if source not in sets)


setup(cmdclass={"build_ext": NativeBuild})
