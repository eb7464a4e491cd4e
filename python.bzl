"""The rules of the BUILD files: one library a room, one test a test file."""

load(
    "@rules_python//python:defs.bzl",
    _py_library = "py_library",
    _py_test = "py_test",
)

def py_library(name, srcs = None, **kwargs):
    """All files of a folder but its tests, for everybody."""
    if srcs == None:
        srcs = native.glob(["*.py"], exclude = ["*_test.py"])
    _py_library(
        name = name,
        srcs = srcs,
        testonly = native.package_name().split("/")[0] == "tests",
        visibility = ["//visibility:public"],
        **kwargs
    )

def py_tests(deps, **kwargs):
    """One test for each file.

    Args:
      deps: for each file, named without `.py`, what it needs; `//tests` and
        what that needs are added.
      **kwargs: further attributes of each test.
    """
    for name, needs in deps.items():
        _py_test(
            name = name,
            # tests/conftest.py limits each test of the file.
            size = "large",
            srcs = [name + ".py", "//tests:pytest_main.py"],
            args = ["%s/%s.py" % (native.package_name(), name)],
            main = "//tests:pytest_main.py",
            deps = needs + ["//tests"],
            **kwargs
        )
