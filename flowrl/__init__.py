"""flowrl: reinforcement-learning algorithms as dataflow.

Packages: `iter` (dataflow engine), `data` (batches, checkpoints), `envs`, `policies`, `learners`,
`sampling` (rollout workers), `replay` (replay buffers), `offline` (recorded data), `ops` (operators
of plans), `trainer` (Algorithm and its config), `algorithms`, `cli`.
"""

__version__ = "0.1.0"
