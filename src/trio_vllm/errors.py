"""`EngineCoreError` and its subclasses: the exceptions of this package, in one tree.

Everything that a peer, the network or a bad request can cause derives from `EngineCoreError`; each
carries fields, and its text is built from them. Misuse by the programmer is a `TypeError`,
`ValueError` or `RuntimeError`. `InternalError` stands outside: it is a bug of ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from trio_vllm.values import define


class EngineCoreError(Exception):
    """Anything that this package raises about a peer, the network or a request."""


class InternalError(Exception):
    """A background task crashed: a bug of this package, please report it."""


@define(eq=False, str=False)
class ConfigurationError(EngineCoreError):
    """An address, a combination of options or an environment that cannot work."""

    reason: str

    def __str__(self) -> str:
        return self.reason


@define(eq=False, str=False)
class AddressInUseError(ConfigurationError):
    """Another socket listens on this address."""

    address: str = attrs.field()
    reason: str = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.reason = f"address {self.address} is already in use"


@define(eq=False, str=False)
class PeerGoneError(EngineCoreError):
    """A message was addressed to an engine that is not connected (any more)."""

    engine_id: bytes

    def __str__(self) -> str:
        return f"no engine with id {self.engine_id.hex()} is connected"


@define(eq=False, str=False)
class StartupError(EngineCoreError):
    """The startup of a frontend or an engine did not complete.

    ``phase`` is what was waited for, ``missing_engines`` the indices that had not reached it,
    ``seconds`` how long the wait lasted, ``notes`` what else was seen (unexpected peers, garbage).
    """

    phase: str
    missing_engines: Sequence[int] = ()
    seconds: float = 0.0
    notes: Sequence[str] = ()

    @property
    def awaited(self) -> str:
        """What was waited for, and from which engines."""
        if not self.missing_engines:
            return self.phase
        return f"{self.phase} from engine {', '.join(map(str, self.missing_engines))}"

    def __str__(self) -> str:
        text = f"startup failed while waiting for {self.awaited}"
        if self.seconds:
            text += f" (gave up after {self.seconds:g} s)"
        return "; ".join([text, *self.notes])


@define(eq=False, str=False)
class EngineCommandError(StartupError):
    """The command that was to start engines could not be started, or ended before they were ready.

    ``reason`` says which, ``log`` are the last lines that it printed. The second is an
    `EngineCommandEndedError`.
    """

    phase: str = attrs.field(default="the engine command", init=False)
    reason: str = attrs.field(kw_only=True)
    log: Sequence[str] = attrs.field(default=(), kw_only=True)

    def __attrs_post_init__(self) -> None:
        if len(self.log) > 1:
            self.add_note("\n".join(["The last lines of its log:", *self.log]))

    def __str__(self) -> str:
        return ": ".join([self.reason, *self.log[-1:]])


@define(eq=False, str=False)
class EngineCommandEndedError(EngineCommandError):
    """The command that had started engines ended before they were ready."""


@define(eq=False, str=False)
class EngineDeadError(EngineCoreError):
    """An engine died or its connection was lost; ``__cause__`` is the first reason, if any."""

    engine_index: int | None
    reason: str = "connection lost"

    def __str__(self) -> str:
        who = "an engine" if self.engine_index is None else f"engine {self.engine_index}"
        return f"{who} is dead: {self.reason}"


class ClientClosedError(EngineCoreError):
    """The client was used after its block was left, or closed while the call was under way."""

    def __str__(self) -> str:
        return "the client is closed"


@define(eq=False, str=False)
class RequestError(EngineCoreError):
    """A request was refused before anything was sent; nothing else is affected."""

    request_id: str

    def __str__(self) -> str:
        return f"request {self.request_id!r} was refused"


@define(eq=False, str=False)
class RequestFailedError(EngineCoreError):
    """An engine ended a request with an error; raised by ``raise_for_error`` of an output."""

    request_id: str
    code: str | None
    reason: str
    retryable: bool

    def __str__(self) -> str:
        return f"request {self.request_id!r} failed at the engine: {self.reason}"


@define(eq=False, str=False)
class DuplicateRequestIdError(RequestError):
    """A request with this id is already in flight on this client."""

    def __str__(self) -> str:
        return f"request id {self.request_id!r} is already in flight"


@define(eq=False, str=False)
class EmptyPromptError(RequestError):
    """The request has no prompt token; an engine dies of that."""

    def __str__(self) -> str:
        return f"request {self.request_id!r} has an empty prompt"


@define(eq=False, str=False)
class InvalidDataParallelRankError(RequestError):
    """The request is pinned to a rank that is not (or no longer) connected."""

    data_parallel_rank: int
    engine_indices: Sequence[int]

    def __str__(self) -> str:
        return (
            f"request {self.request_id!r} is pinned to data-parallel rank"
            f" {self.data_parallel_rank}, connected are {list(self.engine_indices)}"
        )


@define(eq=False, str=False)
class InvalidFieldError(RequestError):
    """A field of the request has a value that the engine would reject or die of."""

    field: str
    reason: str

    def __str__(self) -> str:
        return f"request {self.request_id!r}: {self.field} {self.reason}"


@define(eq=False, str=False)
class UnsupportedFieldError(InvalidFieldError):
    """A field is used that this engine, or this way of calling it, does not support."""


@define(eq=False, str=False)
class AdapterError(RequestError):
    """The adapter of a request does not load; an engine would die of the request."""

    lora_name: str
    reason: str

    def __str__(self) -> str:
        return (
            f"request {self.request_id!r}: the adapter {self.lora_name!r} does not load:"
            f" {self.reason}"
        )


@define(eq=False, str=False)
class UtilityError(EngineCoreError):
    """A utility call did not give its result."""

    method: str

    def __str__(self) -> str:
        return f"utility call {self.method!r} failed"


@define(eq=False, str=False)
class UtilityRefusedError(UtilityError):
    """A utility call was refused before anything was sent; ``reason`` says why."""

    reason: str

    def __str__(self) -> str:
        return f"utility call {self.method!r} was refused: {self.reason}"


@define(eq=False, str=False)
class UtilityResultError(UtilityError):
    """All engines ran a utility method, but one gave a result of a wrong type."""

    engine_index: int
    expected: str
    result: object

    def __str__(self) -> str:
        return (
            f"utility call {self.method!r}: engine {self.engine_index} answered"
            f" {repr(self.result)[:200]}, not {self.expected}"
        )


@define(eq=False, str=False)
class UtilityCallFailedError(UtilityError):
    """One or more engines answered a utility call with a failure (or died under it).

    ``failures`` maps engine index to its text, ``succeeded`` lists the engines that did run the
    method, so that a caller can compensate.
    """

    call_id: int
    failures: Mapping[int, str]
    succeeded: Sequence[int] = ()

    def __str__(self) -> str:
        failures = "; ".join(f"engine {i}: {text}" for i, text in self.failures.items())
        text = f"utility call {self.method!r} (call id {self.call_id}) failed on {failures}"
        if self.succeeded:
            text += f"; it succeeded on engine {', '.join(map(str, self.succeeded))}"
        return text


@define(eq=False, str=False)
class UtilityTimeoutError(UtilityError):
    """Some engines did not answer a utility call in time; they may still run it."""

    call_id: int
    missing_engines: Sequence[int]
    seconds: float

    def __str__(self) -> str:
        return (
            f"utility call {self.method!r} (call id {self.call_id}): no answer from engine"
            f" {', '.join(map(str, self.missing_engines))} after {self.seconds:g} s"
        )


@define(eq=False, str=False)
class InconsistentUtilityResultsError(UtilityError):
    """Engines that had to agree gave different results."""

    results: Mapping[int, object]

    def __str__(self) -> str:
        results = "; ".join(f"engine {i}: {value!r}" for i, value in self.results.items())
        return f"utility call {self.method!r} gave different results: {results}"


@define(eq=False, str=False)
class DecodeError(EngineCoreError):
    """A message from a peer does not have the form it must have.

    ``what`` was being decoded, ``where`` in it the fault lies (a path such as ``outputs[3].events``),
    ``reason`` says what is wrong there.
    """

    what: str
    where: str
    reason: str
    engine_index: int | None = None
    request_id: str | None = None

    def __str__(self) -> str:
        text = f"cannot decode {self.what}"
        if self.engine_index is not None:
            text += f" from engine {self.engine_index}"
        if self.request_id is not None:
            text += f" for request {self.request_id!r}"
        if self.where:
            text += f" at {self.where}"
        return f"{text}: {self.reason}"


def with_article(name: str) -> str:
    """A name behind ``a`` or ``an``."""
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def how_to_install(extra: str) -> str:
    """The command that installs what an extra of this package needs, for its users and in a clone."""
    return f"pip install 'trio-vllm[{extra}]', in a clone pip install '.[{extra}]'"


def copy_error(error: EngineCoreError) -> EngineCoreError:
    """An exception like ``error``, to raise: the same one, raised twice, would mix its tracebacks."""
    again = type(error)(*error.args)
    again.__cause__ = error.__cause__
    return again
