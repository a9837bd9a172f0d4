"""The planner: will a run fit, how fast is it, which degrees work. No GPU.

    hardware.py                what is known about GPUs, networks and kernels
    run.py, settings.py        a run, and the TOML sections it comes from
    footprint.py, step_time.py the model: bytes of a GPU, seconds of a step
    plan.py                    both for one run
    balance.py, search.py      comparisons: layouts of the ring, degrees and levers
    data.py                    documents of a sequence, from prepared folders
    report.py, log.py          text, JSON and TOML; one line for the log of a training run
    published.py               published runs that the model is held against

docs/reference/planner.md has the comparison and says what is not modelled.
"""
