"""A recorder that hands on to several."""

import pytest

from hpcjax import train
from hpcjax.train import recorder
from tests.train import tiny


def test_everything_is_handed_on_and_the_own_seconds_count():
    own, copy = tiny.Records(), tiny.Records()
    joined = recorder.TeeRecorder(own, copy)
    assert isinstance(joined, train.Recorder)
    joined.write({"step": 1, "loss": 3.0, "seconds": 2.5})
    joined.write({"step": 2, "loss": 2.0, "seconds": 4.0})
    assert own == copy
    assert len(own) == 2
    copy.clear()
    assert joined.rewind(1) == 2.5
    assert own == [{"step": 1, "loss": 3.0, "seconds": 2.5}]


class Full(tiny.Records):
    def write(self, record):
        raise OSError("full")


def test_a_record_that_is_not_kept_is_not_handed_on():
    copy = tiny.Records()
    with pytest.raises(OSError, match="full"):
        recorder.TeeRecorder(Full(), copy).write({"step": 1})
    assert not copy


def test_a_record_that_cannot_be_handed_on_is_kept():
    own = tiny.Records()
    with pytest.raises(OSError, match="full"):
        recorder.TeeRecorder(own, Full()).write({"step": 1})
    assert own == [{"step": 1}]
