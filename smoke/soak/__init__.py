"""A client and mock engines under load for minutes, while engines and frontends come and go."""
