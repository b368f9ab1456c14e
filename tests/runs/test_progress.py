"""The line on standard error, and the recorder that moves it."""

import pytest

from hpcjax.runs import progress


class Kept:
    def __init__(self):
        self.records, self.rewound = [], []

    def write(self, record):
        self.records.append(record)

    def rewind(self, step):
        self.rewound.append(step)
        return 2.5


def test_a_run_ends_with_one_line_where_there_is_no_terminal(capsys):
    with progress.Progress("paper/config:best", total=3) as line:
        line.update({"step": 1, "loss": 2.0})
        line.update({"step": 2, "loss": 1.5, "val_error": 0.123456})
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "paper/config:best: done at step 2 loss 1.5  val_error 0.1235\n"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_it_says_what_stopped_the_run(capsys, error):
    def run():
        with progress.Progress("demo", total=None) as line:
            line.update({"step": 7})
            raise error

    with pytest.raises(error):
        run()
    assert capsys.readouterr().err == f"demo: stopped: {error.__name__} at step 7 \n"


def test_quiet_is_quiet(capsys):
    with progress.Progress("demo", total=2, quiet=True) as line:
        line.update({"step": 1, "loss": 1.0})
    assert capsys.readouterr() == ("", "")


def test_compile_time_is_no_news(capsys):
    with progress.Progress("demo", total=2) as line:
        line.update({"step": 0, "compile_seconds": 1.0})
    assert capsys.readouterr().err == "demo: done at step 0 \n"


def test_watched_hands_everything_on():
    kept = Kept()
    with progress.Progress("demo", total=2, quiet=True) as line:
        watched = progress.Watched(kept, line)
        watched.write({"step": 1, "loss": 3.0})
        assert watched.rewind(1) == 2.5
    assert kept.records == [{"step": 1, "loss": 3.0}]
    assert kept.rewound == [1]


def test_a_record_that_is_not_written_is_not_shown():
    class Full(Kept):
        def write(self, record):
            raise OSError("full")

    with progress.Progress("demo", total=2, quiet=True) as line:
        with pytest.raises(OSError, match="full"):
            progress.Watched(Full(), line).write({"step": 1, "loss": 3.0})
        assert "3" not in line._text()
