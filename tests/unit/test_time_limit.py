"""A limit on what does not come back, in the main thread and in others."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest

from vllm_kvpad.time_limit import within

number: ContextVar[int] = ContextVar("number", default=0)


def in_main_thread(function: Callable[[], Any]) -> Any:
    return function()


def in_another_thread(function: Callable[[], Any]) -> Any:
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


@pytest.fixture(params=[in_main_thread, in_another_thread])
def run(request: pytest.FixtureRequest) -> Callable[[Callable[[], Any]], Any]:
    return request.param


def test_what_comes_back_in_time_is_handed_on(run: Callable[..., Any]) -> None:
    assert run(lambda: within(60, "it", lambda: 7)) == 7


@pytest.mark.parametrize("error", [KeyError("port"), SystemExit(3)])
def test_so_is_what_is_raised(run: Callable[..., Any], error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        run(lambda: within(60, "it", fail))
    assert caught.value is error


def test_what_hangs_is_named_when_the_time_is_up(run: Callable[..., Any]) -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"^the Acme daemon .* within 0\.2 s$"):
        run(lambda: within(0.2, "the Acme daemon", lambda: time.sleep(30)))
    assert time.monotonic() - began < 20


def test_context_variables_are_those_of_the_caller(run: Callable[..., Any]) -> None:
    def ask() -> int:
        number.set(5)
        return within(60, "it", number.get)

    assert run(ask) == 5


def test_code_that_catches_everything_is_stopped_again() -> None:
    stopped = []

    def stubborn() -> None:
        try:
            time.sleep(30)
        except BaseException as error:
            stopped.append(error)
        time.sleep(30)

    with pytest.raises(TimeoutError):
        within(0.2, "it", stubborn)
    assert len(stopped) == 1


def test_handler_and_timer_of_others_come_back() -> None:
    def handler(*_: object) -> None: ...

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 500, 300)
    try:
        within(60, "it", lambda: 7)
        assert signal.getsignal(signal.SIGALRM) is handler
        left, interval = signal.getitimer(signal.ITIMER_REAL)
        assert 0 < left <= 500
        assert interval == 300
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
