"""A sum of one's own behind a step that communicates in a branch, with `core.after`."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from hpcjax import sharding
from hpcjax.core import after
from hpcjax.core.varying import vary
from tests.train import hlo_order


@pytest.mark.parametrize("ordered", [False, True])
def test_only_what_needs_the_other_cannot_be_swapped(ordered):
    mesh = sharding.make_mesh({"a": 2, "b": 2})

    def step(x, loss, number):
        def shifted(to):
            pairs = [(rank, (rank + to) % 4) for rank in range(4)]
            return lambda x: jax.lax.ppermute(x, ("a", "b"), pairs)

        x = jax.lax.switch(number, [shifted(1), shifted(2)], x)
        loss = after(loss, x) if ordered else loss
        return x, jax.lax.psum(vary(loss, "b"), "b")

    specs = P(("a", "b")), P("a")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(*specs, P()), out_specs=specs)
    x, loss = (
        jax.device_put(jnp.arange(8.0), jax.sharding.NamedSharding(mesh, spec))
        for spec in specs
    )
    run = jax.jit(mapped).lower(x, loss, jnp.int32(1)).compile()
    assert bool(hlo_order.swappable(run.as_text())) is not ordered
    moved, total = run(x, loss, jnp.int32(1))
    assert moved.tolist() == [4, 5, 6, 7, 0, 1, 2, 3]
    assert total.tolist() == [0, 2, 4, 6, 8, 10, 12, 14]


def test_branches_that_are_nested_and_plain_collectives():
    text = """HloModule step
%inner (p.1: f32[2]) -> f32[2] {
  ROOT %psum.1 = f32[2]{0} all-reduce(%p.1), channel_id=1, to_apply=%add
}

%outer (p.2: f32[2]) -> f32[2] {
  ROOT %call.1 = f32[2]{0} call(%p.2), to_apply=%inner
}

ENTRY %main (p.3: f32[2], n: s32[]) -> (f32[2], f32[2], f32[2]) {
  %p.3 = f32[2]{0} parameter(0)
  %n = s32[] parameter(1)
  %psum.2 = f32[2]{0} all-reduce(%p.3), channel_id=1, to_apply=%add
  %psum.3 = f32[2]{0} all-reduce(%p.3), channel_id=1, to_apply=%add
  %cond.1 = f32[2]{0} conditional(%n, %psum.2, %psum.2), branch_computations={%outer}
  ROOT %tuple = (f32[2]{0}, f32[2]{0}, f32[2]{0}) tuple(%cond.1, %psum.2, %psum.3)
}
"""
    assert hlo_order.swappable(text) == [("psum.3", "cond.1")]
