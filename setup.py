"""The one part that is compiled, if there is a compiler: without it torch computes the same, in more time."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "scalewright.numerics._native",
            ["src/scalewright/numerics/_native.cpp"],
            depends=["src/scalewright/numerics/_loops.h"],
            language="c++",
            extra_compile_args=["-std=c++17", "-O2", "-fno-trapping-math", "-fopenmp", "-Wno-psabi", "-g0"],
            extra_link_args=["-fopenmp"],
            define_macros=[("Py_LIMITED_API", "0x030A0000")],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
