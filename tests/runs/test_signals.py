import os
import signal
import threading
import time

import pytest

from hpcjax.core.errors import Interrupted, Preempted
from hpcjax.runs.signals import StopSignals

GENTLE = [signal.SIGTERM, signal.SIGUSR1]


@pytest.fixture(autouse=True)
def not_ignored():
    """What is started in the background may inherit that Ctrl-C is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", GENTLE)
def test_outside_of_training_the_first_signal_ends_the_run(number):
    with pytest.raises(Preempted, match=number.name), StopSignals():
        signal.raise_signal(number)


def test_outside_of_training_ctrl_c_ends_the_run():
    with pytest.raises(Interrupted), StopSignals():
        signal.raise_signal(signal.SIGINT)


@pytest.mark.faults(2)
@pytest.mark.parametrize("number", [*GENTLE, signal.SIGINT])
def test_while_training_the_first_signal_is_a_request(number):
    with StopSignals() as signals:
        with signals.defer():
            signal.raise_signal(number)
            assert signals.received == number
        error = Interrupted if number == signal.SIGINT else Preempted
        with pytest.raises(error):
            signals.check()


@pytest.mark.faults(22)
def test_a_second_ctrl_c_leaves_at_once():
    with StopSignals() as signals, signals.defer():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.faults(2)
@pytest.mark.parametrize("number", GENTLE)
def test_a_second_request_changes_nothing(number):
    with StopSignals() as signals, signals.defer():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(number)
        assert signals.received == signal.SIGTERM


def test_handlers_are_put_back():
    before = [signal.getsignal(each) for each in (*GENTLE, signal.SIGINT)]
    with StopSignals():
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(each) for each in (*GENTLE, signal.SIGINT)] == before


def test_what_is_ignored_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGINT)
        assert signals.received == 0


def test_no_signal_no_error():
    with StopSignals() as signals:
        signals.check()
        assert signals.received == 0


def test_in_another_thread_nothing_is_installed():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work():
        with StopSignals() as signals:
            seen.append((signals.received, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(0, before)]


@pytest.mark.processes
def test_a_signal_from_another_process_arrives():
    with StopSignals() as signals, signals.defer():
        os.kill(os.getpid(), signal.SIGUSR1)
        limit = time.monotonic() + 10
        while not signals.received and time.monotonic() < limit:
            time.sleep(0.01)
        assert signals.received == signal.SIGUSR1
