"""A parent process that spawns one child, prints its pid when it is ready, and waits to be killed."""

from __future__ import annotations

import sys
import threading
import time

from everbeat.runtime.channel import BlockingChannel
from everbeat.runtime.processes import ChildProcess
from tests.runtime.programs.messages import Message, Say
from tests.runtime.programs.start import start_child


def main() -> None:
    thread, kind = sys.argv[1:]
    children: list[ChildProcess] = []

    def start() -> None:
        children.append(start_child(kind))

    if thread == "main":
        start()
    else:
        starter = threading.Thread(target=start)
        starter.start()
        starter.join()
    message = BlockingChannel(children[0].channel_socket, messages=Message).receive(timeout_s=20)
    assert isinstance(message, Say)
    print(children[0].pid, message.text, flush=True)
    # To be killed by the test.
    time.sleep(600)


if __name__ == "__main__":
    main()
