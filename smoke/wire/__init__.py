"""Messages of every kind, and what vLLM's own types make of them."""
