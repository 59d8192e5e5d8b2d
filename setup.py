"""The optional native CPU backend; everything else about the package is in pyproject.toml.

It is loaded through ctypes and calls nothing of Python, so that one build serves every interpreter.
"""

import sysconfig
from glob import glob

from setuptools import Extension, setup

# A free-threaded interpreter takes no wheel of the stable ABI, though this library would serve it as well.
STABLE_ABI = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    ext_modules=[
        Extension(
            "pagedkv._native",
            sources=sorted(glob("pagedkv/csrc/*.cpp")),
            depends=sorted(glob("pagedkv/csrc/*.h")),
            language="c++",
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                # the interpreter's own flags bring -g, which is most of the library's size
                "-g0",
                "-fvisibility=hidden",
                # never -ffast-math: it folds the rounding in exp2 and forgets NaN
                "-fno-math-errno",
                "-fno-trapping-math",
                "-pthread",
            ],
            extra_link_args=["-pthread"],
            # without a compiler the install still succeeds, and the torch backend serves
            optional=True,
            py_limited_api=STABLE_ABI,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if STABLE_ABI else {},
)
