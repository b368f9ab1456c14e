"""The guide of input runs."""

from tests import guides


def test_the_guides_code_says_what_is_lost(capsys):
    (block,) = guides.blocks("docs/input.md")
    guides.run_block(block, "docs/input.md", {})
    ahead, ours = capsys.readouterr().out.splitlines()
    assert ahead.startswith("read_ahead: ")
    assert ours.startswith("clairvoyant: ")
    assert float(ours.split()[1]) < 0.7 * float(ahead.split()[1])
