"""Profiles of engines: TOML files of options, with the public source of their numbers."""
