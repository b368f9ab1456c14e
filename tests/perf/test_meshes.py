"""Bytes by the axes of a mesh, and the largest model that fits."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from hpcjax import perf, sharding
from hpcjax.core.errors import ConfigError
from hpcjax.perf import hlo, meshes

MESH = {"replica": 1, "data": 4, "model": 2}


def compiled(function, mesh):
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    rows = jax.ShapeDtypeStruct((8, 16), "float32")
    return jax.jit(mapped).lower(rows).compile()


def test_each_collective_is_told_with_the_axes_of_its_groups():
    mesh = sharding.make_mesh(MESH)

    def send(x):
        x = lax.psum(x, "model") + lax.psum(jnp.sin(x), "replica")
        x = lax.psum_scatter(x, "data", tiled=True)
        x = lax.all_gather(jnp.cos(x), "data", tiled=True)
        x = lax.ppermute(jnp.tan(x), "model", [(0, 1), (1, 0)])
        return jnp.sum(lax.psum(jnp.exp(x), ("data", "model")), axis=1)

    program = compiled(send, mesh)
    size = 8 * 16 * 4
    assert perf.bytes_by_axis(program, mesh) == {
        (("model",), "all-reduce"): size,
        (("data",), "reduce-scatter"): size,
        (("data",), "all-gather"): size // 4,
        (("model",), "collective-permute"): size,
        (("data", "model"), "all-reduce"): size,
    }
    # A ring of p members: 2 s (p - 1)/p, s (p - 1)/p, s (p - 1) and s.
    expected = size * (2 / 2 + 3 / 4 + 3 / 4 + 1 + 2 * 7 / 8)
    assert perf.ring_bytes(program, 8) == pytest.approx(expected)
    assert perf.ring_bytes_by_axis(program, mesh) == pytest.approx(
        {
            ("model",): size * (2 / 2 + 1),
            ("data",): size * (3 / 4 + 3 / 4),
            ("data", "model"): size * 2 * 7 / 8,
        }
    )
    # 2 (2 - 1) of the first sum, 3 and 3 along data, one, and 2 (8 - 1).
    each = [perf.ring_rounds(own, mesh) for own in perf.collectives(program)]
    assert sorted(each) == [0, 1, 2, 3, 3, 14]


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("replica_groups={{0,2},{1,3}}", ((0, 2), (1, 3))),
        ("replica_groups={{0},{1}}", ((0,), (1,))),
        ("replica_groups={}", ()),
        ("replica_groups=[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("source_target_pairs={{0,1},{1,0}}", ((0, 1), (1, 0))),
    ],
)
def test_groups_are_read_in_both_forms(written, groups):
    kind = "collective-permute" if "pairs" in written else "all-reduce"
    text = f"""HloModule m

ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  ROOT %y = f32[8]{{0}} {kind}(%x), channel_id=1, {written}, use_global_device_ids=true
}}
"""
    (found,) = hlo.collectives_of_text(text)
    assert found.groups == groups


@pytest.mark.parametrize(
    ("peak", "memory", "largest", "most"),
    [
        (lambda size: 100 + 7 * size, 1000, 128, 6),
        (lambda size: 100 + 7 * size, 120, 2, 4),
        (lambda size: 100 + 7 * size, 107, 1, 2),
        (lambda size: size**2, 10_000, 100, 30),
        (lambda size: 50 * (size // 10), 1000, 209, 30),
    ],
)
def test_the_largest_size_is_found_by_few_programs(
    monkeypatch, peak, memory, largest, most
):
    made = []

    def make(size):
        made.append(size)
        return size

    monkeypatch.setattr(meshes, "peak_memory", peak)
    assert perf.largest_model(make, memory) == largest
    assert len(made) <= most


def test_a_memory_that_holds_nothing_is_refused(monkeypatch):
    monkeypatch.setattr(meshes, "peak_memory", lambda size: 10 * size)
    with pytest.raises(ConfigError, match="size 1 takes 10 bytes: got memory=9"):
        perf.largest_model(lambda size: size, 9)
