"""How fast we are, next to what the machine and vLLM's own Python client can do.

A figure means little on a busy machine, and nothing on another one. So each is measured in turns
with a yardstick, in the same run: the same messages without us in between, the bare library call,
vLLM's ``AsyncLLM``. What lasts is the ratio of the two.
"""
