"""What needs no vLLM: our commands and our client with each other, in processes of their own."""
