"""How a process has ended, in words."""

from __future__ import annotations

import signal


def end_in_words(exit_code: int) -> str:
    """Tell of an exit code as `subprocess` gives it: that of a signal is negative."""
    if exit_code >= 0:
        return f"ended with {exit_code}"
    return f"died of {_name(-exit_code)}"


def _name(signal_number: int) -> str:
    try:
        return signal.Signals(signal_number).name
    except ValueError:  # a real-time signal
        return f"signal {signal_number}"
