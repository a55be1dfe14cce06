"""`spawn_engine`: starts engines with a command of yours, as processes that end with a block."""

from __future__ import annotations

import itertools
import logging
import os
import re
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import attrs
import trio

from trio_vllm.concurrency import explains_misuse, running
from trio_vllm.errors import (
    ConfigurationError,
    EngineCommandEndedError,
    EngineCommandError,
    EngineDeadError,
    StartupError,
)
from trio_vllm.processes import (
    ChildProcess,
    EndTimes,
    ProcessFailedError,
    child_process,
    end_in_words,
)
from trio_vllm.transport import SERVED_BEFORE, EngineChannels, HandshakeOwner
from trio_vllm.values import define, frozen

_log = logging.getLogger("trio_vllm.spawn")

PORT = "{port}"
ADDRESS = "{address}"

LOG_LINES = 20
"""Last lines of a command that are kept for the error that tells of its end."""

END_DELAY = 0.5
"""Seconds in which the end of a command must come that belongs to the death of its engine."""

SPAWNED_END = EndTimes(normal=5.0, hurried=0.3)
"""How long spawned engines may take to end; a program that is stopped has a second at most."""


@explains_misuse("spawn_engine", instead="trio_vllm.asyncio.spawn_engine")
@asynccontextmanager
async def spawn_engine(
    command: Sequence[str],
    *,
    engine_count: int = 1,
    handshake_address: str | None = None,
    host: str = "127.0.0.1",
    coordinator: bool = False,
    ready_timeout: float = 600.0,
    startup_timeout: float = float("inf"),
    restart: bool = False,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
    end_times: EndTimes = SPAWNED_END,
) -> AsyncIterator[SpawnedEngine]:
    """Start engines: ``async with spawn_engine(command) as mode``, for `open_llm` and `open_client`.

    The command starts at once, and loads its model while the program does something else. When the
    block is left it is ended with all that it has started: by SIGTERM, and by SIGKILL after a while.
    That is so even if this process is killed.

    Args:
      command: The program, by its path or by a name that is on ``PATH``, and its arguments, such as
        ``["vllm", "serve", MODEL, "--headless", …]``. ``{port}`` and ``{address}`` in it stand for
        the handshake address. Without any, the address is the one that it names, or
        ``handshake_address``.
      engine_count: How many engines the command starts.
      handshake_address: Where they report, bound by us; a free port of the loopback interface if it
        is None and the command has a placeholder.
      host: As in `HandshakeOwner`, which has the next three, too.
      coordinator: See there.
      ready_timeout: See there.
      startup_timeout: See there.
      restart: Whether each further connection starts the command anew. A real engine serves one
        connection in its life, so without it there can be only one, also to a mock.
      env: Variables of the environment, besides those of this process and before them.
      on_line: Called with each line that the command prints.
      end_times: Seconds from SIGTERM to SIGKILL.

    Raises:
      ConfigurationError: The command names no address, and none is given.
      EngineCommandError: The command cannot be started.
      EngineCommandEndedError: The command ends before its engines are ready. Connecting raises it, at
        once and with the last lines that the command printed.

    Cancellation:
      Ends the command, more hastily.
    """
    _check_command(command)
    address = handshake_address or address_in(command)
    if address is None:
        raise ConfigurationError(
            f"the command names no port: write {PORT} in it, or give an address"
        )
    engine = SpawnedEngine(
        HandshakeOwner(
            handshake_address=address,
            engine_count=engine_count,
            host=host,
            coordinator=coordinator,
            ready_timeout=ready_timeout,
            startup_timeout=startup_timeout,
        ),
        _Command(list(command), None if env is None else {**os.environ, **env}, on_line, end_times),
        can_restart=restart,
    )
    async with running(engine.hold_nursery):
        await engine.start()
        yield engine


def _check_command(command: Sequence[object]) -> None:
    """Refuse what is no list of strings, with a `TypeError`."""
    if isinstance(command, str):
        raise TypeError(
            "spawn_engine takes a list of the program and its arguments, not a string:"
            f" write shlex.split({command!r})"
        )
    for argument in command:
        if not isinstance(argument, str):
            raise TypeError(f"spawn_engine takes a list of strings; {argument!r} is none")


@frozen
class _Command:
    """How a command is run."""

    arguments: Sequence[str]
    env: Mapping[str, str] | None
    on_line: Callable[[str], None] | None
    end_times: EndTimes

    async def run(  # noqa: ASYNC114
        self, address: str, *, task_status: trio.TaskStatus[_Run] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Task: run it until `_Run.leave` is set; a failed start is raised by `trio.Nursery.start`."""
        arguments = substitute_address(self.arguments, address)
        run = _Run(address)

        def take_line(line: str) -> None:
            run.log.append(line)
            if self.on_line is not None:
                self.on_line(line)

        async with child_process(
            arguments[0],
            arguments,
            on_line=take_line,
            own_session=True,
            times=self.end_times,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
        ) as run.process:
            _log.info("started %s as process %d", arguments[0], run.process.pid)
            task_status.started(run)
            await run.leave.wait()
        run.gone.set()


@define(eq=False)
class _Run:
    """One run of a command, from its start to its end."""

    address: str
    process: ChildProcess = attrs.field(init=False)
    log: deque[str] = attrs.field(factory=lambda: deque(maxlen=LOG_LINES), init=False)
    is_used: bool = attrs.field(default=False, init=False)
    """Whether somebody has connected to its engines, or has tried to."""
    leave: trio.Event = attrs.field(factory=trio.Event, init=False)
    gone: trio.Event = attrs.field(factory=trio.Event, init=False)

    async def wait_end(self) -> str:
        """Wait until the command ends by itself; gives how."""
        return f"the engine command {end_in_words(await self.process.wait())}"

    async def end(self) -> None:
        """End the command and all it has started."""
        self.leave.set()
        await self.gone.wait()


class SpawnedEngine:
    """Engines that a command of ours has started; an `EngineSource`, made by `spawn_engine`."""

    def __init__(self, owner: HandshakeOwner, command: _Command, *, can_restart: bool) -> None:
        self._owner = owner
        self._command = command
        self._can_restart = can_restart
        self._nursery_opened = trio.Event()
        self._nursery: trio.Nursery
        self._run: _Run

    @property
    def engine_indices(self) -> range:
        """The expected engines."""
        return self._owner.engine_indices

    @property
    def is_for_one_client(self) -> bool:
        """Whether the engines are told one output address: that of client 0."""
        return self._owner.is_for_one_client

    @property
    def handshake_address(self) -> str:
        """Where the engines of the present run of the command report."""
        return self._run.address

    @property
    def pid(self) -> int:
        """The process id of the command, which is the id of its process group."""
        return self._run.process.pid

    @property
    def log(self) -> Sequence[str]:
        """The last lines that the present run of the command has printed."""
        return tuple(self._run.log)

    async def wait_ended(self) -> str:
        """Wait until the command ends by itself; gives how, with its last line."""
        run = self._run
        return ": ".join([await run.wait_end(), *list(run.log)[-1:]])

    async def hold_nursery(self) -> None:
        """Task: hold the runs of the command."""
        async with trio.open_nursery() as self._nursery:
            self._nursery_opened.set()
            await trio.sleep_forever()

    async def start(self) -> None:
        """Run the command; `EngineCommandError` if it cannot be started."""
        await self._nursery_opened.wait()
        address = _fill_port(self._owner.handshake_address)
        try:
            self._run = await self._nursery.start(self._command.run, address)
        except ProcessFailedError as error:
            reason = str(error)
            program = self._command.arguments[0]
            if isinstance(error.__cause__, FileNotFoundError) and os.sep not in program:
                reason = _why_not_found(program)
            raise EngineCommandError(reason=reason) from None

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[EngineChannels]:
        """Wait for the engines to start, and give the channels to them.

        Raises:
          EngineCommandEndedError: The command ended before they were ready.
          EngineCommandError: It could not be started again.
          ConfigurationError: They have served a connection already, and there is no ``restart``.
          StartupError: As that of `HandshakeOwner`.
        """
        await self._renew_used()
        run = self._run
        run.is_used = True
        owner = attrs.evolve(self._owner, handshake_address=run.address)
        startup = _Startup(run)
        with startup.scope, _of_fresh_engines():
            async with running(startup.watch), owner.connect() as channels:
                startup.is_over = True
                try:
                    yield channels
                except EngineDeadError as error:
                    await _tell_end(run, error)  # noqa: ASYNC120
                    raise
        if startup.how_ended is not None:
            raise EngineCommandEndedError(
                missing_engines=list(self.engine_indices), reason=startup.how_ended, log=[*run.log]
            )

    async def _renew_used(self) -> None:
        """Start the command again if its engines have served a connection."""
        await trio.lowlevel.checkpoint()
        if not self._run.is_used:
            return
        if not self._can_restart:
            raise ConfigurationError(
                "a real engine serves one connection in its life: spawn_engine(..., restart=True) starts"
                " the command again for the next"
            )
        await self._run.end()
        await self.start()


@define(eq=False)
class _Startup:
    """The wait for the engines of a run, which the end of the command ends."""

    run: _Run
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    is_over: bool = attrs.field(default=False, init=False)
    how_ended: str | None = attrs.field(default=None, init=False)
    """How the command ended before its engines were ready."""

    async def watch(self) -> None:
        """Task: end the wait when the command ends."""
        how = await self.run.wait_end()
        if not self.is_over:
            self.how_ended = how
            self.scope.cancel(reason=how)


@contextmanager
def _of_fresh_engines() -> Iterator[None]:
    """Do not ask in a failure whether engines that we have just started have served another frontend."""
    try:
        yield
    except StartupError as error:
        error.notes = [note.removesuffix(SERVED_BEFORE) for note in error.notes]
        raise


async def _tell_end(run: _Run, error: EngineDeadError) -> None:
    """Say in an error how the command ended that was to run the engine; a note has the end of its log."""
    with trio.move_on_after(END_DELAY):
        how = await run.wait_end()
        error.reason += f"; {how}"
        error.add_note("\n".join(["The last lines of its log:", *run.log]))


def _why_not_found(program: str) -> str:
    """What is said of a program that is not there; it may be in an environment that is not active."""
    reason = f"cannot start {program}: not found on PATH"
    if (beside := Path(sys.executable).with_name(program)).is_file():
        reason += f"; there is {beside} next to this Python"
    return reason


# Addresses in commands ----------------------------------------------------------------------------


def address_in(command: Sequence[str]) -> str | None:
    """The handshake address that an engine's command line names; None if it names none.

    That is a placeholder for it, or else an address, vLLM's options for it, or the one number that
    does not follow an option. For a placeholder it is an address with a placeholder.
    """
    if any(PORT in argument or ADDRESS in argument for argument in command):
        return f"tcp://127.0.0.1:{PORT}"
    for argument in command:
        if address := re.search(r"(?:^|=)((?:tcp|ipc)://.+)", argument):
            return address[1]
    if port := _value_of("--data-parallel-rpc-port", command):
        host = _value_of("--data-parallel-address", command) or "127.0.0.1"
        return f"tcp://{host}:{port}"
    numbers = [
        argument
        for before, argument in itertools.pairwise(command)
        if re.fullmatch("[0-9]+", argument) and not before.startswith("-")
    ]
    return f"tcp://127.0.0.1:{numbers[0]}" if len(numbers) == 1 else None


def _value_of(option: str, command: Sequence[str]) -> str | None:
    """What follows an option, after a space or an equals sign."""
    found = re.search(rf"^{option}[\n=](.+)$", "\n".join(command), re.MULTILINE)
    return found and found[1]


def substitute_address(command: Sequence[str], address: str) -> list[str]:
    """The command with the handshake address in the place of its placeholders."""
    port = address.rpartition(":")[2]
    return [argument.replace(PORT, port).replace(ADDRESS, address) for argument in command]


def _fill_port(address: str) -> str:
    return address.replace(PORT, str(free_port())) if PORT in address else address


def free_port() -> int:
    """A TCP port that nothing listens on; the engines must be told it before we bind it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
