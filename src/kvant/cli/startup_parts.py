"""Times each part of a start: does what `kvant chat` does until its first token, in this process.

python -m kvant.cli.startup_parts CREATED
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise

from kvant.measure.startup import QUESTION


def note_parts(created: float) -> dict[str, float]:
    """Returns the seconds of each part of a start. created: `time.monotonic` at the process's creation."""
    marks = [("", created)]

    def mark(name: str) -> None:
        marks.append((name, time.monotonic()))

    mark("Python")
    import kvant.cli.main
    from kvant.engine.build import plan_engine
    from kvant.engine.llm import LLM
    from kvant.plan.config import config_of
    from kvant.sampling.sampling_params import SamplingParams

    mark("command line")
    config = config_of(None, {"max_num_seqs": 1})
    plan_engine(config)
    mark("finding the model, planning")
    import torch  # noqa: F401

    mark("import torch")
    import kvant.execution.runner
    import kvant.models.load  # noqa: F401

    mark("import transformers and the engine")
    llm = LLM.from_config(config)
    mark("tokenizer, weights, kernels")
    prompt = llm.encode_chat([{"role": "user", "content": QUESTION}])
    next(iter(llm.stream(prompt, SamplingParams(temperature=0, max_tokens=2))))
    mark("first token")
    return {name: after - before for (_, before), (name, after) in pairwise(marks)}


if __name__ == "__main__":
    print(json.dumps(note_parts(float(sys.argv[1]))))
