"""A time limit for what other packages do: imports, and answers that they give."""

from __future__ import annotations

import contextvars
import queue
import signal
import threading
from collections.abc import Callable
from typing import NoReturn, TypeVar

T = TypeVar("T")


class _TimeIsUp(BaseException):
    """Not an Exception, which the code that is stopped may well catch."""


def within(seconds: float, what: str, call: Callable[[], T]) -> T:
    """Return what ``call`` returns, if it does so in time.

    In the main thread the call is interrupted, by SIGALRM: a module that was being
    imported is then not imported, and can be imported again. In any other thread it
    runs in a thread of its own, which is left behind. Code that does not come back to
    the interpreter (a loop in C) cannot be interrupted.

    Args:
        seconds: The limit.
        what: Who is asked, for the message.
        call: What may hang.

    Raises:
        TimeoutError: The time is up; names ``what``.
        BaseException: What ``call`` raises.
    """
    if threading.current_thread() is threading.main_thread():
        return _interrupted_after(seconds, what, call)
    return _left_behind_after(seconds, what, call)


def _interrupted_after(seconds: float, what: str, call: Callable[[], T]) -> T:
    armed = True

    def stop(*_: object) -> None:
        if armed:
            raise _TimeIsUp

    previous = signal.signal(signal.SIGALRM, stop)
    # And once a second from then on, for code that catches everything.
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        return call()
    except _TimeIsUp:
        raise _time_is_up(seconds, what) from None
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, *timer)
        # None: the handler was not set from Python, and cannot be set again.
        signal.signal(signal.SIGALRM, previous or signal.SIG_DFL)


def _left_behind_after(seconds: float, what: str, call: Callable[[], T]) -> T:
    outcome: queue.SimpleQueue[Callable[[], T]] = queue.SimpleQueue()

    def work() -> None:
        try:
            value = call()
        except BaseException as error:
            outcome.put(_raising(error))
        else:
            outcome.put(lambda: value)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(work,), daemon=True).start()
    try:
        result = outcome.get(timeout=seconds)
    except queue.Empty:
        raise _time_is_up(seconds, what) from None
    return result()


def _raising(error: BaseException) -> Callable[[], NoReturn]:
    def result() -> NoReturn:
        raise error

    return result


def _time_is_up(seconds: float, what: str) -> TimeoutError:
    return TimeoutError(f"{what} did not come back within {seconds:g} s")
