"""A client that leaves frees what its request held, streamed or not."""

import asyncio

import httpx
import openai
import pytest

COMPLETIONS = "/v1/completions"


def test_a_stream_that_is_closed_is_cancelled(client, server):
    stream = client.completions.create(model="echo", prompt="!hang", stream=True, n=2)
    next(iter(stream))
    server.wait_for(lambda: server.backend.running == 2)
    stream.close()
    server.wait_for(server.is_idle)
    assert server.backend.cancelled == 2


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_gives_up_waiting_is_noticed(server, path, stream):
    body = {"stream": stream}
    if path == COMPLETIONS:
        body["prompt"] = "!hang"
    else:
        body["messages"] = [{"role": "user", "content": "!hang"}]
    with pytest.raises(httpx.ReadTimeout), httpx.Client(trust_env=False) as client:
        client.post(server.url + path, json=body, timeout=0.2)
    server.wait_for(server.is_idle)
    assert server.backend.cancelled == 1


def test_clients_that_wait_in_the_queue_may_leave(start):
    server = start(max_concurrency=1)

    async def leave():
        async with httpx.AsyncClient(trust_env=False) as client:
            posts = [
                asyncio.create_task(client.post(server.url + COMPLETIONS, json={"prompt": "!hang"}))
                for _ in range(3)
            ]
            while (server.service.gate.running, server.service.gate.waiting) != (1, 2):
                await asyncio.sleep(0.005)
            for post in posts:
                post.cancel()
            await asyncio.gather(*posts, return_exceptions=True)

    asyncio.run(asyncio.wait_for(leave(), 5))
    server.wait_for(server.is_idle)
    # A place that is freed may go to one who waits and is not yet known to have left.
    assert server.backend.cancelled == len(server.backend.seen) <= 3


def test_many_clients_at_once(server):
    """Whole, streamed, failing, invalid and cancelled requests do not disturb each other."""

    async def one(client, number):
        text = f"request {number}"
        match number % 5:
            case 0:
                answer = await client.completions.create(model="echo", prompt=text, seed=0)
                assert answer.choices[0].text == text
            case 1:
                stream = await client.completions.create(
                    model="echo", prompt=text, seed=0, stream=True
                )
                assert "".join([c.choices[0].text async for c in stream]) == text
            case 2:
                with pytest.raises(openai.InternalServerError):
                    await client.completions.create(model="echo", prompt=f"!raise {number}")
            case 3:
                with pytest.raises(openai.BadRequestError):
                    await client.completions.create(model="echo", prompt=text, top_p=2)
            case 4:
                stream = await client.completions.create(
                    model="echo", prompt=f"!hang {number}", stream=True
                )
                await anext(aiter(stream))
                await stream.close()

    async def everyone():
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            await asyncio.gather(*(one(client, number) for number in range(50)))

    asyncio.run(asyncio.wait_for(everyone(), 20))
    server.wait_for(server.is_idle)
    assert server.backend.cancelled == 10
