"""The two optional compiled parts; everything else about the package is in pyproject.toml.

Without a compiler the install still succeeds: the torch backend attends, and numpy keeps the books.
"""

from glob import glob

from setuptools import Extension, setup

FLAGS = [
    "-std=c++17",
    "-O3",
    # the interpreter's own flags bring -g, which is most of a library's size
    "-g0",
    "-fvisibility=hidden",
]

setup(
    ext_modules=[
        # Of Python it calls the stable interface alone: one library for all versions.
        Extension(
            "pagedkv._native",
            sources=sorted(glob("pagedkv/csrc/*.cpp")),
            depends=sorted(glob("pagedkv/csrc/*.h")),
            language="c++",
            extra_compile_args=[
                *FLAGS,
                # never -ffast-math: it folds the rounding in exp2 and forgets NaN
                "-fno-math-errno",
                "-fno-trapping-math",
                "-pthread",
            ],
            extra_link_args=["-pthread"],
            define_macros=[("Py_LIMITED_API", "0x030A0000")],
            optional=True,
            py_limited_api=True,
        ),
        # A Python module of one interpreter version: the buffer protocol is in the stable ABI from 3.11 on.
        Extension(
            "pagedkv._core",
            sources=sorted(glob("pagedkv/csrc_core/*.cpp")),
            depends=sorted(glob("pagedkv/csrc_core/*.h")),
            language="c++",
            # blocks are compared as bytes and hashed as words
            extra_compile_args=[*FLAGS, "-Wall", "-Wextra", "-fno-strict-aliasing"],
            optional=True,
        ),
    ],
)
