"""The rules of the BUILD files, with what all of them share."""

load(
    "@rules_python//python:defs.bzl",
    _py_library = "py_library",
    _py_test = "py_test",
)

def py_library(name, srcs, deps = [], **kwargs):
    """A library for everybody."""
    _py_library(
        name = name,
        srcs = srcs,
        deps = deps,
        visibility = ["//visibility:public"],
        **kwargs
    )

def py_tests(srcs, **kwargs):
    """One test for each file; tests/pytest_main.py runs it.

    Args:
      srcs: the files; `exchange/reader_test.py` is the test
        `exchange/reader_test`.
      **kwargs: attributes of each test.
    """
    for src in srcs:
        _py_test(
            name = src[:-len(".py")],
            # tests/conftest.py limits each test of the file.
            size = "large",
            srcs = [src, "pytest_main.py"],
            args = ["%s/%s" % (native.package_name(), src)],
            main = "pytest_main.py",
            **kwargs
        )
