"""The line on standard error."""

import pytest

from hpcjax.runs import progress
from hpcjax.train.recorder import Recorder


def test_a_run_ends_with_one_line_where_there_is_no_terminal(capsys):
    with progress.Progress("paper/config:best", total=3) as line:
        line.write({"step": 1, "loss": 2.0})
        line.write({"step": 2, "loss": 1.5, "val_error": 0.123456})
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "paper/config:best: done at step 2 loss 1.5  val_error 0.1235\n"


def test_what_is_piped_is_not_wrapped(capsys):
    name = "paper/config:" + "long" * 30
    with progress.Progress(name, total=1) as line:
        line.write({"step": 1, "loss": 1.5})
    assert capsys.readouterr().err == f"{name}: done at step 1 loss 1.5\n"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_it_says_what_stopped_the_run(capsys, error):
    def run():
        with progress.Progress("demo", total=9) as line:
            line.write({"step": 7})
            raise error

    with pytest.raises(error):
        run()
    assert capsys.readouterr().err == f"demo: stopped: {error.__name__} at step 7 \n"


def test_a_run_without_steps_ends_at_none(capsys):
    with progress.Progress("demo", total=None):
        pass
    assert capsys.readouterr().err == "demo: done\n"


def test_quiet_is_quiet(capsys):
    with progress.Progress("demo", total=2, quiet=True) as line:
        line.write({"step": 1, "loss": 1.0})
    assert capsys.readouterr() == ("", "")


def test_compile_time_is_no_news(capsys):
    with progress.Progress("demo", total=2) as line:
        line.write({"step": 0, "compile_seconds": 1.0})
    assert capsys.readouterr().err == "demo: done at step 0 \n"


def test_a_run_that_goes_on_shows_where(capsys):
    with progress.Progress("demo", total=2) as line:
        assert isinstance(line, Recorder)
        assert line.rewind(7) == 0.0
    assert capsys.readouterr().err == "demo: done at step 7 \n"
