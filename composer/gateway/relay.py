"""Runs inside the sandbox: starts the agent, and carries its connections to the gateway over standard input and output.

A sandbox has no network but its own loopback. There this program listens, and every connection that the agent's client
makes becomes frames on the one channel that leads outside. It is sent as text to `python3 -c`, so it knows nothing but
the standard library, of Python 3.6 on. Frames go both ways:

    kind (1 byte)   connection (4 bytes)   length (4 bytes)   payload
    O opened, D data, C closed by its writer (nothing more comes), X the agent has ended (payload: its exit code)

Argument: the port. The variable RELAY_SETTINGS holds a JSON object with `command` and `environment`, and is not handed
on. The agent's output goes to standard error.
"""

import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys

HEADER = struct.Struct(">cII")
CHUNK = 2**15
MAX_CONNECTIONS = 64
"""Of an agent at a time; more wait until one ends."""
SETTINGS = "RELAY_SETTINGS"
NOT_STARTED = 127
CUT_OFF = 120
"""Its own exit code when nobody is at the other end of the channel any more."""


def send(kind, number, payload=b""):
    """Write one frame to the channel, all of it."""
    data = HEADER.pack(kind, number, len(payload)) + payload
    while data:
        data = data[os.write(1, data) :]


def read_exactly(size):
    """Read from the channel; raises EOFError at its end."""
    data = b""
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def deliver(connection, payload):
    """Write to a client; false if it has hung up."""
    try:
        connection.sendall(payload)
    except OSError:
        return False
    return True


def receive(connection):
    """Read from a client; nothing if it has hung up."""
    try:
        return connection.recv(CHUNK)
    except OSError:
        return b""


def start(command, environment):
    """Start the agent; None if there is no such program."""
    try:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=2, stderr=2, env=dict(os.environ, **environment)
        )
    except OSError as error:
        os.write(2, (command[0] + ": " + str(error.strerror) + "\n").encode())
        return None


def main():
    """Carry until the agent has ended, or nobody is at the other end: then the agent is ended."""
    port, settings = int(sys.argv[1]), json.loads(os.environ.pop(SETTINGS))
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(1024)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    agent = start(settings["command"], settings["environment"])
    if agent is None:
        send(b"X", 0, str(NOT_STARTED).encode())
        return
    try:
        send(b"X", 0, str(carry(agent, listener, woken)).encode())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        agent.kill()
        sys.exit(CUT_OFF)


def carry(agent, listener, woken):
    """Carry until the agent has ended; gives its exit code."""
    selector = selectors.DefaultSelector()
    for readable in (0, listener, woken):
        selector.register(readable, selectors.EVENT_READ, None)
    connections, latest = {}, 0
    while True:
        crowded = len(connections) >= MAX_CONNECTIONS
        if crowded == (listener in selector.get_map()):
            if crowded:
                selector.unregister(listener)
            else:
                selector.register(listener, selectors.EVENT_READ, None)
        for key, _ in selector.select():
            if key.fileobj == woken:
                os.read(woken, 4096)
                if agent.poll() is not None:
                    return agent.returncode
            elif key.fileobj is listener:
                latest += 1
                connections[latest] = connection = listener.accept()[0]
                selector.register(connection, selectors.EVENT_READ, latest)
                send(b"O", latest)
            elif key.fileobj == 0:
                kind, number, length = HEADER.unpack(read_exactly(HEADER.size))
                payload = read_exactly(length)
                if number not in connections:
                    continue
                if kind == b"D" and deliver(connections[number], payload):
                    continue
                if kind == b"D":
                    send(b"C", number)
                selector.unregister(connections[number])
                connections.pop(number).close()
            elif key.data in connections:
                data = receive(connections[key.data])
                if data:
                    send(b"D", key.data, data)
                    continue
                # A client that has said all hangs up here too: none that speaks HTTP waits after that.
                send(b"C", key.data)
                selector.unregister(connections[key.data])
                connections.pop(key.data).close()


if __name__ == "__main__":
    main()
