"""Training on a GPU compared with LeanRL and with the machine's CPU, env steps per second.

PPO, SAC and TD3 on HalfCheetah with the settings of LeanRL's scripts (PPO: 1 environment x 2048
steps, 10 passes, minibatches of 64, two layers of 64; SAC and TD3: an update of 256 rows per step,
two layers of 256), and PPO on images (8 environments x 128 steps, 4 passes, minibatches of 256, the
network of Mnih et al. 2015, 84x84x4 bytes of random images on both sides). flowrl runs on the GPU
(`cuda`), there without CUDA graphs (`eager`), and on the CPU of the same machine (`cpu`).

The entries run in turn, each in a process of its own; prints the medians and ranges of the rounds.

`--leanrl` is the folder of the scripts of LeanRL (https://github.com/meta-pytorch/LeanRL) and
`--leanrl-path` the PYTHONPATH with what they need (gymnasium 0.29, tensordict, torchrl, tyro). They
run with CUDA graphs, PPO on HalfCheetah also with torch.compile, except for its loop over 2,048
steps, which takes too long to compile. On their SAC and TD3 torch.compile fails with PyTorch 2.11
to 2.13. PATCHES adapts them to the present versions of their libraries, MODULES replaces EnvPool by
random images. The rate is the one that a script prints. With LeanRL a row of 3 rounds takes about
2 minutes.

    python benchmarks/gpu.py [--rounds 3] [--seconds 3] [--entries cuda eager cpu]
        [--leanrl DIR [--leanrl-path PATH]]
"""

from __future__ import annotations

import argparse
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from peer_env import spread

from flowrl.algorithms.ppo import PPOConfig
from flowrl.algorithms.sac import SACConfig
from flowrl.algorithms.td3 import TD3Config

LEANRL_LIMIT = 90.0  # seconds for LeanRL to start and to compile
PATCHES = (
    ('float(info["episode"]["r"])', 'float(np.ravel(info["episode"]["r"])[0])'),
    ('float(info["episode"]["r"].reshape(()))', 'float(np.ravel(info["episode"]["r"])[0])'),
    ("action.cpu()", "action.detach().cpu()"),
    ("actions = actions.cpu()", "actions = actions.detach().cpu()"),
    ("actions.clamp(action_low, action_high).cpu()",
     "actions.detach().clamp(action_low, action_high).cpu()"),
    ("policy = agent_inference.get_action_and_value",
     "policy = torch.no_grad()(agent_inference.get_action_and_value)"),
    ("get_value = agent_inference.get_value\n",
     "get_value = torch.no_grad()(agent_inference.get_value)\n"),
    ('TensorDictModule(actor_detach.get_action, in_keys=["observation"], out_keys=["action"])',
     'TensorDictModule(actor_detach.get_action, in_keys=["observation"], '
     'out_keys=["action", "logp", "mean"])'),
    ("actions = policy(obs)\n", "actions = policy(obs)[0]\n"),
    ("gae = torch.compile(gae, fullgraph=True", "_ = dict(fullgraph=True"),
    ("Categorical.logits = property(", "_ = property("),  # fails with PyTorch 2.11
    ("Categorical.probs = property(", "_ = property("),
    ("iteration % 10 == 0", "iteration % 2 == 0"),  # print the rate more often
)  # fmt: skip
MODULES = {
    "wandb.py": """
import numpy, torch
numpy.bool8 = numpy.bool_
torch.distributions.Distribution.set_default_validate_args(False)
def init(*args, **kwargs): pass
def log(*args, **kwargs): pass
""",
    "gym.py": "from gymnasium import Wrapper, spaces",
    "envpool.py": """
import gymnasium
import numpy as np
class Images:
    action_space = gymnasium.spaces.Discrete(4)
    observation_space = gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    metadata, render_mode, spec, reward_range = {}, None, None, (0, 1)
    def __init__(self, num_envs):
        self.steps, self.num_envs = 0, num_envs
        shape = 16, num_envs, 4, 84, 84
        self.images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    def reset(self, **kwargs):
        return self.images[0]
    def step(self, actions):
        self.steps += 1
        rewards = (actions == 0).astype(np.float32)
        done = np.full(self.num_envs, self.steps % 500 == 0)
        infos = {"reward": rewards, "terminated": done.astype(int), "lives": 0 * rewards}
        return self.images[self.steps % 16], rewards, done, infos
def make(env_id, env_type, num_envs, **kwargs):
    return Images(num_envs)
""",
}


class RandomImages(gym.Env[np.ndarray, int]):
    """Returns one of 16 random images; episodes have 500 steps."""

    observation_space = gym.spaces.Box(0, 255, (84, 84, 4), np.uint8)
    action_space = gym.spaces.Discrete(4)

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.images = rng.integers(0, 256, (16, 84, 84, 4), dtype=np.uint8)
        self.steps = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        return self.images[0], {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self.images[self.steps % 16], float(action == 0), self.steps % 500 == 0, False, {}


def images(context: Any) -> RandomImages:
    return RandomImages()


HALF_CHEETAH = "HalfCheetah-v5"


def ppo(**settings: Any) -> Any:
    return PPOConfig(
        env=HALF_CHEETAH, train_batch_size=2048, sgd_minibatch_size=64, num_sgd_iter=10,
        vf_clip_param=0.2, normalize_observations=True, normalize_rewards=True, **settings,
    )  # fmt: skip


def ppo_images(**settings: Any) -> Any:
    return PPOConfig(
        env=images, num_envs_per_worker=8, train_batch_size=1024, sgd_minibatch_size=256,
        num_sgd_iter=4, entropy_coeff=0.01, vf_clip_param=0.1, clip_param=0.1, lr=2.5e-4,
        **settings,
    )  # fmt: skip


def sac(**settings: Any) -> Any:
    return SACConfig(
        env=HALF_CHEETAH, learning_starts=1000, replay_buffer_capacity=1_000_000,
        min_sample_timesteps_per_iteration=200, **settings,
    )  # fmt: skip


def td3(**settings: Any) -> Any:
    return TD3Config(
        env=HALF_CHEETAH, learning_starts=1000, replay_buffer_capacity=1_000_000,
        min_sample_timesteps_per_iteration=200, **settings,
    )  # fmt: skip


WORKLOADS: dict[str, tuple[Callable[..., Any], str, list[str]]] = {
    "PPO, HalfCheetah": (ppo, "ppo_continuous_action_torchcompile.py", ["--compile"]),
    "SAC, HalfCheetah": (
        sac, "sac_continuous_action_torchcompile.py", ["--learning-starts", "1000"],
    ),
    "TD3, HalfCheetah": (
        td3, "td3_continuous_action_torchcompile.py", ["--learning-starts", "1000"],
    ),
    "PPO, images": (ppo_images, "ppo_atari_envpool_torchcompile.py", []),
}  # fmt: skip
ENTRIES = {
    "cuda": {"device": "cuda"},
    "eager": {"device": "cuda", "cuda_graphs": False},
    "cpu": {"device": "cpu"},
}
WARM_UP = {"SAC, HalfCheetah": 1300, "TD3, HalfCheetah": 1300}  # env steps; they learn from 1000 on


def rate(algorithm: Any, seconds: float) -> float:
    """Return env steps per second of training for at least a time."""
    before, started = algorithm.env_steps, time.perf_counter()
    while time.perf_counter() - started < seconds:
        algorithm.train()
    return float((algorithm.env_steps - before) / (time.perf_counter() - started))


def measure(workload: str, entry: str, seconds: float) -> float:
    """Return the rate of flowrl."""
    make, _, _ = WORKLOADS[workload]
    algorithm = make(seed=0, **ENTRIES[entry]).build()
    while algorithm.env_steps < WARM_UP.get(workload, 4200):
        algorithm.train()
    result = rate(algorithm, seconds)
    algorithm.stop()
    return result


def run_flowrl(workload: str, entry: str, seconds: float) -> float:
    """Return the rate of flowrl, measured in a process of its own."""
    command = [sys.executable, __file__, "--measure", workload, entry, str(seconds)]
    output = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        return float(output.stdout.split()[-1])
    except (IndexError, ValueError):
        raise SystemExit(f"{workload} ({entry}) failed:\n{output.stderr[-3000:]}") from None


def prepare_leanrl(scripts: str, folder: str) -> None:
    """Write the patched scripts of LeanRL, and the modules that they import, into a folder."""
    for _, script, _ in WORKLOADS.values():
        text = Path(scripts, script).read_text()
        for old, new in PATCHES:
            text = text.replace(old, new)
        Path(folder, script).write_text(text)
    for name, text in MODULES.items():
        Path(folder, name).write_text(text)


def run_leanrl(workload: str, folder: str, path: str, seconds: float, on_gpu: bool) -> float:
    """Return the rate that LeanRL's script prints some seconds after its first one; nan if it
    prints none."""
    _, script, more = WORKLOADS[workload]
    device = ["--cudagraphs"] if on_gpu else ["--no-cuda"]
    command = [sys.executable, os.path.join(folder, script), *device, *more]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, path])}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    output, deadline = b"", time.monotonic() + LEANRL_LIMIT
    while time.monotonic() < deadline:
        if select.select([process.stdout], [], [], 0.1)[0]:
            chunk = os.read(process.stdout.fileno(), 65536)
            if not chunk:
                break
            had_rates, output = b"sps" in output, output + chunk
            if b"sps" in output and not had_rates:
                deadline = min(deadline, time.monotonic() + seconds)
    process.kill()
    process.wait()
    rates = re.findall(r"([\d.]+)\s+sps", output.decode(errors="replace"))
    if not rates:
        print(output.decode(errors="replace")[-2000:], file=sys.stderr)
    return float(rates[-1]) if rates else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--entries", nargs="+", default=["cuda"], choices=ENTRIES)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--leanrl", default="")
    parser.add_argument("--leanrl-path", default="")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        workload, entry, seconds = options.measure
        print(measure(workload, entry, float(seconds)))
        return
    needs_gpu = set(options.entries) != {"cpu"}
    if needs_gpu and not torch.cuda.is_available():
        print("there is no GPU: nothing was measured (--entries cpu measures the CPU)")
        return
    if torch.cuda.is_available():
        print(torch.cuda.get_device_name(), "PyTorch", torch.__version__, flush=True)
    columns = [*options.entries, *(["LeanRL"] if options.leanrl else [])]
    others = columns[1:]
    ratios = "".join(f" {columns[0]} / {other} |" for other in others)
    print(f"\n| env steps/s | {' | '.join(columns)} |{ratios}")
    print(f"|---|{'---:|' * (len(columns) + len(others))}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        if options.leanrl:
            prepare_leanrl(options.leanrl, folder)
        for workload in options.workloads:
            rates: dict[str, list[float]] = {column: [] for column in columns}
            for _ in range(options.rounds):
                for entry in options.entries:
                    rates[entry].append(run_flowrl(workload, entry, options.seconds))
                if options.leanrl:
                    peer = run_leanrl(
                        workload, folder, options.leanrl_path, options.seconds, needs_gpu
                    )
                    rates["LeanRL"].append(peer)
            figures = " | ".join(spread(values, 0) for values in rates.values())
            first = rates[columns[0]]
            cells = [
                spread(a / b for a, b in zip(first, rates[other], strict=True)) for other in others
            ]
            print(f"| {' | '.join([workload, figures, *cells])} |", flush=True)


if __name__ == "__main__":
    main()
