"""The wire format between processes: a length of four bytes, then one message as JSON.

What lives here: frames to bytes and back, and the errors of channels. What may not: sockets, and what
messages mean.
"""

from __future__ import annotations

import struct
from typing import Any, ClassVar, Final

import msgspec

from everbeat.errors import EverbeatError

FRAME_LIMIT_BYTES: Final = 512 * 1024 * 1024
"""Largest message; a length beyond it means a confused peer, and must not make us wait for gigabytes."""

_LENGTH = struct.Struct("!I")


class ChannelError(EverbeatError):
    """A channel between two processes of one tree cannot carry on."""

    code: ClassVar[str] = "CHANNEL_ERROR"


class ChannelClosed(ChannelError):
    """The other end is gone, or this end was closed."""

    code: ClassVar[str] = "CHANNEL_CLOSED"


class ChannelFull(ChannelError):
    """The peer does not read: as much as is allowed already waits to be sent."""

    code: ClassVar[str] = "CHANNEL_FULL"


class FrameTooLarge(ChannelError):
    """A message beyond `FRAME_LIMIT_BYTES`."""

    code: ClassVar[str] = "FRAME_TOO_LARGE"


class FrameInvalid(ChannelError):
    """Bytes that are no message of this channel."""

    code: ClassVar[str] = "FRAME_INVALID"


class FrameFormat:
    """Turns messages into frames and back; `messages` is the union of tagged Structs a receiver accepts.

    Not for use by two threads at once: an encoder per thread is the caller's lock or the caller's second
    format.
    """

    __slots__ = ("_decoder", "_encoder")

    def __init__(self, messages: Any) -> None:
        self._encoder = msgspec.json.Encoder()
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(messages)

    def encode(self, message: object) -> bytearray:
        """The frame of one message; raises FrameTooLarge beyond the limit."""
        frame = bytearray(_LENGTH.size)
        self._encoder.encode_into(message, frame, _LENGTH.size)
        size = len(frame) - _LENGTH.size
        if size > FRAME_LIMIT_BYTES:
            raise _too_large(size, what=type(message).__name__)
        _LENGTH.pack_into(frame, 0, size)
        return frame

    def decode(self, body: bytes | bytearray | memoryview) -> Any:
        """The message of one frame's body; raises FrameInvalid."""
        try:
            return self._decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise FrameInvalid(
                f"A frame of {len(body)} bytes is no message of this channel: {error}.",
                fix="run parent and child from the same version of everbeat.",
            ) from error


class FrameBuffer:
    """Cuts a stream of bytes into the bodies of frames, whatever pieces it arrives in."""

    __slots__ = ("_bytes", "_needed")

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._needed = _LENGTH.size

    def feed(self, data: bytes) -> list[bytes]:
        """Add `data` and return the bodies now complete; raises FrameTooLarge."""
        held = self._bytes
        held += data
        if len(held) < self._needed:
            return []
        bodies: list[bytes] = []
        start = 0
        with memoryview(held) as view:
            while True:
                self._needed = _LENGTH.size
                if len(held) - start < self._needed:
                    break
                (size,) = _LENGTH.unpack_from(held, start)
                if size > FRAME_LIMIT_BYTES:
                    raise _too_large(size, what="a received frame")
                self._needed += size
                if len(held) - start < self._needed:
                    break
                bodies.append(bytes(view[start + _LENGTH.size : start + self._needed]))
                start += self._needed
        del held[:start]
        return bodies

    def __len__(self) -> int:
        return len(self._bytes)


def _too_large(size: int, *, what: str) -> FrameTooLarge:
    return FrameTooLarge(
        f"{what} has {size:,} bytes; a message between processes may have {FRAME_LIMIT_BYTES:,}.",
        fix="keep large data in files or tables and send where it is.",
    )
