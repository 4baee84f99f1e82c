"""Connections of a server: small answers, clients that leave, and requests that are none."""

import asyncio
import socket

import pytest

from onnxplace.serving import listen

TCP_NODELAY = socket.IPPROTO_TCP, socket.TCP_NODELAY


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_parts_of_an_answer_do_not_wait_for_acknowledgements(host):
    async def read_option():
        options = asyncio.Queue()

        async def answer(_, writer):
            await options.put(writer.get_extra_info("socket").getsockopt(*TCP_NODELAY))
            writer.close()

        with listen(host, 0) as listener:
            async with await asyncio.start_server(answer, sock=listener):
                with socket.create_connection((host, listener.getsockname()[1])):
                    return await options.get()

    if host == "::1" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    assert asyncio.run(read_option())


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True
