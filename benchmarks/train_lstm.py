"""PPO with an LSTM: flowrl and sb3-contrib's RecurrentPPO.

CartPole-v1, 8 environments x 128 steps, minibatches of 256 rows, 10 epochs. Policy and value have
an LSTM with 64 cells each, in flowrl on a layer of 64 tanh units, in sb3-contrib on the four
observed numbers and below such a layer. The networks of flowrl have 1.5 times as many weights.
sb3-contrib backpropagates through whole rollouts; flowrl is measured with sequences of as many rows
(128), and of its default 20. One thread. The first train batch is not timed. The entries run
alternately; prints medians over the rounds, and the numbers of updates.

    python benchmarks/train_lstm.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

from peer_env import run_alternately, sb3_python, spread

ENVS, BATCH, MINIBATCH, EPOCHS, BATCHES = 8, 1024, 256, 10, 8


def flowrl_run(max_seq_len: int) -> dict[str, float]:
    """Run the shipped plan."""
    from flowrl.algorithms.ppo import PPOConfig

    config = PPOConfig(
        env="CartPole-v1",
        num_envs_per_worker=ENVS,
        train_batch_size=BATCH,
        sgd_minibatch_size=MINIBATCH,
        num_sgd_iter=EPOCHS,
        lr=3e-4,
        model={
            "use_lstm": True, "lstm_cell_size": 64, "fcnet_hiddens": [64],
            "max_seq_len": max_seq_len,
        },
        seed=0,
    )  # fmt: skip
    with config.build() as algorithm:
        algorithm.train()
        updates = algorithm.workers.local_worker().get_policy().learner.num_updates
        started = time.perf_counter()
        for _ in range(BATCHES):
            result = algorithm.train()
        seconds = time.perf_counter() - started
        updates = algorithm.workers.local_worker().get_policy().learner.num_updates - updates
    return {"seconds": seconds, "updates": updates, "mean": result["episode_reward_mean"]}


def sb3_run() -> dict[str, float]:
    """Run sb3-contrib in its own virtual environment."""
    import torch
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(1)
    model = RecurrentPPO(
        "MlpLstmPolicy", make_vec_env("CartPole-v1", ENVS, seed=0), n_steps=BATCH // ENVS,
        batch_size=MINIBATCH, n_epochs=EPOCHS, learning_rate=3e-4, seed=0, device="cpu",
        policy_kwargs={"lstm_hidden_size": 64, "net_arch": {"pi": [64], "vf": [64]}},
    )  # fmt: skip
    model.learn(BATCH)
    epochs = model._n_updates
    started = time.perf_counter()
    model.learn(BATCH * BATCHES, reset_num_timesteps=False)
    seconds = time.perf_counter() - started
    updates = (model._n_updates - epochs) * (BATCH // MINIBATCH)
    mean = sum(e["r"] for e in model.ep_info_buffer) / len(model.ep_info_buffer)
    return {"seconds": seconds, "updates": updates, "mean": mean}


RUNS = {
    "flowrl, sequences of 128": lambda: flowrl_run(128),
    "flowrl, sequences of 20": lambda: flowrl_run(20),
    "sb3-contrib": sb3_run,
}


def main() -> None:
    """Run the entries and print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", choices=tuple(RUNS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(RUNS[options.one]()))
        return
    peer = sb3_python()
    pythons = {name: peer if name == "sb3-contrib" else sys.executable for name in RUNS}
    results = run_alternately(__file__, pythons, options.rounds)
    speeds = {k: [BATCH * BATCHES / r["seconds"] for r in runs] for k, runs in results.items()}
    print("\n| | env steps/s | / sb3-contrib | updates |\n|---|---:|---:|---:|")
    for name, of_entry in speeds.items():
        ratios = [a / b for a, b in zip(of_entry, speeds["sb3-contrib"], strict=True)]
        updates = results[name][0]["updates"]
        print(f"| {name} | {spread(of_entry, 0)} | {spread(ratios)} | {updates:,.0f} |")


if __name__ == "__main__":
    main()
