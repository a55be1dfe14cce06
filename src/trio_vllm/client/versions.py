"""`oldest_release` reads versions of vLLM; the constants say what a client heeds of each.

A release is its major and minor number. `EngineInfo.is_older_than` compares.
"""

from __future__ import annotations

import re
from collections.abc import Collection

PAUSE_GENERATION = (0, 33)
"""The release from which engines have ``pause_generation``."""
PROFILER_KWARGS = (0, 33)
"""The release from which their ``profile`` takes a fifth argument."""
START_WAVE = (0, 33)
"""From here on idle engines themselves tell a coordinator of the requests that they get."""
WITHOUT_LATE_CHUNKING = ("0.32.",)
"""What versions begin with that would take ``late_chunking_params`` for an unknown trailing field."""
LATCHING = ("0.32.", "0.33.")
"""What versions begin with that keep the structured-outputs backend of the first request that has one:
with another, 0.33 answers with an error, and 0.32 without a word does it by the first."""


def oldest_release(versions: Collection[str]) -> tuple[int, int] | None:
    """Major and minor number of the oldest of some versions of vLLM; None if one is no release.

    A development build may have, or lack, what the release of its number has.
    """
    releases = []
    for version in versions:
        found = re.fullmatch(r"(\d+)\.(\d+)(?:\.\d+)*(?:\.post\d+)?(?:\+.*)?", version)
        if found is None:
            return None
        releases.append((int(found[1]), int(found[2])))
    return min(releases)
