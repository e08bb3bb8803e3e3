"""Tensor parallelism: one engine on several devices, with one process per rank and equal steps in all.

    rank 0      the engine's process: schedules, sends each step as data, runs its part, samples, answers
    ranks 1..   `rank_process`: receive steps and run their parts; they know no requests

Collectives (`group`) join the parts inside a forward. `ranks` starts and watches the processes.
"""
