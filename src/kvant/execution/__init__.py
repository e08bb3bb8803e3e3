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
    recurrent states    `ModelRunner.launch` accepts drafts' states, places pages of states and loads kept
                        ones before the step, and keeps some after it. Layers reach them through
                        `StepCall.states` (`kvant.kv.state_pool`). `DeviceState` is something else: tokens,
                        lengths and pages of sequences.
    offloaded pages     No step contains one. `Scheduler._waits_for_pages` asks `kvant.kv.offload.tiers` to
                        load pages, and `Scheduler.schedule` polls it. A sequence waits until its pages are
                        on the device.

A step on a CPU takes the same path, but no graph.
"""
