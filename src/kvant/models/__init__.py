"""Models: found by name, described for the plan, loaded, and run.

    locate                 a name becomes a directory, through `hub`, `gguf_import` or `demo` if needed
    read_shape, probe      the shape of a model: from its config, or by probing transformers' forward
    geometry               what every layer stores, for the plan
    select                 chooses the forward; `forward` is the interface of all forwards
    fused, cpu, modules    the forwards: Kvant's decoder, the same as compiled CPU code, transformers' layers
    load, narrow           read weights through transformers, and round them or keep their codes
    recurrent, sharding    mixers with states; the division of a model among ranks

Everything up to `select` runs before torch is imported, apart from the probe.
"""
