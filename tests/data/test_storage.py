"""A storage that several share: how long each waits, by a clock that is not real."""

import os
import threading

import pytest

from hpcjax import data
from hpcjax.core.errors import ConfigError
from hpcjax.data import storage

RATE = 1e6


class Clock:
    """Time that only sleeping moves; sleeps are a tenth too long."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += 1.1 * seconds


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(storage, "time", made)
    return made


def test_a_request_takes_its_latency_and_its_bytes(tmp_path, clock):
    rate = data.SharedRate(tmp_path / "rate", RATE, latency=0.5)
    for _ in range(10):
        rate.take(100_000)
    # Only the last sleep of a request is too long, the others make up for it.
    assert 6.0 <= clock.now - 100 <= 6.7
    assert rate.served().bytes == 1_000_000
    rate.close()


def test_all_who_have_the_file_share_its_rate(tmp_path, clock):
    path = tmp_path / "rate"
    one, other = data.SharedRate(path, RATE), data.SharedRate(path, RATE)
    one.take(250_000)
    before = clock.now
    clock.now = 100.0  # the other asks at the same time as the first
    other.take(250_000)
    assert clock.now >= 100.5
    assert other.served().bytes == one.served().bytes == 500_000
    assert before < 100.3
    one.close()
    other.close()


def test_threads_of_a_process_lose_no_bytes(tmp_path):
    # Two objects, each of four threads: a lock for both, and one for each.
    rates = [data.SharedRate(tmp_path / "rate", 1e12) for _ in range(2)]
    threads = [
        threading.Thread(target=lambda r=rates[n % 2]: [r.take(3) for _ in range(200)])
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rate in rates:
        assert rate.served().bytes == 8 * 200 * 3
        rate.close()


def test_rates_that_are_none_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="rate must be finite and > 0"):
        data.SharedRate(tmp_path / "rate", 0.0)
    with pytest.raises(ConfigError, match="latency must be finite and >= 0"):
        data.SharedRate(tmp_path / "rate", 1.0, latency=-1.0)


def test_what_is_read_leaves_the_page_cache(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"abc")
    told = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *given: told.append(given[1:]))
    assert data.read_uncached(tmp_path / "a") == b"abc"
    assert told == [(0, 0, os.POSIX_FADV_DONTNEED)]
