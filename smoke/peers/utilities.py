"""Every utility method on a real engine: it works, or the engine refuses it in its own words.

The engine runs on a CPU, without adapters, profiler and weight transfer; what needs them is refused.
Before and after everything it must generate, so that no refusal has harmed it.
"""

import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import trio

from harness import free_port, generate, headless_engine, owner
from provision import BUILT_VERSION, Peers
from trio_vllm import (
    EngineCoreClient,
    LoRARequest,
    PauseMode,
    open_llm,
)
from trio_vllm.errors import UtilityCallFailedError, UtilityRefusedError

ADAPTER = LoRARequest(lora_name="adapter", lora_int_id=1, lora_path="/nowhere")

NO_LORA = "LoRA is not enabled"
NO_PROFILER = "Profiling is not enabled"
NO_TRANSFER = "Weight transfer not configured"

Call = Callable[[], Awaitable[Any]]


def main(peers: Peers) -> None:
    """Run one engine and make all calls."""
    port = free_port()
    with headless_engine(peers, port):
        trio.run(check, port, peers.version)


async def check(port: int, version: str) -> None:
    """Generate, call everything, generate again."""
    async with open_llm(owner(port)) as llm:
        client = llm.client
        assert client.vllm_version.startswith(version), client.vllm_version
        await generate(llm, 5)
        await inspect(client)
        await reset(client)
        await pause(client)
        await sleep(client)
        await try_adapters(client)
        await try_profiler(client, version)
        await change_weights(client)
        await misuse(client)
        await generate(llm, 5)
        assert client.is_healthy


async def refused(call: Call, text: str) -> None:
    """Make a call that the engine answers with this failure."""
    said = "nothing"
    try:
        await call()
    except UtilityCallFailedError as error:
        said = error.failures[0]
    assert text in said, f"the engine said {said}, not {text}"


async def refused_by_us(call: Call) -> None:
    """Make a call that is not sent."""
    try:
        await call()
    except UtilityRefusedError:
        return
    raise AssertionError("the call was made")


async def inspect(client: EngineCoreClient) -> None:
    """What it is."""
    assert await client.get_supported_tasks() == ["generate"]
    (group,) = await client.get_kv_cache_group_metadata()
    assert (group.kind, group.block_size) == ("full_attention", client.engine_info.block_size)
    await client.execute_dummy_batch()


async def reset(client: EngineCoreClient) -> None:
    """All caches."""
    assert await client.reset_prefix_cache() is True
    assert await client.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    await client.reset_mm_cache()
    await client.reset_encoder_cache()


async def pause(client: EngineCoreClient) -> None:
    """Every mode."""
    for mode in PauseMode:
        await client.pause_generation(mode)
        assert await client.is_scheduler_paused()
        assert await client.is_sleeping()
        await client.resume_scheduler()
        assert not await client.is_scheduler_paused()
    await refused(client.release_kv_cache_memory, "requires a completed pause first")
    await client.pause_generation()
    await refused(client.release_kv_cache_memory, "not supported on CPU")
    assert await client.wake_up()  # it believes all the same that it has released it


async def sleep(client: EngineCoreClient) -> None:
    """Every level, and getting memory back bit by bit."""
    for level in (0, 1, 2):
        await client.sleep(level)
        assert await client.is_sleeping()
        assert await client.wake_up(["scheduling"]) is (level == 0)
        assert await client.wake_up() is True
        assert not await client.is_sleeping()
    await client.sleep(1, PauseMode.KEEP)
    assert await client.wake_up(["weights"]) is False
    assert await client.wake_up(["kv_cache"]) is True


async def try_adapters(client: EngineCoreClient) -> None:
    """It takes none."""
    await refused(lambda: client.add_lora(ADAPTER), NO_LORA)
    await refused(lambda: client.remove_lora(1), NO_LORA)
    await refused(lambda: client.pin_lora(1), NO_LORA)
    await refused(client.list_loras, NO_LORA)


async def try_profiler(client: EngineCoreClient, version: str) -> None:
    """It has none; the number of arguments is right. The fifth came after the older version."""
    await refused(client.start_profile, NO_PROFILER)
    await refused(lambda: client.start_profile("x", delay_iterations=1), NO_PROFILER)
    await refused(client.stop_profile, NO_PROFILER)
    if version != BUILT_VERSION:
        await refused(lambda: client.start_profile(profiler_kwargs={}), NO_PROFILER)
    else:
        await refused_by_us(lambda: client.start_profile(profiler_kwargs={}))


async def change_weights(client: EngineCoreClient) -> None:
    """Their version, their checksums, their files; new ones it cannot be given."""
    assert await client.get_weight_version() == "default"
    await client.set_weight_version("v1")
    assert await client.get_weight_version() == "v1"
    (checksums,) = await client.compute_weight_checksums()
    assert any("embed_tokens" in name for name in checksums), checksums
    with tempfile.TemporaryDirectory() as folder:
        await client.save_sharded_state(folder)
    await refused(lambda: client.init_weight_transfer_engine({}), NO_TRANSFER)
    await refused(client.start_weight_update, NO_TRANSFER)
    await refused(client.start_draft_weight_update, NO_TRANSFER)
    await refused(lambda: client.update_weights({"names": []}), NO_TRANSFER)
    await refused(client.finish_weight_update, NO_TRANSFER)
    await client.shutdown_weight_transfer_engine()


async def misuse(client: EngineCoreClient) -> None:
    """What it has not is said by it, what it would not survive by us."""
    assert await client.collective_rpc("check_health") == [None]
    assert await client.call_utility_consensus("is_sleeping") is False
    await refused(lambda: client.call_utility("no_such_method"), "has no attribute")
    await refused(lambda: client.collective_rpc("no_such_method"), "has no attribute")
    for method in ("handle_fault_tolerance", "shutdown", "_send_engine_dead"):
        await refused_by_us(partial(client.call_utility, method))
