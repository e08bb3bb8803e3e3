"""One engine on several devices: a process per rank, the same steps in all of them.

    rank 0      the engine's process: schedules, sends each step as data, runs its part, samples, answers
    ranks 1..   `rank_process`: receive steps and run their parts; they know no request

Collectives (`group`) join the parts inside a forward. `ranks` starts and watches the processes.
"""
