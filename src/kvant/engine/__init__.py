"""The engine: from a request to tokens.

    build       plans and loads: `EngineConfig` becomes an `Engine`
    engine      submit, step, cancel: schedules and launches a step, then commits the step before
    requests    live requests, from their check to their result
    text        conversations become token ids, and new token ids become text
    llm         `LLM`: steps the engine in the caller's thread
    driver      steps the engine for many requesters

The server's engine process runs the driver itself; `AsyncLLM` runs it in the thread of `worker`.
"""
