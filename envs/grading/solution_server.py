"""Runs the solution: answers calls of the hidden tests, which are elsewhere (composer_solution.py is their end).

Shipped as source into a sandbox that holds the solution and nothing worth finding: no test, no expected value, no
verdict. Whatever the agent's code does to this process, it can do no more than answer, rightly or wrongly.
It needs the standard library only.
"""

import os

HELLO = b"composer-solution-ready\n"
MAX_MESSAGE = 300


def main():
    """Greet, then answer one call after another until the other side hangs up."""
    # Two descriptors of one socket, or of two pipes: it depends on the sandbox.
    reading, writing = os.dup(0), os.dup(1)
    os.write(writing, HELLO)
    # Only now what a file of the repository could stand in for: the machine is not to blame for it.
    import importlib
    import json
    import sys

    os.unlink(__file__)  # noqa: PTH108
    # What `multiprocessing` starts would look for this module again, and in vain.
    this = sys.modules["__main__"]
    this.__spec__ = None
    del this.__file__
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)

    def answer(function, args, kwargs):
        module, _, name = function.rpartition(".")
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    with open(reading, "rb") as requests:  # noqa: PTH123
        for line in requests:
            request = json.loads(line)
            number = request.pop("id")
            try:
                text = json.dumps({"id": number, "value": answer(**request)})
            except BaseException as error:  # noqa: BLE001 - SystemExit too
                said = {"raised": type(error).__name__, "message": str(error)[:MAX_MESSAGE]}
                text = json.dumps({"id": number, **said})
            data = text.encode() + b"\n"
            while data:
                data = data[os.write(writing, data) :]


if __name__ == "__main__":
    main()
