"""Checkpoints that `transformers` has written."""

import pytest

from tests.models import checkpoints


@pytest.fixture(scope="module")
def case(request, tmp_path_factory):
    """Name, model and folder of one of `checkpoints.CASES`."""
    model = checkpoints.build(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return request.param, model, folder
