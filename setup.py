"""Build step that pyproject.toml cannot state: the files of the native library compile side by side, one per core."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.extension import Extension


class ParallelBuild(build_ext):
    """`build_ext` that compiles the sources of an extension in parallel (its own `--parallel` is over extensions)."""

    def build_extension(self, ext: Extension) -> None:
        compile_files = self.compiler.compile

        def compile_in_parallel(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = pool.map(lambda source: compile_files([source], **options), sources)
                return [path for paths in objects for path in paths]

        self.compiler.compile = compile_in_parallel
        super().build_extension(ext)


setup(cmdclass={"build_ext": ParallelBuild})
