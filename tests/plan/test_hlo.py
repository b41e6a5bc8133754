"""Costs of compiled programs that are small enough to count by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from podracer.plan import costs

AXES = ("NHWC", "HWIO", "NHWC")


def compiled(function, *arguments):
    return jax.jit(function).lower(*arguments).compile()


def kernels(function, *arguments):
    return costs.kernels(compiled(function, *arguments).as_text())


def matmul(x, w):
    return x @ w


def layer(x, w):
    return jnp.maximum(x @ w + 1, 0).sum(0)


def strided(x, k):
    return lax.conv_general_dilated(x, k, (2, 2), "SAME", dimension_numbers=AXES)


def spread(x, k):
    return lax.conv_general_dilated(
        x, k, (1, 1), ((2, 2), (2, 2)), (2, 2), (1, 1), dimension_numbers=AXES
    )


IMAGES, KERNEL = np.ones((4, 9, 9, 3), np.float32), np.ones((3, 3, 3, 8), np.float32)
LOOP_FREE = {
    "matmul": (matmul, np.ones((8, 16), np.float32), np.ones((16, 32), np.float32)),
    "layer": (layer, np.ones((8, 16), np.float32), np.ones((16, 32), np.float32)),
    "strided convolution": (strided, IMAGES, KERNEL),
    "spread convolution": (spread, IMAGES, KERNEL),
    "elementwise": (lambda x, y: x * y + jnp.float32(2), IMAGES, IMAGES),
}


@pytest.mark.parametrize("name", LOOP_FREE)
def test_programs_without_loops_cost_what_xla_reports(name):
    program = compiled(*LOOP_FREE[name])
    found = costs.kernels(program.as_text())
    expected = program.cost_analysis()
    assert sum(k.flops for k in found) == expected["flops"] > 0
    assert sum(k.bytes for k in found) == expected["bytes accessed"]
    assert all(k.executions == 1 and k.known_trips for k in found)
    assert not any(k.host_transfer or k.comm_bytes for k in found)


def test_the_costs_of_a_matrix_product():
    (kernel,) = [k for k in kernels(*LOOP_FREE["matmul"]) if k.flops]
    assert kernel.flops == 2 * 8 * 16 * 32
    assert kernel.bytes == 4 * (8 * 16 + 16 * 32 + 8 * 32)


def nested(x, w):
    def inner(x, _):
        return x @ w, ()

    def outer(x, _):
        return lax.scan(inner, x, length=5)[0], ()

    return lax.scan(outer, x, length=7)[0]


def test_trip_counts_of_nested_loops_multiply():
    x, w = jnp.ones((8, 16)), jnp.ones((16, 16))
    (product,) = [k for k in kernels(nested, x, w) if k.flops > 1000]
    assert product.executions == 35
    assert product.flops == 2 * 8 * 16 * 16
    assert product.known_trips


def test_trip_counts_are_found_without_the_compilers_annotation():
    x, w = jnp.ones((8, 16)), jnp.ones((16, 16))
    text = compiled(nested, x, w).as_text()
    assert text.count("known_trip_count") == 2
    text = text.replace("known_trip_count", "nothing")
    assert {k.executions for k in costs.kernels(text) if k.flops > 1000} == {35}


def test_a_loop_whose_end_depends_on_data_is_counted_once_and_marked():
    def until(x):
        return lax.while_loop(lambda x: x.sum() < 100, lambda x: x * 2, x)

    inside = [k for k in kernels(until, jnp.ones(8)) if not k.known_trips]
    assert inside
    assert all(k.executions == 1 for k in inside)


def test_a_loop_over_slices_reads_and_writes_only_slices():
    def double(x):
        return lax.map(lambda row: row * 2, x)

    loop = [k for k in kernels(double, jnp.ones((100, 1000))) if k.executions == 100]
    # A row is 4000 bytes, the whole array 400 KB. It is read and written, perhaps by two kernels.
    assert 8_000 <= sum(k.bytes for k in loop) < 40_000


def test_collectives_are_found_with_their_bytes():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")

    def body(x):
        return lax.scan(lambda x, _: (lax.pmean(x, "x"), ()), x, length=3)[0]

    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    found = [k for k in kernels(mapped, jnp.ones((8, 250))) if k.opcode in costs.COLLECTIVES]
    assert [(k.opcode, k.executions, k.comm_bytes) for k in found] == [("all-reduce", 3, 1000)]


def test_callbacks_are_found():
    def call_back(x):
        jax.debug.callback(lambda x: None, x)
        return x + 1

    assert any(k.host_transfer for k in kernels(call_back, jnp.ones(3)))


TPU = """HloModule m, is_scheduled=true

%cond (p: (s32[], f32[32,4])) -> pred[] {
  %c.1 = s32[]{:T(128)} constant(12)
  %p = (s32[]{:T(128)}, /*index=1*/f32[32,4]{1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %c.1), direction=LT
}

%body (p: (s32[], f32[32,4])) -> (s32[], f32[32,4]) {
  %p.1 = (s32[]{:T(128)}, f32[32,4]{1,0:T(8,128)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%p.1), index=0
  %x = f32[32,4]{1,0:T(8,128)} get-tuple-element(%p.1), index=1
  %two = s32[]{:T(128)} constant(2)
  %n = s32[]{:T(128)} add(%i.1, %two)
  %y = f32[32,4]{1,0:T(8,128)S(1)} exponential(%x), backend_config={"estimated_cycles":"1829"}
  %z = f32[32,4]{0,1:T(4,128)} negate(%y), backend_config={"estimated_cycles":"7"}
  ROOT %t = (s32[]{:T(128)}, f32[32,4]{1,0:T(8,128)}) tuple(%n, %z)
}

ENTRY %main (a: f32[32,4]) -> f32[32,4] {
  %a = f32[32,4]{1,0:T(8,128)} parameter(0)
  %zero = s32[]{:T(128)} constant(2)
  %start = s32[]{:T(128)} copy(%zero)
  %in = (s32[]{:T(128)}, f32[32,4]{1,0:T(8,128)}) tuple(%start, %a)
  %w = (s32[]{:T(128)}, f32[32,4]{1,0:T(8,128)}) while(%in), condition=%cond, body=%body
  ROOT %out = f32[32,4]{1,0:T(8,128)} get-tuple-element(%w), index=1
}
"""


def test_a_tpus_layouts_are_padded_and_fast_memory_is_not_counted():
    by_name = {k.name: k for k in costs.kernels(TPU)}
    # The loop runs from 2 to 12 in steps of 2. Rows of 4 are padded to the 128 lanes of a tile;
    # S(1) is not main memory.
    assert by_name["y"].executions == 5
    assert by_name["y"].bytes == 32 * 128 * 4
    assert by_name["y"].cycles == 1829
    # With the other order of axes, 4 x 32 is padded to 4 x 128.
    assert by_name["z"].bytes == 4 * 128 * 4


ASYNCHRONOUS = """HloModule m, is_scheduled=true

ENTRY %main (a: f32[250]) -> f32[250] {
  %a = f32[250]{0} parameter(0)
  %start = f32[250]{0} all-reduce-start(%a), replica_groups={{0,1}}, to_apply=%sum
  ROOT %out = f32[250]{0} all-reduce-done(%start)
}
"""


def test_an_asynchronous_collective_is_counted_once():
    (kernel,) = costs.kernels(ASYNCHRONOUS)
    assert (kernel.opcode, kernel.executions, kernel.comm_bytes) == ("all-reduce", 1, 1000)
