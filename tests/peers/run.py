"""Runs other projects' own tests against this package: `python tests/peers/run.py CHECKOUTS`.

CHECKOUTS is a folder with a git checkout of each project, or a bare clone, by its repository's name: quack,
Liger-Kernel. A suite's test files are those of its HEAD, or of the tag that the table names. They are laid out
unchanged in a temporary folder beside a shim, which has this package under the project's import names, and pytest runs
there by several workers. A suite whose checkout or files are missing is absent. `trl_applied` needs TRL itself, of the
version whose tests it runs, and `transformers` needs transformers. Seven cases of `vllm` need scipy.

Prints a row for each suite and its first failures, and writes peers.json: of each suite how many cases it collected,
how many passed, failed, were skipped or not run, and the id and last line of each failure. The exit status is 1 if a
case failed; measured/bench.md says which fail by design.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
OF_NN = "softmax or softmin or cross_entropy or CrossEntropyLoss"
LARGE = "64bit or large_tensor"
OF_VLLM_ALONE = (
    "fly or synthetic or recovered or fp64 or jit or sampler_allowed or sampler_bad or murmur3 or uniform64 or cache"
)


@dataclass(frozen=True)
class Suite:
    """A project's tests. Each file keeps its path, but for a leading src/."""

    repository: str
    files: tuple[str, ...]
    shim: str
    arguments: tuple[str, ...] = ("tests",)
    workers: int = 1
    seconds: int = 60  # that its share of the cases may take on an H200
    share: int = 1  # one case in so many
    large: bool = False  # cases of gigabytes: no two such suites run at once
    commit: str = "HEAD"
    on_cpu: bool = True  # whether --cpu can run it


SUITES = {
    "quack": Suite(
        "Dao-AILab/quack",
        ("tests/test_softmax.py", "tests/test_cross_entropy.py", "tests/test_linear_cross_entropy.py"),
        "quack", workers=5, seconds=320,
    ),
    "liger": Suite(
        "linkedin/Liger-Kernel",
        (
            "test/__init__.py", "test/conftest.py", "test/utils.py", "test/transformers/test_softmax.py",
            "test/transformers/test_cross_entropy.py", "test/transformers/test_fused_linear_cross_entropy.py",
            "test/megatron/__init__.py", "test/megatron/test_cross_entropy.py",
        ),
        "liger", arguments=("test",), workers=3, seconds=170, large=True,
    ),
    "cce": Suite(
        "apple/ml-cross-entropy",
        (
            "tests/test_cce_loss_forward.py", "tests/test_cce_loss_backward.py", "tests/test_cce_lse.py",
            "cut_cross_entropy/constants.py", "cut_cross_entropy/utils.py",
        ),
        "cce", workers=5, seconds=180, share=4,
    ),
    "flash_attn": Suite(
        "Dao-AILab/flash-attention", ("tests/losses/test_cross_entropy.py",),
        "flash_attn", seconds=170, share=2, large=True,
    ),
    "torch_nn": Suite(
        "intel/torch-xpu-ops", ("test/xpu/test_nn_xpu.py",),
        "torch_nn", arguments=("test", "-k", f"({OF_NN}) and not ({LARGE}) and not cpu"), workers=3, seconds=150,
        on_cpu=False,
    ),
    "torch_nn_large": Suite(
        "intel/torch-xpu-ops", ("test/xpu/test_nn_xpu.py",),
        "torch_nn", arguments=("test", "-k", f"({OF_NN}) and ({LARGE}) and not cpu"), large=True, on_cpu=False,
    ),
    "flag_gems": Suite(
        "FlagOpen/FlagGems",
        (
            "tests/__init__.py", "tests/conftest.py", "tests/accuracy_utils.py", "tests/test_reduction_ops.py",
            "src/flag_gems/testing/__init__.py",
        ),
        "flag_gems", arguments=("tests", "-k", "(softmax and not topk) or cross_entropy_loss"), workers=4, seconds=90,
    ),
    "fla": Suite(
        "fla-org/flash-linear-attention",
        ("tests/conftest.py", "tests/modules/test_cross_entropy.py", "fla/utils/_testing.py", "fla/utils/_config.py"),
        "fla", workers=2, seconds=90,
    ),
    "attorch": Suite(
        "BobMcDear/attorch",
        (
            "tests/__init__.py", "tests/conftest.py", "tests/utils.py", "tests/test_softmax_layers.py",
            "tests/test_cross_entropy_loss_layer.py",
        ),
        "attorch", workers=4,
    ),
    "trl": Suite("huggingface/trl", ("tests/__init__.py", "tests/test_kernels.py"), "trl", commit="v1.16.0"),
    "trl_applied": Suite(
        "huggingface/trl",
        (
            "tests/__init__.py", "tests/testing_utils.py", "tests/test_utils.py", "tests/experimental/__init__.py",
            "tests/experimental/test_gkd_trainer.py",
        ),
        "trl_applied", arguments=("tests", "-k", "TestSelectiveLogSoftmax or TestGeneralizedJSDLoss"), commit="v1.16.0",
    ),
    # The last tag that has a softmax in Triton.
    "xformers": Suite(
        "facebookresearch/xformers", ("tests/test_triton_softmax.py",), "xformers", workers=4, commit="v0.0.26",
    ),
    "megatron": Suite("NVIDIA/Megatron-LM", ("tests/unit_tests/fusions/test_torch_softmax.py",), "megatron"),
    "apex": Suite(
        "NVIDIA/apex", ("apex/contrib/test/xentropy/test_label_smoothing.py",), "apex", arguments=("apex",), seconds=70
    ),
    # Some cases of these two make millions of draws, too many for a CPU.
    "flashinfer": Suite(
        "flashinfer-ai/flashinfer", ("tests/utils/test_sampling.py",),
        "flashinfer", workers=4, seconds=300, share=4, on_cpu=False,
    ),
    "vllm": Suite(
        "vllm-project/vllm",
        (
            "tests/v1/sample/utils.py", "tests/v1/sample/test_rejection_sampler.py", "tests/v1/sample/test_sampler.py",
            "tests/v1/sample/test_topk_topp_sampler.py", "tests/v1/worker/test_gpu_gumbel_sample.py",
            "vllm/v1/sample/metadata.py", "vllm/v1/sample/ops/bad_words.py", "vllm/v1/sample/ops/topk_topp_sampler.py",
            "vllm/v1/spec_decode/metadata.py",
        ),
        "vllm", arguments=("tests", "-k", f"not ({OF_VLLM_ALONE})"), workers=4, seconds=300, on_cpu=False,
        commit="v0.33.0",
    ),
    "transformers": Suite(
        "huggingface/transformers",
        ("tests/__init__.py", "tests/generation/__init__.py", "tests/generation/test_logits_process.py"),
        "transformers", arguments=("tests", "-k", "top_k or top_p or min_p or repetition or processor_list"),
        seconds=150, commit="v5.24.0",
    ),
}  # fmt: skip


class Absent(Exception):
    """What a suite lacks."""


def lay_out(suite, checkouts, folder):
    """Its shim and its files, in a new folder. Absent where something is missing."""
    name = suite.repository.partition("/")[2]
    places = [place for place in (checkouts / name, checkouts / f"{name}.git") if place.is_dir()]
    if not places:
        raise Absent(f"no checkout of {suite.repository}")
    git = places[0] / ".git" if (places[0] / ".git").exists() else places[0]
    shutil.copytree(HERE / "shims" / suite.shim, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in suite.files:
        shown = subprocess.run(["git", "--git-dir", git, "show", f"{suite.commit}:{file}"], capture_output=True)
        if shown.returncode:
            raise Absent(f"{suite.repository}: {shown.stderr.decode().strip()}")
        path = folder / file.removeprefix("src/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(shown.stdout)
    # Its own, so that pytest reads no settings of a folder above.
    (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = ignore\n")


class Run:
    """A suite's pytest, in a folder where the suite is laid out."""

    def __init__(self, suite, folder, *, workers, seconds, share, cpu):
        self.folder, self.seconds, self.began = folder, seconds, time.monotonic()
        self.lines, self.log = folder / "lines.jsonl", folder / "output.txt"
        self.stopped = False
        hidden = ("PYTEST_", "PYTHONPATH")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        environment |= {
            "PYTHONPATH": os.pathsep.join(map(str, (folder, HERE.parents[1] / "src", HERE))),
            "PEERS_SHARE": str(share), "PEERS_LINES": str(self.lines), "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }  # fmt: skip
        command = [
            sys.executable, "-m", "pytest", "-q", "--tb=short", "-n", str(workers), "--timeout", "120",
            "--continue-on-collection-errors", "-p", "no:cacheprovider", "-p", "peers_plugin", *suite.arguments,
        ]  # fmt: skip
        if cpu:
            command += ["-p", "cpu_as_cuda"]
            # Triton may be imported before this package; torch.compile would ask the GPU for its random state.
            environment |= {"FUSED_SOFTMAX_INTERPRET": "1", "TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def has_ended(self):
        late = time.monotonic() - self.began > self.seconds
        if late and self.process.poll() is None:
            self.stop()
        return self.process.poll() is not None

    def stop(self):
        """The workers too, which are of the same process group."""
        self.stopped = True
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def status(self):
        if self.stopped:
            return f"stopped after {self.seconds:.0f} s"
        if self.process.returncode in (0, 1, 5):  # all passed, some failed, none chosen
            return "ended"
        last = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()][-1:]
        return f"pytest exited with {self.process.returncode}: {''.join(last)}"

    def result(self):
        found, outcomes = {"collected": 0, "chosen": 0}, {}
        for line in self.lines.read_text().splitlines() if self.lines.exists() else ():
            line = json.loads(line)
            if "id" not in line:
                found |= line
            elif outcomes.get(line["id"], {}).get("outcome") != "failed":  # the first failure is the cause
                outcomes[line["id"]] = line
        number = Counter(line["outcome"] for line in outcomes.values())
        failed = [line for line in outcomes.values() if line["outcome"] == "failed"]
        return {
            "status": self.status(), **found, **{name: number[name] for name in ("passed", "failed", "skipped")},
            "not_run": max(0, found["chosen"] - len(outcomes)), "seconds": round(time.monotonic() - self.began),
            "failures": [{"id": line["id"], "last": line["last"]} for line in failed],
        }  # fmt: skip


def run_all(suites, checkouts, folder, asked):
    """(name, result) of each suite as it ends; side by side as far as the workers reach."""
    ends, waiting, running = time.monotonic() + asked.seconds, dict(suites), {}

    def fits(suite):
        taken = sum(min(suites[name].workers, asked.jobs) for name in running)
        large = any(suites[name].large for name in running)
        return taken + min(suite.workers, asked.jobs) <= asked.jobs and not (suite.large and large)

    try:
        while waiting or running:
            for name, suite in list(waiting.items()):
                left = ends - time.monotonic()
                if not fits(suite) and left > 0:
                    continue
                del waiting[name]
                if asked.cpu and not suite.on_cpu:
                    yield name, {"status": "needs a GPU"}
                    continue
                try:
                    lay_out(suite, checkouts, folder / name)
                except Absent as error:
                    yield name, {"status": f"absent: {error}"}
                    continue
                if left <= 0:
                    yield name, {"status": "not started in time"}
                    continue
                share = asked.share or suite.share
                seconds = left if asked.cpu else min(left, suite.seconds * max(1, suite.share / share))
                running[name] = Run(
                    suite, folder / name, workers=min(suite.workers, asked.jobs), seconds=seconds, share=share,
                    cpu=asked.cpu,
                )  # fmt: skip
            for name in [name for name, run in running.items() if run.has_ended()]:
                yield name, running.pop(name).result()
            time.sleep(0.1)
    finally:
        for run in running.values():
            run.stop()


def show(name, result):
    counts = ("collected", "chosen", "passed", "failed", "skipped", "not_run", "seconds")
    said = [f"{result[each]} {each.replace('_', ' ')}" for each in counts if each in result]
    print(f"{name}: {', '.join([result['status'], *said])}", flush=True)
    failures = result.get("failures", [])
    for failure in failures[:5]:
        print(f"    {failure['id']}: {failure['last']}", flush=True)
    if len(failures) > 5:
        print(f"    and {len(failures) - 5} more", flush=True)


def main(arguments=None, suites=SUITES):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("--only", help=f"some of {','.join(suites)}")
    parser.add_argument("--share", type=int, help="one case in so many, 1 for all; the table's own if not given")
    parser.add_argument("--seconds", type=float, default=600, help="all ends by then")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="workers of all suites together")
    parser.add_argument("--cpu", action="store_true", help="on the CPU, by Triton's interpreter: hours for all cases")
    parser.add_argument("--out", type=Path, default=Path("peers.json"))
    parser.add_argument(
        "--keep", type=Path, help="a new folder, to lay the suites out and leave them, with pytest's output"
    )
    asked = parser.parse_args(arguments)
    names = asked.only.split(",") if asked.only else list(suites)
    if unknown := set(names) - suites.keys():
        parser.error(f"no suite {', '.join(sorted(unknown))}; there are {', '.join(suites)}")
    if not asked.checkouts.is_dir():
        parser.error(f"{asked.checkouts} is no folder")
    if asked.keep and asked.keep.exists():
        parser.error(f"{asked.keep} exists")
    results = {}
    with tempfile.TemporaryDirectory() as made:
        folder = (asked.keep or Path(made)).resolve()
        for name, result in run_all({name: suites[name] for name in names}, asked.checkouts, folder, asked):
            results[name] = result
            show(name, result)
            asked.out.write_text(json.dumps(results, indent=1) + "\n")  # each time: a run may be cut off
    return any(result.get("failed") or result["status"].startswith("pytest") for result in results.values())


if __name__ == "__main__":
    sys.exit(main())
