"""The manifest notices any change to itself, to files and to leaves."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcjax.core.errors import CheckpointCorrupt
from hpcjax.train import manifest as manifests
from hpcjax.train.manifest import Block, Leaf, Manifest


def make(tmp_path, step=4):
    (tmp_path / "sub").mkdir(exist_ok=True)
    (tmp_path / "sub" / "data").write_bytes(bytes(range(256)))
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    blocks = tuple(
        Block(start=(row, 0), shape=(1, 3), xxh3_128=manifests.checksum(array[row]))
        for row in range(2)
    )
    manifest = Manifest(
        step=step,
        leaves={"a/b": Leaf(shape=(2, 3), dtype="float32", blocks=blocks)},
        files=manifests.scan(tmp_path),
        extra={"seconds": 0.1, "loss": float("inf")},
    )
    manifests.write(tmp_path, manifest)
    return manifest, {"a/b": array}


def test_reads_what_was_written(tmp_path):
    manifest, arrays = make(tmp_path)
    read = manifests.read(tmp_path, 4)
    assert read == manifest
    assert list(read.files) == ["sub/data"]
    manifests.check_files(tmp_path, read)
    manifests.check_leaves(arrays, read)


def test_every_flipped_bit_of_the_manifest_is_noticed(tmp_path):
    make(tmp_path)
    path = tmp_path / manifests.NAME
    content = path.read_bytes()
    for position in range(len(content)):
        for bit in range(8):
            changed = bytearray(content)
            changed[position] ^= 1 << bit
            path.write_bytes(changed)
            with pytest.raises(CheckpointCorrupt, match="step 4"):
                manifests.read(tmp_path, 4)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_truncated_manifests_are_noticed(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("manifest")
    make(directory)
    path = directory / manifests.NAME
    content = path.read_bytes()
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(CheckpointCorrupt):
        manifests.read(directory, 4)


def test_a_manifest_of_another_step_is_refused(tmp_path):
    make(tmp_path, step=4)
    with pytest.raises(CheckpointCorrupt, match="belongs to step 4"):
        manifests.read(tmp_path, 5)


def test_files_are_named_when_they_differ(tmp_path):
    manifest, _ = make(tmp_path)
    path = tmp_path / "sub" / "data"
    path.write_bytes(bytes(255))
    with pytest.raises(CheckpointCorrupt, match="'sub/data' must have 256 bytes"):
        manifests.check_files(tmp_path, manifest)
    path.write_bytes(bytes(256))
    with pytest.raises(CheckpointCorrupt, match="'sub/data' does not match"):
        manifests.check_files(tmp_path, manifest)
    path.unlink()
    with pytest.raises(CheckpointCorrupt, match="'sub/data' cannot be read"):
        manifests.check_files(tmp_path, manifest)


def test_leaves_are_named_when_they_differ(tmp_path):
    manifest, arrays = make(tmp_path)
    negative = arrays["a/b"].copy()
    negative[0, 0] = -0.0  # equal as a number, another bit pattern
    for wrong, message in (
        ({}, "is missing"),
        ({"a/b": arrays["a/b"].T}, r"must be float32\[2, 3\]: got float32\[3, 2\]"),
        ({"a/b": arrays["a/b"].astype(np.float64)}, "got float64"),
        ({"a/b": negative}, "does not match"),
    ):
        with pytest.raises(CheckpointCorrupt, match=message):
            manifests.check_leaves(wrong, manifest)
    leaf = manifest.leaves["a/b"]
    partial = dataclasses.replace(leaf, blocks=leaf.blocks[:1])
    uncovered = dataclasses.replace(manifest, leaves={"a/b": partial})
    with pytest.raises(CheckpointCorrupt, match="not wholly covered"):
        manifests.check_leaves(arrays, uncovered)


def test_blocks_of_processes_are_merged(tmp_path):
    manifest, _ = make(tmp_path)
    leaf = manifest.leaves["a/b"]
    parts = [
        {"a/b": dataclasses.replace(leaf, blocks=(block,))} for block in leaf.blocks
    ]
    assert manifests.merge(parts) == manifest.leaves
    assert manifests.leaf_from_json(manifests.leaf_to_json(leaf)) == leaf


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "bool"])
def test_checksum_is_of_the_bytes_in_c_order(dtype):
    array = np.arange(6).reshape(2, 3).astype(jnp.dtype(dtype))
    wanted = xxhash.xxh3_128_hexdigest(array.tobytes())
    assert manifests.checksum(array) == wanted
    assert manifests.checksum(np.asfortranarray(array)) == wanted
    scalar = array[1, 1, ...]
    assert manifests.checksum(scalar) == xxhash.xxh3_128_hexdigest(scalar.tobytes())
