"""`MAX_ENGINES` bounds options and messages; the help of the commands shows it, so nothing is imported here."""

MAX_ENGINES = 2**16
"""Engines of one frontend: an engine id has two bytes."""
