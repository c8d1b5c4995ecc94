"""The one part that is compiled, if there is a compiler: without it torch computes the same, in more time."""

from pathlib import Path
from zlib import crc32

from setuptools import Extension, setup

SOURCES = ["src/scalewright/numerics/_native.cpp", "src/scalewright/numerics/_loops.h"]
# native.py takes the loops only if they were compiled from the sources that lie beside it.
digest = crc32(b"".join(Path(__file__).parent.joinpath(source).read_bytes() for source in SOURCES))

setup(
    ext_modules=[
        Extension(
            "scalewright.numerics._native",
            SOURCES[:1],
            depends=SOURCES[1:],
            language="c++",
            extra_compile_args=["-std=c++17", "-O2", "-fno-trapping-math", "-fopenmp", "-Wno-psabi", "-g0"],
            extra_link_args=["-fopenmp"],
            define_macros=[("Py_LIMITED_API", "0x030A0000"), ("SOURCES", f'"{digest}"')],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
