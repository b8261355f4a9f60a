"""How hidden tests use a solution that runs elsewhere: `from composer_solution import call`.

Shipped as source into the sandbox of the tests, not imported here. The solution runs in a sandbox of its own; the two
share one stream, on which calls and answers are lines of JSON. So what a test compares is plain data that no code of
the agent's can reach into: numbers, texts, lists and dictionaries. (A tuple comes as a list, and keys as texts.)

Needs the standard library only.
"""

import json
import os

HELLO = b"composer-solution-ready\n"
AWAITED, GREETED = b"composer-solution-awaited", b"composer-solution-greeted"
MAX_ANSWER_BYTES = 2**20


class SolutionRaised(Exception):
    """The function raised, or returned what JSON cannot say (`kind` is then TypeError or ValueError)."""

    def __init__(self, kind, message):
        """`kind` is the name of the exception's class, `message` its text."""
        super().__init__(f"{kind}: {message}")
        self.kind, self.message = kind, message


class SolutionLost(Exception):
    """The solution's process ended, or answered something that is no answer. The grade is then 0 whatever tests do."""


class Channel:
    """The stream to the solution's process."""

    def __init__(self, fd, note=lambda word: None, writing=None):
        """`fd` is a stream of which nothing was read; `note` takes AWAITED, then GREETED; `writing`: None: `fd`."""
        self._fd, self._note, self._is_greeted = fd, note, False
        self._writing = fd if writing is None else writing
        self.num_calls = 0
        self.trouble = ""
        """Why there will be no answer any more."""

    @property
    def never_started(self):
        """Whether the process was lost before any code of the agent's ran in it."""
        return bool(self.trouble) and not self._is_greeted

    def ask(self, function, args, kwargs):
        """The answer to one call, as the server gave it."""
        if not self._is_greeted:
            self._greet()
        self.num_calls += 1
        # Not in the `try`: arguments that JSON cannot say are a mistake in the test.
        request = json.dumps({"id": self.num_calls, "function": function, "args": args, "kwargs": kwargs})
        self._write(request.encode() + b"\n")
        line = self._read_line(MAX_ANSWER_BYTES)
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            raise self._lost("it answered what is no JSON") from None
        is_answer = type(answer) is dict and ("value" in answer) != ("raised" in answer)
        if not is_answer or answer.get("id") != self.num_calls:
            raise self._lost("it answered what it was not asked")
        return answer

    def _greet(self):
        self._note(AWAITED)
        if self._read_line(len(HELLO)) != HELLO:
            raise self._lost("its process did not start")
        self._is_greeted = True
        self._note(GREETED)

    def _write(self, data):
        try:
            while data:
                data = data[os.write(self._writing, data) :]
        except OSError:
            raise self._lost("its process ended") from None

    def _read_line(self, most):
        data = bytearray()
        while b"\n" not in data:
            try:
                chunk = b"" if self.trouble else os.read(self._fd, most + 1 - len(data))
            except OSError:
                chunk = b""
            if not chunk:
                raise self._lost("its process ended")
            data += chunk
            if len(data) > most:
                raise self._lost(f"it answered more than {most} bytes")
        if data.index(b"\n") != len(data) - 1:
            raise self._lost("it answered what it was not asked")
        return bytes(data)

    def _lost(self, trouble):
        self.trouble = self.trouble or trouble
        return SolutionLost(f"there is no answer from the solution: {self.trouble}")


channel = None


def call(function, /, *args, **kwargs):
    """Call a function of the solution and return what it returns.

    Args:
        function: `<module>.<function>`, for example `main.add_price`.
        args: plain data, as JSON can say it.
        kwargs: the same.

    Raises:
        SolutionRaised: the function raised, or there is none, or it returned something else than plain data.
        SolutionLost: its process ended, or answered nonsense.
    """
    if channel is None:
        raise RuntimeError("the grader has not connected this process to a solution")
    answer = channel.ask(function, args, kwargs)
    if "raised" in answer:
        raise SolutionRaised(str(answer["raised"]), str(answer.get("message", "")))
    return answer["value"]
