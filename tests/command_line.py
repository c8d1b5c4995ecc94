"""Commands, run as a user would who sits at no terminal."""

import re

from click.testing import Result
from typer.testing import CliRunner

from scalewright.cli import app


def invoke(*words: object, code: int = 0) -> Result:
    """How a command ends; with that exit code."""
    result = CliRunner().invoke(app, [str(each) for each in words])
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    return result


def run(*words: object) -> str:
    """What a command prints; nothing but results, for no terminal is at hand."""
    result = invoke(*words)
    assert result.stderr == ""
    return result.stdout


def error_of(*words: object) -> str:
    """The one line that a mistake gets, on stderr; exit code 2, and nothing else is printed."""
    result = invoke(*words, code=2)
    head, line, *others = re.split("^(?=error )", result.stderr, flags=re.MULTILINE)
    assert (result.stdout, head, others, line.count("\n")) == ("", "", [], 1), result.output
    return line.removeprefix("error ").removesuffix("\n")
