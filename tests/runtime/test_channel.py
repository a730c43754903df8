from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from everbeat.runtime import channel as channel_module
from everbeat.runtime.channel import (
    FRAME_LIMIT_BYTES,
    AsyncChannel,
    BlockingChannel,
    ChannelClosed,
    ChannelFull,
    FrameBuffer,
    FrameFormat,
    FrameInvalid,
    FrameTooLarge,
    channel_pair,
)
from everbeat.testing.clock import settle
from tests.runtime.programs.messages import Message, Number, Say

Pair = tuple[AsyncChannel, AsyncChannel]


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    left, right = channel_pair()
    first = await AsyncChannel.open(left, messages=Message)
    second = await AsyncChannel.open(right, messages=Message)
    yield first, second
    await asyncio.gather(first.aclose(), second.aclose())


@pytest.fixture
def blocking_pair() -> Iterator[tuple[BlockingChannel, BlockingChannel]]:
    left, right = (BlockingChannel(sock, messages=Message) for sock in channel_pair())
    yield left, right
    left.close()
    right.close()


def test_a_frame_buffer_reassembles_frames_from_pieces_of_any_size() -> None:
    format_ = FrameFormat(Message)
    sent = [Say(""), Number(7), Say("ü" * 1000), Number(-1)]
    stream = b"".join(bytes(format_.encode(message)) for message in sent)
    for size in (1, 2, 3, 5, 64, 1000, len(stream)):
        buffer = FrameBuffer()
        bodies = [
            body
            for start in range(0, len(stream), size)
            for body in buffer.feed(stream[start : start + size])
        ]
        assert [format_.decode(body) for body in bodies] == sent
        assert len(buffer) == 0


def test_a_frame_beyond_the_limit_is_refused_by_sender_and_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FrameTooLarge, match=r"536,870,913 bytes; .* can have 536,870,912"):
        FrameBuffer().feed(struct.pack("!I", FRAME_LIMIT_BYTES + 1))
    # The sender's side uses a small limit, because the real one would need gigabytes of memory.
    monkeypatch.setattr("everbeat.runtime.channel.FRAME_LIMIT_BYTES", 1000)
    FrameFormat(Message).encode(Say("x" * 900))
    with pytest.raises(FrameTooLarge, match="Say has"):
        FrameFormat(Message).encode(Say("x" * 1000))


async def test_channel_messages_keep_their_order_and_type_in_both_directions(pair: Pair) -> None:
    first, second = pair
    for number in range(1000):
        first.send_nowait(Number(number))
    second.send_nowait(Say("back"))
    assert [await second.receive() for _ in range(1000)] == [Number(number) for number in range(1000)]
    assert await first.receive() == Say("back")


async def test_a_channel_passes_a_message_of_twenty_megabytes(pair: Pair) -> None:
    first, second = pair
    large = Say("x" * 20_000_000)
    sending = asyncio.create_task(first.send(large))
    assert await second.receive() == large
    await sending


async def test_a_cancelled_receive_loses_no_message(pair: Pair) -> None:
    first, second = pair
    waiting = asyncio.create_task(second.receive())
    await settle()
    waiting.cancel()
    first.send_nowait(Say("kept"))
    assert await second.receive() == Say("kept")


async def test_two_concurrent_receivers_of_a_channel_are_refused(pair: Pair) -> None:
    _, second = pair
    waiting = asyncio.create_task(second.receive())
    await settle()
    with pytest.raises(RuntimeError, match="single reader"):
        await second.receive()
    waiting.cancel()


async def test_send_waits_and_send_nowait_raises_for_a_slow_peer(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "SEND_BUFFER_BYTES", 100_000)
    monkeypatch.setattr(channel_module, "RECEIVE_BUFFER_BYTES", 100_000)
    left, right = channel_pair()
    fast = await AsyncChannel.open(left, messages=Message)
    sent = 0

    def send_until_refused() -> None:
        nonlocal sent
        while True:
            fast.send_nowait(Say("x" * 10_000))
            sent += 1

    with pytest.raises(ChannelFull, match="of 100,000 allowed"):
        send_until_refused()
    waiting = asyncio.create_task(fast.send(Say("last")))
    await settle()
    assert not waiting.done()

    slow = await AsyncChannel.open(right, messages=Message)
    received = [await slow.receive() for _ in range(sent)]
    assert received == [Say("x" * 10_000)] * sent
    async with asyncio.timeout(5):
        assert await slow.receive() == Say("last")
        await waiting
    await asyncio.gather(fast.aclose(), slow.aclose())


async def test_the_end_of_the_peer_is_reported_at_once_and_after_its_last_message() -> None:
    left, right = channel_pair()
    gone = asyncio.Event()
    mine = await AsyncChannel.open(left, messages=Message, on_eof=gone.set)
    theirs = await AsyncChannel.open(right, messages=Message)
    theirs.send_nowait(Say("last"))
    await theirs.aclose()
    async with asyncio.timeout(5):
        await gone.wait()
    assert mine.is_closed
    assert await mine.receive() == Say("last")
    with pytest.raises(ChannelClosed):
        await mine.receive()
    with pytest.raises(ChannelClosed):
        mine.send_nowait(Say("too late"))
    with pytest.raises(ChannelClosed):
        await mine.send(Say("too late"))


async def test_a_write_to_a_dead_peer_does_not_lose_its_earlier_messages() -> None:
    left, right = channel_pair()
    mine = await AsyncChannel.open(left, messages=Message)
    format_ = FrameFormat(Message)
    right.sendall(format_.encode(Say("one")) + format_.encode(Say("two")))
    right.close()
    mine.send_nowait(Say("to nobody"))
    async with asyncio.timeout(5):
        assert [await mine.receive(), await mine.receive()] == [Say("one"), Say("two")]
        with pytest.raises(ChannelClosed):
            await mine.receive()


async def test_closing_a_channel_sends_queued_messages_and_does_not_report_the_peers_end() -> None:
    left, right = channel_pair()
    ends: list[str] = []
    mine = await AsyncChannel.open(left, messages=Message, on_eof=lambda: ends.append("mine"))
    theirs = await AsyncChannel.open(right, messages=Message)
    mine.send_nowait(Say("x" * 5_000_000))
    closing = asyncio.create_task(mine.aclose(flush_timeout_s=10))
    assert await theirs.receive() == Say("x" * 5_000_000)
    await closing
    await mine.aclose()
    assert ends == []
    with pytest.raises(ChannelClosed):
        await mine.receive()
    await theirs.aclose()


async def test_a_peer_that_never_reads_does_not_delay_the_close() -> None:
    left, right = channel_pair()
    mine = await AsyncChannel.open(left, messages=Message)
    mine.send_nowait(Say("x" * 5_000_000))
    started = time.monotonic()
    await mine.aclose(flush_timeout_s=0.1)
    assert time.monotonic() - started < 2
    right.close()


async def test_an_unreadable_message_is_skipped_and_an_invalid_length_ends_the_channel(pair: Pair) -> None:
    left, right = channel_pair()
    gone = asyncio.Event()
    mine = await AsyncChannel.open(left, messages=Message, on_eof=gone.set)
    body = b'{"type":"unknown"}'
    right.sendall(struct.pack("!I", len(body)) + body + FrameFormat(Message).encode(Say("sound")))
    with pytest.raises(FrameInvalid, match="same version"):
        await mine.receive()
    assert await mine.receive() == Say("sound")
    right.sendall(b"\xff" * 100)
    with pytest.raises(FrameTooLarge):
        await mine.receive()
    async with asyncio.timeout(5):
        await gone.wait()
    right.close()


async def test_a_message_that_cannot_be_encoded_does_not_break_the_channel(pair: Pair) -> None:
    first, second = pair
    with pytest.raises(TypeError):
        first.send_nowait(object())
    first.send_nowait(Say("sound"))
    assert await second.receive() == Say("sound")


def test_many_threads_can_send_through_one_blocking_channel(
    blocking_pair: tuple[BlockingChannel, BlockingChannel],
) -> None:
    left, right = blocking_pair
    text = "x" * 3000

    def send(thread: int) -> None:
        for number in range(200):
            left.send(Say(f"{thread}:{number}:{text}"))

    threads = [threading.Thread(target=send, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    received = [right.receive(timeout_s=20).text for _ in range(1600)]
    for thread in threads:
        thread.join()
    for thread_number in range(8):
        mine = [said for said in received if said.startswith(f"{thread_number}:")]
        assert mine == [f"{thread_number}:{number}:{text}" for number in range(200)]


def test_a_timeout_in_the_middle_of_a_message_loses_nothing() -> None:
    left, right = channel_pair()
    channel = BlockingChannel(right, messages=Message)
    frame = bytes(FrameFormat(Message).encode(Say("in two halves")))
    left.sendall(frame[:7])
    with pytest.raises(TimeoutError, match=r"No message within 0\.05 s"):
        channel.receive(timeout_s=0.05)
    left.sendall(frame[7:])
    assert channel.receive(timeout_s=5) == Say("in two halves")
    left.close()
    channel.close()


def test_closing_a_blocking_channel_wakes_its_receiving_thread(
    blocking_pair: tuple[BlockingChannel, BlockingChannel],
) -> None:
    left, _ = blocking_pair
    heard: list[object] = []
    ended = threading.Event()
    thread = left.read_in_thread(on_message=heard.append, on_eof=ended.set)
    left.close()
    assert ended.wait(5)
    thread.join(5)
    assert not thread.is_alive()
    assert heard == []
    left.close()
    with pytest.raises(ChannelClosed):
        left.send(Say("too late"))
    with pytest.raises(ChannelClosed):
        left.receive()
    with pytest.raises(ChannelClosed):
        left.receive(timeout_s=0.1)


def test_a_reader_thread_whose_callback_fails_reports_the_end(
    blocking_pair: tuple[BlockingChannel, BlockingChannel], caplog: pytest.LogCaptureFixture
) -> None:
    left, right = blocking_pair
    ended = threading.Event()

    def fail(message: object) -> None:
        raise ValueError(f"cannot take {message}")

    right.read_in_thread(on_message=fail, on_eof=ended.set)
    left.send(Say("anything"))
    assert ended.wait(5)
    assert "cannot take" in caplog.text


async def test_async_and_blocking_channels_use_the_same_frames() -> None:
    left, right = channel_pair()
    blocking = BlockingChannel(left, messages=Message)
    other = await AsyncChannel.open(right, messages=Message)
    blocking.send(Number(1))
    assert await other.receive() == Number(1)
    other.send_nowait(Say("two"))
    assert await asyncio.to_thread(blocking.receive) == Say("two")
    blocking.close()
    with pytest.raises(ChannelClosed):
        await other.receive()


def test_a_channel_pair_is_a_stream_and_not_inheritable() -> None:
    for sock in channel_pair():
        assert sock.type == socket.SOCK_STREAM
        assert not sock.get_inheritable()
        sock.close()
