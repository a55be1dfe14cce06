"""Types of command-line arguments that several tools share."""

import argparse
import os
from pathlib import Path


def output_file(text: str) -> Path:
    """A file to be written at the end of what may take long, which is why it is tried now."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return path
