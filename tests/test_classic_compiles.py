"""The classic kernels compiled for GPUs that need not be present, and launched as far as a stub of the driver."""

import re
import types
import warnings

import pytest
import torch
import triton
import triton.language as tl
from compile_only import TARGETS, amd_widths, compile_for, ptx_widths
from products import pairwise

from fused_softmax.classic import hybrid, hybrid_softmax, online, online_softmax, persistent, persistent_softmax, rows
from fused_softmax.classic.online import CONFIGS
from fused_softmax.classic.persistent import pipeline_stages
from fused_softmax.classic.rows import block_warps

pytestmark = pytest.mark.compiles

SHARED_BYTES = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}
WIDTH = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}

every_target = pytest.mark.parametrize("target", TARGETS)
every_dtype = pytest.mark.parametrize("dtype", WIDTH)
nvidia = pytest.mark.parametrize("target", [name for name in TARGETS if name != "gfx942"])


def compiled(kernel, target, dtype, *, aligned=True, num_warps, constexprs, **options):
    runtime = {
        name: f"*{dtype}" if name.endswith("_ptr") else "i32"
        for name in kernel.arg_names
        if name not in constexprs and name != "VALUE"
    }
    value = tl.float64 if dtype == "fp64" else tl.float32
    return compile_for(
        kernel,
        signature=runtime,
        constexprs={"VALUE": value, **constexprs},
        target=target,
        divisible_by_16=[name for name in runtime if name != "n_rows" and (aligned or name != "n_cols")],
        num_warps=num_warps,
        **options,
    )


def value_bytes(dtype):
    return max(WIDTH[dtype], 4)


def warps(target, block_cols, dtype):
    return block_warps(block_cols * value_bytes(dtype), 1024 // TARGETS[target].warp_size)


def compiled_hybrid(target, dtype, block_cols, *, one_block, accumulate=None, aligned=True):
    total = tl.float64 if "fp64" in (dtype, accumulate) else tl.float32
    return compiled(
        hybrid._forward,
        target,
        dtype,
        aligned=aligned,
        num_warps=warps(target, block_cols, dtype),
        constexprs={"SUM": total, "ONE_BLOCK": one_block, "BLOCK_COLS": block_cols},
    )


def compiled_persistent(target, dtype, block_cols, *, aligned=True):
    return compiled(
        persistent._forward,
        target,
        dtype,
        aligned=aligned,
        num_warps=warps(target, block_cols, dtype),
        constexprs={
            "BLOCK_COLS": block_cols,
            "STAGES": pipeline_stages(block_cols * WIDTH[dtype], SHARED_BYTES[target]),
        },
    )


def compiled_online(target, dtype, name, *, aligned=True):
    options = CONFIGS[name].all_kwargs()
    tile = {"BLOCK_SIZE": options.pop("BLOCK_SIZE"), "VEC": options.pop("VEC")}
    return compiled(online._forward, target, dtype, aligned=aligned, constexprs=tile, **options)


@pairwise(strength=1)
@every_target
@every_dtype
@pytest.mark.parametrize("one_block", [True, False], ids=["fast", "tiled"])
@pytest.mark.parametrize("accumulate", ["fp32", "fp64"])
def test_hybrid(target, dtype, one_block, accumulate):
    largest = (hybrid.BLOCK_BYTES if one_block else hybrid.TILE_BYTES) // value_bytes(dtype)
    for block_cols in (4096, largest):
        kernel = compiled_hybrid(target, dtype, block_cols, one_block=one_block, accumulate=accumulate)
        assert kernel.stack_bytes == 0
        assert set(kernel.load_widths) == set(kernel.store_widths) == {16}
        assert len(kernel.load_widths) == len(kernel.store_widths) * (1 if one_block else 3)
        assert kernel.shared_bytes <= 1024


@nvidia
@pytest.mark.parametrize("one_block", [True, False], ids=["fast", "tiled"])
def test_hybrid_float64_accumulation_adds_in_float64_on_both_paths(target, one_block):
    single, double = (
        compiled_hybrid(target, "bf16", 4096, one_block=one_block, accumulate=accumulate)
        for accumulate in ("fp32", "fp64")
    )
    assert "add.f64" not in single.ptx.replace(".rn", "")
    assert "add.f64" in double.ptx.replace(".rn", "")


@pairwise(strength=1)
@every_target
@every_dtype
def test_persistent(target, dtype):
    for block_cols in (1024, 8192, 128 * 1024 // value_bytes(dtype)):
        kernel = compiled_persistent(target, dtype, block_cols)
        # Loop state, at blocks that take every register; a spilled row would be hundreds of bytes.
        assert kernel.stack_bytes <= 24
        assert kernel.shared_bytes <= SHARED_BYTES[target]
        if block_cols > 1024:
            assert set(kernel.load_widths) == set(kernel.store_widths) == {16}


@nvidia
def test_persistent_fetches_rows_ahead(target):
    kernel = compiled_persistent(target, "bf16", 4096)
    assert "cp.async" in kernel.ptx
    assert kernel.shared_bytes >= 3 * 4096 * 2
    assert len(kernel.load_widths) == 4 * len(kernel.store_widths), "three rows before the loop, one in it"


@every_target
def test_persistent_spills_rows_longer_than_it_says(target):
    spilled = compiled_persistent(target, "fp32", 65536).stack_bytes
    assert 100 < spilled < 350 or (target == "gfx942" and spilled == 0)


@pairwise(strength=1)
@every_target
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", CONFIGS)
def test_online(target, dtype, name):
    kernel = compiled_online(target, dtype, name)
    # 65536 columns in 256 threads are 256 values each: the one configuration published beyond what registers hold.
    assert kernel.stack_bytes == 0 or name == "16384x4-w8-s3"
    assert len(kernel.load_widths) == 2 * len(kernel.store_widths)
    # A tile of 2048 16-bit values gives each of 512 threads (256 on NVIDIA) no more than 8 bytes.
    assert set(kernel.load_widths) <= {8, 16}
    assert set(kernel.load_widths) == {16} or target == "gfx942"


@every_target
def test_online_of_float64(target):
    assert compiled_online(target, "fp64", "1024x2-w4-s2").stack_bytes == 0


@nvidia
def test_a_width_that_is_no_multiple_of_16_is_moved_element_by_element(target):
    for kernel in (
        compiled_hybrid(target, "bf16", 4096, one_block=True, aligned=False),
        compiled_persistent(target, "bf16", 4096, aligned=False),
        compiled_online(target, "bf16", "1024x2-w4-s2", aligned=False),
    ):
        assert set(kernel.load_widths) == set(kernel.store_widths) == {2}


@pytest.mark.parametrize(
    "kernel",
    [
        lambda: compiled_hybrid("sm_90", "bf16", 4096, one_block=False),
        lambda: compiled_persistent("sm_90", "bf16", 4096),
        lambda: compiled_online("sm_90", "bf16", "512x2-w4-s1"),
    ],
    ids=["hybrid", "persistent", "online"],
)
def test_rows_are_addressed_in_64_bits(kernel):
    multiplied = re.findall(
        r"arith\.muli .*%[xy]_row_stride\w* .*: (\w+)|arith\.muli .* : (\w+)", kernel().kernel.asm["ttir"]
    )
    assert multiplied
    assert {a or b for a, b in multiplied} == {"i64"}


def test_ptx_widths():
    ptx = """
        ld.param.b64 %rd1, [kernel_param_0];
        @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
        @!%p1 ld.global.L1::evict_first.L2::cache_hint.v2.b64 { %rd2, %rd3 }, [ %rd1 + 0 ], %rd9;
        ld.global.nc.v8.b32 {%r1}, [%rd1];
        ld.volatile.global.b16 %rs1, [%rd1];
        cp.async.cg.shared.global [ %r3 + 0 ], [ %rd4 + 0 ], 0x10, %r5;
        cp.async.ca.shared.global.L2::128B [%r3], [%rd4], 4;
        ld.acquire.gpu.global.u64 %rd1, [%rd2];
        ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r9];
        st.shared.b32 [%r9], %r1;
        @%p2 st.global.cs.v2.b32 [ %rd7 + 0 ], { %r1, %r2 };
        st.global.f32 [%rd7], %f1;
        st.global.b8 [%rd7], %r1;
    """
    assert ptx_widths(ptx, "ld") == [16, 16, 32, 2, 16, 4, 8]
    assert ptx_widths(ptx, "st") == [8, 4, 1]


def test_amd_widths():
    amdgcn = """
        s_load_dwordx8 s[0:7], s[4:5], 0x0
        s_buffer_load_dword s0, s[0:3], 0x0
        buffer_load_dwordx4 v[0:3], v4, s[0:3], 0 offen
        global_load_ushort v1, v[0:1], off
        global_load_short_d16_hi v1, v[0:1], off
        global_load_lds_dwordx4 v[0:1], off
        global_load_b128 v[0:3], v[0:1], off
        global_load_d16_b16 v1, v[0:1], off
        scratch_load_dword v1, off, s0
        ds_read_b128 v[0:3], v0
        global_store_dwordx2 v[0:1], v[2:3], off
        buffer_store_byte v1, v4, s[0:3], 0 offen
    """
    assert amd_widths(amdgcn, "load") == [16, 2, 2, 16, 16, 2]
    assert amd_widths(amdgcn, "store") == [8, 1]


def test_compile_for_names_the_arguments_that_do_not_add_up():
    with pytest.raises(ValueError, match=r"missing or unknown \['VALUE', 'n_cols'\], in both \['VEC'\].*\['n_row'\]"):
        compile_for(
            online._forward,
            signature={"x_ptr": "*fp32", "y_ptr": "*fp32", "x_row_stride": "i32", "y_row_stride": "i32", "VEC": "i32"},
            constexprs={"BLOCK_SIZE": 512, "VEC": 2},
            target="sm_90",
            divisible_by_16=("n_row",),
        )


@pytest.fixture
def launches(monkeypatch):
    """Gives Triton an sm_90 device that finds 64 registers in any binary and notes launches instead of running them."""
    if torch.cuda.is_available():
        pytest.skip("the real driver is there")
    noted = []
    properties = {"multiprocessor_count": 132, "max_num_regs": 65536, "max_shared_mem": 232448}

    class Launcher:
        def __init__(self, source, metadata):
            self.source, self.metadata = source, metadata

        def __call__(self, grid_x, *rest):
            noted.append((self.source.name, grid_x, self.metadata))

    driver = types.SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: TARGETS["sm_90"],
        get_device_properties=lambda device: properties,
        launcher_cls=Launcher,
        utils=types.SimpleNamespace(
            get_device_properties=lambda index: properties,
            load_binary=lambda name, binary, shared, device: (1, 1, 64, 0, 1024),
            unload_module=lambda module: None,
        ),
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    # A CPU tensor stands in for one on the device.
    monkeypatch.setattr(rows, "interpreted", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(max_threads_per_multi_processor=2048)
    )
    for kernel in (hybrid._forward, online._forward, persistent._forward):
        kernel.device_caches.clear()
    persistent._programs.clear()
    persistent._multiprocessors.clear()
    yield noted
    for kernel in (hybrid._forward, online._forward, persistent._forward):
        kernel.device_caches.clear()
    persistent._programs.clear()
    persistent._multiprocessors.clear()


def test_launches_pass_what_triton_accepts_without_a_warning(launches):
    x = torch.zeros(3, 5000, dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hybrid_softmax(x)
        hybrid_softmax(x, block_cap=1024, accumulate="float64")
        online_softmax(x, config="2048x4-w8-s2")
        persistent_softmax(x)
    assert [(grid, metadata.num_warps) for _, grid, metadata in launches] == [(3, 8), (3, 4), (3, 8), (3, 8)]
    assert all(metadata.enable_fp_fusion for _, _, metadata in launches)


def test_persistent_grid_comes_from_the_compiled_kernel(launches, monkeypatch):
    x = torch.zeros(5000, 5000)
    persistent_softmax(x)
    _, programs, metadata = launches[-1]
    # 64 registers and 8 warps: four programs by registers, but two by the three rows each keeps in shared memory.
    assert (metadata.shared, programs) == (3 * 8192 * 4 + 32, 132 * 2)

    monkeypatch.setattr(persistent._forward, "warmup", None)
    persistent_softmax(x[:17])
    assert launches[-1][1] == 17, "no more programs than rows, and no second look at the binary"


def test_a_cpu_tensor_without_the_interpreter_is_refused():
    for kernel in (persistent_softmax, hybrid_softmax, online_softmax):
        with pytest.raises(ValueError, match=r"x is on cpu: .* FUSED_SOFTMAX_INTERPRET=1"):
            kernel(torch.zeros(2, 2))
