"""What needs real vLLM processes: our client with its engines, its frontends with our mock engines."""
