"""Runs one step: builds its inputs, replays its CUDA graph or runs the forward, and reads its results.

Start at `ModelRunner.launch` in `runner`: the engine calls it once per step.

    runner          one model, the pools of its pages, and its backends; launches steps
    batch           a step's tensors if the host builds them; what a launched step is, and its outcome
    device_state    running sequences on the device, one row each
    graphs          recorded steps, which read and write these rows; triton_step has kernels for them
    recorder        records a step as a CUDA graph; shared_logits holds the logits of all of them
    speculation     chooses how many drafts a step gets, and counts accepted ones; proposing loads the drafter
    warm_up         compiles kernels before the first request

Where other rooms join a step:

    other GPUs          `RankedRunner.launch` (`kvant.parallel.runner`) sends the step to the other ranks and
                        calls `ModelRunner.launch`. Collectives inside the forward join the ranks' parts.
    recurrent states    `ModelRunner.launch` places and copies pages of states before and after the step.
                        Layers reach them through `StepCall.states` (`kvant.kv.state_pool`).
    offloaded pages     No step contains one. `Scheduler.schedule` polls `kvant.kv.offload.tiers`. A sequence
                        waits until its pages are on the device.

A step on a CPU takes the same path, but no graph.
"""
