"""Everything that is checked, built and measured here. ``nox -l`` lists the sessions."""

import os
import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["lint", "typing", "tests", "build"]
nox.options.error_on_missing_interpreters = False  # also in CI: test on what there is

ROOT = Path(__file__).parent
CHECKED = ["src", "tests", "smoke", "examples", "docs/conf.py", "noxfile.py"]
"""What is ours to check: a clone may hold other files, such as the README's ``hello.py``."""

PYPROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
PROJECT = PYPROJECT["project"]
PYTHONS = [
    classifier.rpartition(" ")[2]
    for classifier in PROJECT["classifiers"]
    if classifier.startswith("Programming Language :: Python :: 3.")
]

ON_ALL_CORES = ("-n", "auto", "--dist", "worksteal")


def reveal_pyenv() -> None:
    """Append pyenv's interpreters to the path: those not activated have shims that only fail."""
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    for version in PYTHONS:
        for folder in sorted(root.glob(f"versions/{version}.*/bin")):
            os.environ["PATH"] += f"{os.pathsep}{folder}"


reveal_pyenv()


def group(name: str) -> list[str]:
    """The requirements of a dependency group."""
    return list(nox.project.dependency_groups(PYPROJECT, name))


@nox.session
def lint(session: nox.Session) -> None:
    """Check rules, format and the use of trio."""
    session.install(*group("lint"))
    session.run("ruff", "check", *CHECKED)
    session.run("ruff", "format", "--check", *CHECKED)
    startable = "--startable-in-context-manager=serve_mock_engines"
    check_async = ("flake8-async", "--enable=ASYNC", startable, "--disable")
    # ASYNC109: a timeout parameter is our contract for every wait on a peer.
    # `trio_vllm.asyncio` is the one module whose coroutines are another loop's.
    ours = [path for path in python_files("src") if not path.endswith("/trio_vllm/asyncio.py")]
    session.run(*check_async, "ASYNC109", *ours)
    # A test need not wait (ASYNC91x, ASYNC124); a script may block on a process or a file (ASYNC2xx).
    relaxed = "ASYNC109,ASYNC113,ASYNC114,ASYNC116,ASYNC900,ASYNC91,ASYNC124,ASYNC2"
    session.run(
        *check_async,
        relaxed,
        *python_files("tests"),
        *python_files("smoke"),
        *python_files("examples"),
    )
    check_schemas(session)


def check_schemas(session: nox.Session) -> None:
    """Validate what is written for other programs to read."""
    forms = map(str, sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")))
    for schema, *files in (
        ("github-workflows", ".github/workflows/ci.yml"),
        ("github-issue-forms", *forms),
        ("compose-spec", "deploy/compose.yaml"),
    ):
        session.run("check-jsonschema", "--builtin-schema", f"vendor.{schema}", *files)
    session.run("kubernetes-validate", "--strict", "deploy/mock-engines.yaml")


@nox.session
def typing(session: nox.Session) -> None:
    """Check types, those of tests and scripts too."""
    session.install(".", *group("typing"))
    session.run("mypy")


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """Run the tests on each installed Python, on the lowest with coverage and more examples of property tests.

    Arguments go to pytest, and then it measures nothing.
    """
    session.install(".", *group("test"))
    if session.posargs:
        session.run("pytest", *session.posargs)
    elif session.python == PYTHONS[0]:
        test_thoroughly(session)
    else:
        session.run("pytest", *ON_ALL_CORES)


def test_thoroughly(session: nox.Session) -> None:
    """Run the tests with many examples, and measure what of the code they run."""
    # Not in `create_tmp`: the tests would have their folders there, with paths too long for sockets.
    coverage = {"COVERAGE_FILE": str(session.cache_dir.resolve() / "coverage")}
    pytest = ("pytest", *ON_ALL_CORES, "--hypothesis-profile=thorough")
    session.run("coverage", "erase", env=coverage)
    session.run("coverage", "run", "-m", *pytest, env=coverage)
    session.run("coverage", "combine", "--quiet", env=coverage)
    session.run("coverage", "report", env=coverage)


@nox.session(python=PYTHONS[0], default=False)
def minimums(session: nox.Session) -> None:
    """Run the tests with the lowest releases that we say we work with."""
    pins = [requirement.replace(">=", "==") for requirement in PROJECT["dependencies"]]
    session.install(".", *pins, *group("test"))
    session.run("pytest", *(session.posargs or ON_ALL_CORES))


@nox.session(default=False)
def smoke(session: nox.Session) -> None:
    """Run the smoke checks; with ``-- --peers`` also those against real vLLM processes."""
    session.install(".[metrics,structured]", *group("smoke"))
    session.run("python", "smoke/run.py", *session.posargs)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Run the benchmarks, or those named: ``nox -s bench -- NAME... --compare FILE``."""
    session.install(".[metrics]")
    if any(argument.startswith("--plot") for argument in session.posargs):
        session.install("matplotlib")
    session.run("python", "-m", "bench", *session.posargs, env={"PYTHONPATH": str(ROOT / "smoke")})


@nox.session(python="3.11", default=False)  # atheris has wheels for few Pythons
def fuzz(session: nox.Session) -> None:
    """Fuzz what reads messages, a minute or as told: ``nox -s fuzz -- [TARGET...] --seconds N --runs N``."""
    session.install(".", *group("fuzz"))
    session.run("python", "-m", "fuzz", *session.posargs, env={"PYTHONPATH": str(ROOT / "smoke")})


@nox.session(default=False)
def soak(session: nox.Session) -> None:
    """Load a client and mock engines, with faults, for some minutes: ``nox -s soak -- MINUTES``."""
    session.install(".")
    if any(argument.startswith("--plot") for argument in session.posargs):
        session.install("matplotlib")
    session.run("python", "-m", "soak", *session.posargs, env={"PYTHONPATH": str(ROOT / "smoke")})


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Build the documentation into docs/_build; a warning is an error."""
    session.install(".", *group("docs"))
    session.run("sphinx-build", "-W", "--keep-going", "-q", "-b", "html", "docs", "docs/_build")


@nox.session
def build(session: nox.Session) -> None:
    """Build the wheel into dist/, look into it, and run its commands."""
    session.install(*group("build"))
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    session.run("validate-pyproject", "pyproject.toml", silent=True)
    session.run("python", "-m", "build", "--outdir", "dist", silent=True)
    (wheel,) = (ROOT / "dist").glob("*.whl")
    session.run("check-wheel-contents", "--package", "src/trio_vllm", str(wheel), silent=True)
    session.run("twine", "check", "--strict", *map(str, (ROOT / "dist").iterdir()), silent=True)
    session.install(str(wheel))
    for command in PROJECT["scripts"]:
        session.run(command, "--help", silent=True)
    session.run("llm-smoke", "generate", "--mock")  # as the README begins


def python_files(folder: str) -> list[str]:
    """The sources under a folder."""
    return [str(path) for path in sorted((ROOT / folder).rglob("*.py"))]
