"""`invoke` runs a command; what both commands share: options and their sources, output, signals, exit codes.

Showing the help is to be quick, so nothing here imports trio (a third of a second) before a command
runs.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO, TypeVar

from cyclopts import App, ArgumentCollection, CycloptsError, Parameter
from cyclopts.config import Dict, Env

if TYPE_CHECKING:
    import trio

T = TypeVar("T")

FAILED = 1
"""The exit code if it could not be done."""

WRONG_USAGE = 2
"""The exit code for a command line that makes no sense."""

LONGEST_TEXT = 500
"""Characters that are shown of a text that others have written."""

STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})


class OutputError(Exception):
    """Standard output takes no more; the text says why, and is empty if nobody reads it any more."""


# Options ------------------------------------------------------------------------------------------


def new_app(name: str, description: str, **options: Any) -> App:
    """An app that reads the command line, then ``NAME_*`` variables, then ``--config FILE.toml``."""
    app = App(
        name=name,
        help=description,
        version=lambda: importlib.metadata.version("trio-vllm"),
        version_flags=["--version", "-V"],
        config=[Env(_variable_prefix(name), command=False), read_config_file],
        default_parameter=Parameter(negative=(), show_env_var=False, show_default=_shown_default),
        backend="trio",
        result_action="return_value",
        # Markdown would take a third of the time that showing the help takes.
        help_format="plaintext",
        version_format="plaintext",
        **options,
    )

    @app.command(name="--completion")
    def print_completion(shell: Literal["bash", "fish", "zsh"], /) -> int:
        """Print a script that lets this shell complete options."""
        write_output(app.generate_completion(shell=shell))
        return 0

    return app


def read_config_file(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """A source of options for cyclopts: the TOML file that ``--config`` names.

    Its keys are the options' names. Those at the top are for every command, those in a table with a
    command's name are for this one and win. What other sources gave before this one stays.
    """
    argument = arguments.get("--config", None)
    if argument is None or not argument.tokens:
        return
    import tomllib  # 6 ms, and most starts have no such file

    path = Path(argument.tokens[-1].value)
    try:
        options = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CycloptsError(msg=f"--config {path}: {error.strerror}.") from error
    except ValueError as error:  # what is no TOML, or no text
        raise CycloptsError(msg=f"--config {path}: {error}.") from error
    except RecursionError as error:
        raise CycloptsError(msg=f"--config {path}: nested too deeply.") from error
    for use_tables in (True, False):
        source = Dict(options, source=str(path), use_commands_as_keys=use_tables)
        source(app, commands, arguments)


def check_address(_type: Any, value: str | None) -> None:
    """Refuse, by `ValueError`, what is no address to connect to."""
    if value is None:
        return
    from trio_vllm import ConfigurationError  # 30 ms that the help does not need
    from trio_vllm.endpoint import ADDRESS_FORMS, parse_endpoint

    try:
        parse_endpoint(value, port_required=True)
    except ConfigurationError as error:
        raise ValueError(f"Must be {ADDRESS_FORMS} ({error}).") from error


def unknown_variables(app: App) -> list[str]:
    """The variables of the environment that look like options of this app, and are none."""
    prefix = _variable_prefix(app.name[0])
    variables = sorted(name for name in os.environ if name.startswith(prefix))
    if not variables:
        return []
    commands = [app, *(app[name] for name in app if not name.startswith("-"))]
    options = {
        _variable(name)
        for command in commands
        if command.default_command is not None
        for argument in command.assemble_argument_collection()
        for name in argument.names
    }
    return [name for name in variables if name.removeprefix(prefix) not in options]


def _variable_prefix(command: str) -> str:
    return f"{_variable(command)}_"


def _variable(name: str) -> str:
    """The variable, or its part, that stands for a command or an option."""
    return name.lstrip("-").upper().replace("-", "_")


def _shown_default(value: object) -> object:
    """That a flag is off by default goes without saying."""
    return None if value is False else value


# Running ------------------------------------------------------------------------------------------


def invoke(app: App, tokens: Sequence[str] | None = None) -> int:
    """Run the command that ``tokens`` (or this process's arguments) ask for; gives the exit code.

    A command whose output is lost has failed: whatever it found out, nobody was told.
    """
    try:
        if unknown := unknown_variables(app):
            print_line(app, f"ignores what is no option: {', '.join(unknown)}")
        exit_code: int | None = app(tokens, exit_on_error=False, print_error=False)
        flush_output()
    except CycloptsError as error:
        print_line(app, str(error))
        return WRONG_USAGE
    except (OSError, OutputError) as error:  # of commands themselves no OSError gets here
        _discard(sys.stdout)
        reason = error.strerror if isinstance(error, OSError) else str(error)
        if reason and not isinstance(error, BrokenPipeError):
            print_line(app, f"cannot write to standard output: {reason}")
        return FAILED
    return exit_code or 0


async def until_stopped(
    work: Callable[[], Awaitable[T]], shutdown: trio.Event | None = None
) -> T | signal.Signals:
    """Do ``work``; a signal cancels it, and is given instead of its result.

    With ``shutdown`` the first signal only sets that, and ``work`` is to end by itself; the second one
    cancels it. SIGINT counts even where it is ignored, which a shell without job control passes on to
    what it starts in the background. SIGHUP does not: ``nohup`` means it.
    """
    import trio

    from trio_vllm.concurrency import running

    numbers = set(STOP_SIGNALS)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        numbers.discard(signal.SIGHUP)
    stopped_by: signal.Signals | None = None
    with trio.open_signal_receiver(*numbers) as received, trio.CancelScope() as scope:

        async def watch() -> None:
            nonlocal stopped_by
            async for number in received:
                if shutdown is not None and not shutdown.is_set():
                    shutdown.set()
                    continue
                stopped_by = stopped_by or signal.Signals(number)
                scope.cancel(reason=f"stopped by {stopped_by.name}")

        async with running(watch):
            return await work()
    assert stopped_by is not None
    return stopped_by


# Output -------------------------------------------------------------------------------------------


def one_line(text: str) -> str:
    """A text that others have written, in one printable line of at most `LONGEST_TEXT` characters.

    What is too long loses its middle: the beginning says what it is, the end is what was said last.
    """
    text = " ".join(text.split()) if len(text) <= LONGEST_TEXT else _without_middle(text)
    if not text.isprintable():  # colours, cursor movements and the like are not for this terminal
        text = "".join(_escaped(character) for character in text)
    return text if len(text) <= LONGEST_TEXT else _without_middle(text)


def _without_middle(text: str) -> str:
    half = LONGEST_TEXT // 2 - 3
    return f"{' '.join(text[:half].split())} ... {' '.join(text[-half:].split())}"


def _escaped(character: str) -> str:
    return character if character.isprintable() else repr(character)[1:-1]


def print_line(app: App | str, text: str) -> None:
    """Say one thing on standard error, in one line whatever it is made of."""
    write_error(f"{app if isinstance(app, str) else app.name[0]}: {one_line(text)}")


def print_traceback(error: BaseException) -> None:
    """Show on standard error where an error comes from."""
    for line in "".join(traceback.format_exception(error)).splitlines():
        write_error("".join(map(_escaped, line)))


def write_error(line: str) -> None:
    """Print a line to standard error at once, above a live view if there is one."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:  # there is no other place to say so
        _discard(sys.stderr)


def write_output(text: str) -> None:
    """Print to standard output at once; `OutputError` if that takes no more."""
    try:
        print(text, flush=True)
    except BrokenPipeError as error:
        raise OutputError("") from error
    except OSError as error:
        raise OutputError(error.strerror) from error


def flush_output() -> None:
    """Write what a library has printed; raises `OSError`, which at exit would be a traceback."""
    sys.stdout.flush()


def _discard(stream: TextIO) -> None:
    """Let a stream lead nowhere, so that Python does not try again at exit what has failed."""
    with suppress(OSError, ValueError):  # it has no descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


@contextmanager
def logging_to_stderr(layout: str, level: int = logging.INFO) -> Iterator[None]:
    """Let the package log to standard error while the block runs.

    It is one write per line, so lines of several processes do not mix.
    """
    handler = _Handler()
    handler.setFormatter(LineFormatter(layout))
    with logging_to(handler, level):
        yield


@contextmanager
def logging_to(handler: logging.Handler, level: int = logging.NOTSET) -> Iterator[None]:
    """Let the package log to a handler while the block runs."""
    logger = logging.getLogger("trio_vllm")
    before = logger.level
    logger.addHandler(handler)
    if level:
        logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


class LineFormatter(logging.Formatter):
    """Keeps what others have written to its line."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (logging's name)
        record.message = one_line(record.message)
        return super().formatMessage(record)


class _Handler(logging.StreamHandler[TextIO]):
    """Drops what standard error does not take, instead of printing a traceback to it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr  # which a live view replaces, so that lines come above it
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (logging's name)
        if isinstance(sys.exc_info()[1], OSError):
            _discard(sys.stderr)
        else:
            super().handleError(record)
