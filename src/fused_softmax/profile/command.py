"""The command line by which NVIDIA's Nsight Compute profiles one call. Pure functions from names to arguments."""

from collections.abc import Sequence

# ncu's names for why warps do not issue, and a sentence on what to do about each.
STALLS = {
    "long_scoreboard": "warps wait for data from memory: put more bytes in flight, by prefetch or by more programs",
    "lg_throttle": "the queue of loads and stores is full: use fewer and wider accesses",
    "short_scoreboard": "warps wait for shared memory or special functions: look at the reductions and exponentials",
    "barrier": "warps wait for each other: use fewer reductions across warps, or fewer warps a program",
    "membar": "warps wait for a memory fence: look at the exchange between programs",
    "mio_throttle": "the shared-memory queue is full: look at reductions across warps",
    "math_pipe_throttle": "an arithmetic pipe is full: look at the exponentials",
    "wait": "warps wait for dependent instructions: give each warp more independent work",
    "not_selected": "enough warps are ready: nothing is lost here",
    "drain": "warps wait for their last stores: memory accepts no more",
    "sleeping": "warps sleep: look at the polling in the exchange",
    "branch_resolving": "warps wait for branches: look at loops and early returns",
    "no_instruction": "instructions arrive late: the kernel's code is long",
    "imc_miss": "constants are not in their cache: look at the kernel's arguments",
    "dispatch_stall": "the dispatcher holds warps back",
    "tex_throttle": "the texture queue is full",
}
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "lts__t_bytes.sum",
    "lts__t_sector_hit_rate.pct",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "sm__maximum_warps_per_active_cycle_pct",
    "launch__registers_per_thread",
    "launch__shared_mem_per_block",
    "launch__block_size",
    "launch__grid_size",
    "launch__waves_per_multiprocessor",
    "launch__occupancy_limit_blocks",
    "launch__occupancy_limit_registers",
    "launch__occupancy_limit_shared_mem",
    "launch__occupancy_limit_warps",
    "l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum",
    "l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum",
    "smsp__sass_data_bytes_mem_global_op_ld.sum",
    "smsp__sass_data_bytes_mem_global_op_st.sum",
    "smsp__sass_inst_executed_op_global_ld.sum",
    "smsp__sass_inst_executed_op_global_st.sum",
    *(STALL.format(name) for name in STALLS),
)


def target(python: str, case: Sequence[str], provider: str, *more: str) -> list[str]:
    """The command of the process that makes the call. case: operation, shape and dtype."""
    return [python, "-m", "fused_softmax.profile.target", *case, provider, *more]


def ncu(program: str, log: str, application: Sequence[str]) -> list[str]:
    """ncu's arguments: profile from the profiler's start to its stop, with cold caches and the clocks left alone.

    log: the file for the CSV and ncu's own messages. The application keeps stdout.
    """
    return [
        program,
        *("--csv", "--page", "raw", "--print-units", "base", "--log-file", log),
        *("--profile-from-start", "off", "--target-processes", "application-only"),
        *("--cache-control", "all", "--clock-control", "none", "--replay-mode", "kernel"),
        *("--metrics", ",".join(METRICS)),
        *application,
    ]
