"""A coverage-guided fuzzer (atheris) of everything that reads what others wrote; see ``__main__``."""
