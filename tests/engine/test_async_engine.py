"""The engine in its thread: how it ends, in order and when something breaks, and who may look."""

import asyncio
import threading

import pytest
import torch

from openv41.engine.async_engine import AsyncEngine
from openv41.engine.request import FinishReason
from openv41.errors import OpenV41Error, OverloadedError
from tests.engine.mini_engine import arm, engine_of, greedy
from tests.layers.mini import random_ids

LONG = 40  # tokens of an answer that nobody reads to its end


@pytest.fixture(scope="module")
def model():
    return arm(torch.float64, bitwise=False)


def run(scenario):
    """Run a scenario, but not for ever."""
    return asyncio.run(asyncio.wait_for(scenario, 60))


async def begun(engine, seed, max_tokens=LONG):
    """A stream whose first event has come."""
    stream = engine.stream(greedy(random_ids(5, seed=seed), max_tokens))
    await anext(stream)
    return stream


async def events_of(stream):
    return [event async for event in stream]


def breaking(engine, name, times):
    """Let a method of an engine fail the first few times."""
    real, left = getattr(engine, name), [times]

    def broken(*args):
        if left[0]:
            left[0] -= 1
            raise ZeroDivisionError("made up")
        return real(*args)

    setattr(engine, name, broken)


def test_stopping_waits_for_what_runs_and_takes_nothing_new(model):
    async def scenario():
        engine = AsyncEngine(engine_of(model))
        await engine.start()
        stream = await begun(engine, 1, 6)
        reading = asyncio.create_task(events_of(stream))
        stopping = asyncio.create_task(engine.stop())
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="takes no more requests"):
            await anext(engine.stream(greedy([1])))
        await stopping
        return await reading

    events = run(scenario())
    assert events[-1].finish_reason is FinishReason.LENGTH
    assert len(events) == 5


def test_stopping_at_once_cancels_what_runs(model):
    async def scenario():
        engine = AsyncEngine(engine_of(model))
        await engine.start()
        stream = await begun(engine, 1)
        await engine.stop(drain=False)
        return await events_of(stream)

    assert run(scenario())[-1].finish_reason is FinishReason.CANCELLED


def test_a_step_that_fails_ends_its_requests_alone(model, caplog):
    async def scenario():
        engine = AsyncEngine(engine_of(model))
        await engine.start()
        first = await begun(engine, 1)
        breaking(engine.engine, "step", 1)
        events = await events_of(first)
        second = await begun(engine, 2)
        await second.aclose()
        await engine.stop()
        return events

    assert run(scenario())[-1].finish_reason is FinishReason.CANCELLED
    assert "a step of the engine failed" in caplog.text


@pytest.mark.parametrize("times", [1, 100], ids=["once", "always"])
def test_a_command_that_fails_ends_the_engine_and_nobody_waits(model, caplog, tmp_path, times):
    """Here the cancelling of a request; the persistent tier is left in order."""

    async def scenario():
        engine = AsyncEngine(engine_of(model, disk_folder=tmp_path, disk_bytes=1 << 20))
        await engine.start()
        given_up, other = await begun(engine, 1), await begun(engine, 2)
        breaking(engine.engine, "cancel", times)
        await given_up.aclose()
        try:
            ended = (await events_of(other))[-1].finish_reason is FinishReason.CANCELLED
        except OpenV41Error as error:
            ended = "the log tells" in str(error)
        with pytest.raises(OverloadedError, match="takes no more requests"):
            await anext(engine.stream(greedy([1])))
        await engine.stop()
        return ended

    assert run(scenario())
    assert "the engine stops" in caplog.text
    engine_of(model, disk_folder=tmp_path, disk_bytes=1 << 20).close()  # nobody holds its lock


def test_a_loop_that_has_gone_is_told_nothing(model, caplog):
    engine, may_step = AsyncEngine(engine_of(model)), threading.Event()
    may_step.set()
    step = engine.engine.step
    engine.engine.step = lambda: may_step.wait() and step()

    async def leave():
        await engine.start()
        stream = await begun(engine, 1)
        may_step.clear()
        return stream

    run(leave())
    may_step.set()
    asyncio.run(engine.stop())
    assert engine.engine.is_idle
    assert not caplog.records


def test_figures_may_be_read_while_the_engine_steps(model):
    engine, found, ended = engine_of(model), [], threading.Event()

    def look():
        while not ended.wait(0.005):
            found.append(engine.stats())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        engine.generate([greedy(random_ids(9, seed=seed), 6) for seed in range(2)])
    finally:
        ended.set()
        thread.join()
    counts = [stats.generated_tokens for stats in [*found, engine.stats()]]
    assert counts == sorted(counts)
    assert counts[-1] == 2 * 6
    assert all(stats.pages_used + stats.pages_free == 200 for stats in found)
