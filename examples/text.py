"""Text in, text out: a tokenizer at the edges, which this package does not have.

Needs ``pip install tokenizers jinja2`` and the folder of the model that the engine serves.

    python examples/text.py MODEL_FOLDER "Who are you?" [HANDSHAKE_ADDRESS]
"""

import json
import sys
from functools import partial
from pathlib import Path

import jinja2
import trio
from tokenizers import Tokenizer

from trio_vllm import GenerateRequest, HandshakeOwner, SamplingParams, open_llm


class ChatModel:
    """What a model's folder says about turning messages into tokens, and tokens into text."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
        generation = json.loads((folder / "generation_config.json").read_text("utf-8"))
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._template = jinja2.Environment(autoescape=False).from_string(config["chat_template"])
        eos = generation["eos_token_id"]
        self.eos_token_ids: list[int] = eos if isinstance(eos, list) else [eos]

    def encode(self, message: str) -> list[int]:
        """The prompt of a chat with one message."""
        text = self._template.render(
            messages=[{"role": "user", "content": message}], add_generation_prompt=True
        )
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: list[int]) -> str:
        """The text of tokens, without those that mean something else than text."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))


async def main(folder: str, message: str, address: str = "tcp://127.0.0.1:29550") -> None:
    """Print the answer to a message as it comes."""
    if not (Path(folder) / "tokenizer.json").is_file():
        sys.exit(
            f"{folder} is no folder with a tokenizer.json: give that of the model, not its name"
            f" (`hf download {folder}` prints it for a model of the Hugging Face Hub)"
        )
    model = ChatModel(Path(folder))
    first, *others = model.eos_token_ids
    request = GenerateRequest(
        prompt_token_ids=model.encode(message),
        # Without the end-of-text id the answer would run to ``max_tokens``.
        sampling_params=SamplingParams(max_tokens=64, eos_token_id=first, stop_token_ids=others),
    )
    token_ids: list[int] = []
    printed = ""
    async with open_llm(HandshakeOwner(address, ready_timeout=30)) as llm:
        async with llm.stream(request) as deltas:
            async for delta in deltas:
                token_ids += delta.token_ids
                text = model.decode(token_ids)
                # A character can be made of several tokens: wait until it is whole.
                if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                    print(text[len(printed) :], end="", flush=True)
                    printed = text
    print(model.decode(token_ids)[len(printed) :])


if len(sys.argv) not in {3, 4}:
    sys.exit("usage: text.py MODEL_FOLDER MESSAGE [HANDSHAKE_ADDRESS]")
trio.run(partial(main, *sys.argv[1:]))
