"""flowrl: reinforcement-learning algorithms as dataflow.

Rooms: `iter` (the engine), `data` (what flows), `policies` (what is learned), `sampling` (where
experience is made), `ops` (what is done to it), `algorithms` (the maths and the knobs).
"""

__version__ = "0.1.0"
